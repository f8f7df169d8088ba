// SPDX-License-Identifier: Apache-2.0
// The forward on tensor cores: by wgmma on Hopper (compute capability 9.0), by mma.sync from 8.0 on. In a build without CUDA
// the functions are there and say so.
//
// Bits: o and lse are those of kernels/cpu under the same plan, wherever no p of a row underflows: ex2 here is MUFU.EX2, which
// returns 0 for a result below 2^-126, where the emulation keeps the subnormal; p that small is lost beside the row's
// largest p, 1, in every sum, except under stable_max, which may leave a row without a p of 1. lib/tensor_core's rules
// for Hopper's mma and wgmma are the card's (docs/results/tensor-core-rule.md); those of other cards' mma are not checked. lse in
// e4m3 is as the plan has it (log sum - 8 ln 2 in fp32, where FlashAttention-3 takes the logarithm of the sum over 256).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <faultline/cpu/attention.hpp>
#include <faultline/tensor_kernel/forward_kernel.hpp>

namespace faultline::tensor_kernel {

/// Elements from one row, head, batch element to the next; head_dim is contiguous. Multiples of 8.
struct Strides {
    std::int64_t row = 0, head = 0, batch = 0;
};

/// One call, on device memory, whose rows of e4m3 are multiples of 16 elements apart. q, o [batch, heads, n_q, head_dim]; k, v [batch, kv_heads, n_k, head_dim], all of the
/// kernel's element type and 16-byte aligned; lse [batch, heads, n_q] contiguous, fp32, natural units, +inf where a row sees
/// no key (o is 0 there). heads is a multiple of kv_heads: query head h reads key head h / (heads / kv_heads).
struct ForwardCall {
    int batch = 1, heads = 1, kv_heads = 1, n_q = 0, n_k = 0, head_dim = 0;
    bool causal = true;  ///< key j is visible to query i when j <= i + n_k - n_q
    double scale = 0;    ///< 1/sqrt(head_dim), or what the model uses
    const void* q = nullptr;
    const void* k = nullptr;
    const void* v = nullptr;
    void* o = nullptr;
    float* o_unrounded = nullptr;  ///< null, or o before its cast, with o's strides
    float* lse = nullptr;
    /// Null, or [batch, heads, row_groups(n_q)]: the largest scaled score of 16 rows each, -inf where none sees a key. It is
    /// the score's, whatever the variant makes of a repeated maximum.
    float* largest = nullptr;
    Strides q_strides, k_strides, v_strides, o_strides;
    /// Of e4m3 (o is bf16), each null or fp32 [batch, kv_heads], what the elements are to be multiplied with: scale by q's and
    /// k's product in fp32, the output, where it is divided by the row sum, by v's (flash-attention 0251105a,
    /// hopper/flash_fwd_kernel_sm90.h:408-414, softmax.h:144).
    const float* q_descale = nullptr;
    const float* k_descale = nullptr;
    const float* v_descale = nullptr;
    void* workspace = nullptr;  ///< forward_workspace() bytes, 16-byte aligned; nothing in it outlives the call
};
/// Bytes that a call needs between its steps: of e4m3 v transposed, 0 of others.
[[nodiscard]] std::size_t forward_workspace(const ForwardCall& call, const ForwardKernel& kernel);
/// Groups of 16 rows, as the warps take them.
[[nodiscard]] constexpr int row_groups(int n_q) { return (n_q + 15) / 16; }

/// Strides of a contiguous [batch, heads, rows, head_dim].
[[nodiscard]] constexpr Strides contiguous(int heads, std::int64_t rows, int head_dim) {
    return {head_dim, rows * head_dim, heads * rows * head_dim};
}

/// Whether this build has the kernel.
[[nodiscard]] bool is_built();

/// Launches the kernel on a stream (cudaStream_t; null: the default stream) and does not wait. WorkError, one sentence: no
/// CUDA in this build, no device of the compute capability that the kernel's unit needs, a launch that fails. std::invalid_argument: shapes that do not
/// fit. At most 64 launches of a device may be in flight at once.
void launch_forward(const ForwardCall& call, const ForwardKernel& kernel, void* stream = nullptr);

/// attention_forward of kernels/cpu for every group, on the device; all have the shapes, scale and mask of the first. By the
/// unit asked for, or that which the device has (wgmma on 9.0, else mma).
/// RequestError where the plan is not one that the kernels run (supported), or there is a bias, softcap, sink or dropout;
/// WorkError as launch_forward.
[[nodiscard]] std::vector<GroupForward> attention_forward(std::span<const HeadGroup> groups, const RoundingPlan& plan,
                                                          std::optional<Unit> unit = std::nullopt);

}  // namespace faultline::tensor_kernel
