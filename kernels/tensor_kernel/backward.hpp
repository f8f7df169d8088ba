// SPDX-License-Identifier: Apache-2.0
// The backward on tensor cores: by wgmma on Hopper (compute capability 9.0), by mma.sync from 8.0 on. In a build without CUDA
// the functions are there and say so.
//
// Bits: dk and dv of one query head for each key head, and with `deterministic` dq, are those of kernels/cpu under
// backward_plan or a variant of it, but for this: ex2 here is MUFU.EX2, which returns 0 for a result below 2^-126, where the
// emulation keeps the subnormal p. Where query heads share a key head, their sum goes on in the accumulator of the tensor
// cores, where the emulation adds each head's dk in fp32. Without `deterministic` dq's key tiles add up in any order. Delta of P
// and dP is summed over a row by four threads, each over its columns of every tile, where the emulation goes from key to key.
// A zero-sum projection is a second ds, cast to the element type, that is multiplied as ds is: what it takes off is off by
// 2^-9 of itself, and the sum of a row by as much of what the casts had left.
// In e4m3 (preset fa3-fp8, whose backward is in bf16 on the same values) q, k and v are brought to bf16 first, which has every
// number of e4m3, and all of this holds of the backward in bf16; a descale factor of v rounds dP once more.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <faultline/cpu/attention.hpp>
#include <faultline/tensor_kernel/backward_kernel.hpp>
#include <faultline/tensor_kernel/forward.hpp>

namespace faultline::tensor_kernel {

/// One call, on device memory. q, o, dout, dq [batch, heads, n_q, head_dim]; k, v, dk, dv [batch, kv_heads, n_k, head_dim],
/// all of the kernel's element type (e4m3: q, k and v alone, whose rows are multiples of 16 elements apart; the others are bf16)
/// and 16-byte aligned; lse [batch, heads, n_q] contiguous, fp32, natural units, infinite
/// where a row sees no key. heads is a multiple of kv_heads: query head h reads key head h / (heads / kv_heads).
struct BackwardCall {
    int batch = 1, heads = 1, kv_heads = 1, n_q = 0, n_k = 0, head_dim = 0;
    bool causal = true;          ///< key j is visible to query i when j <= i + n_k - n_q
    bool deterministic = false;  ///< dq's key tiles add up in descending order: two runs give the same bits
    double scale = 0;            ///< 1/sqrt(head_dim), or what the model uses
    const void* q = nullptr;
    const void* k = nullptr;
    const void* v = nullptr;
    const void* o = nullptr;             ///< read where delta is made of it
    const float* o_unrounded = nullptr;  ///< o before its cast, with o's strides, read where delta is made of it
    const void* dout = nullptr;
    const float* lse = nullptr;
    void* dq = nullptr;
    void* dk = nullptr;
    void* dv = nullptr;
    /// Null, or [batch, kv_heads, zero_sum_parts(n_k), 2]: the sum of the cast ds over 16 keys and all queries of the key head,
    /// and the sum of its magnitudes; with ds_scale before the cast in units of the scaled ds, as the plan has it there.
    double* zero_sums = nullptr;
    /// Bytes by backward_workspace(), 128-byte aligned; nothing in it outlives the call.
    void* workspace = nullptr;
    Strides q_strides, k_strides, v_strides, o_strides, dout_strides, dq_strides, dk_strides, dv_strides;
    /// Of e4m3, variant fused, each null or fp32 [batch, kv_heads]: ForwardCall's. The gradients are those of the elements times
    /// their factors: q's and k's product multiplies the scale, in fp32, v's dP, k's factor scale in dq and q's scale in dk.
    const float* q_descale = nullptr;
    const float* k_descale = nullptr;
    const float* v_descale = nullptr;
};

/// Groups of 16 keys, of whole key tiles, as the warps take them.
[[nodiscard]] constexpr int zero_sum_parts(int n_k) { return (n_k + 127) / 128 * 8; }

/// Bytes of device memory that a call of these sizes needs for dq in fp32, and numbers of rows; of e4m3 for q, k and v in bf16
/// too.
[[nodiscard]] std::size_t backward_workspace(const BackwardCall& call, Element element = Element::bf16);

/// Launches the kernels on a stream (cudaStream_t; null: the default stream) and does not wait. WorkError, one sentence: no
/// CUDA in this build, no device of the compute capability that the kernel's unit needs, a launch that fails. std::invalid_argument: shapes that do not
/// fit.
void launch_backward(const BackwardCall& call, const BackwardKernel& kernel, void* stream = nullptr);

/// attention_backward of kernels/cpu for every group from what its forward left, on the device, deterministic; all have the
/// shapes, scale and mask of the first. RequestError where the plan is not one that the kernels run (supported_backward), or
/// there is a bias, softcap, sink or dropout; WorkError as launch_backward.
[[nodiscard]] std::vector<GroupBackward> attention_backward(std::span<const HeadGroup> groups,
                                                            std::span<const GroupForward> forwards,
                                                            const RoundingPlan& plan);

}  // namespace faultline::tensor_kernel
