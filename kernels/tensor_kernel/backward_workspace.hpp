// SPDX-License-Identifier: Apache-2.0
// What the backward expects of a call; what it keeps between its steps, and where in BackwardCall::workspace it lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include <faultline/tensor_kernel/backward.hpp>

namespace faultline::tensor_kernel {

struct BackwardWorkspace {
    int q_tiles, n_padded;    ///< query tiles of a head; their rows
    float* dq = nullptr;      ///< [batch * heads, n_padded, head_dim] fp32, in the order of the accumulators
    float* lse = nullptr;     ///< [batch * heads, n_padded]
    float* delta = nullptr;   ///< the same
    float* factor = nullptr;  ///< the same, as the next: of a projection
    int* largest = nullptr;
    int* turn = nullptr;  ///< [batch * heads, query tiles of the main kernel], of at least 64 rows each
    std::size_t bytes;    ///< of all of it

    explicit BackwardWorkspace(const BackwardCall& call) {
        const int block_q = call.head_dim == 64 ? 128 : 64;  // BackwardTiles
        q_tiles = (call.n_q + block_q - 1) / block_q;
        n_padded = q_tiles * block_q;
        const std::size_t heads = static_cast<std::size_t>(call.batch) * static_cast<std::size_t>(call.heads);
        const std::size_t rows = heads * static_cast<std::size_t>(n_padded);
        turns_ = rows / 64;
        bytes = rows * (static_cast<std::size_t>(call.head_dim) + 4) * sizeof(float) + turn_bytes();
        if (call.workspace == nullptr) return;
        dq = static_cast<float*>(call.workspace);
        lse = dq + rows * static_cast<std::size_t>(call.head_dim);
        delta = lse + rows;
        factor = delta + rows;
        largest = reinterpret_cast<int*>(factor + rows);
        turn = largest + rows;
    }
    [[nodiscard]] std::size_t turn_bytes() const { return turns_ * sizeof(int); }

  private:
    std::size_t turns_;
};

/// Of e4m3, behind a BackwardWorkspace: q, k and v in bf16, contiguous.
struct WidenedInputs {
    std::size_t q, k, v, end;  ///< bytes from the workspace's beginning

    explicit WidenedInputs(const BackwardCall& call) {
        const auto bytes = [&](int heads, int rows) {
            return sizeof(std::uint16_t) * static_cast<std::size_t>(call.batch) * static_cast<std::size_t>(heads) *
                   static_cast<std::size_t>(rows) * static_cast<std::size_t>(call.head_dim);
        };
        const auto next = [](std::size_t at) { return (at + 127) / 128 * 128; };
        q = next(BackwardWorkspace(call).bytes);
        k = next(q + bytes(call.heads, call.n_q));
        v = next(k + bytes(call.kv_heads, call.n_k));
        end = v + bytes(call.kv_heads, call.n_k);
    }
};

inline std::size_t workspace_bytes(const BackwardCall& call, Element element) {
    return element == Element::e4m3 ? WidenedInputs(call).end : BackwardWorkspace(call).bytes;
}

/// std::invalid_argument where a call does not fit the kernel.
inline void expect_backward(const BackwardCall& call, const BackwardKernel& kernel) {
    const bool positive =
        call.batch > 0 && call.heads > 0 && call.kv_heads > 0 && call.n_q > 0 && call.n_k > 0 && call.scale > 0;
    if (!positive || call.heads % call.kv_heads != 0 || (call.head_dim != 64 && call.head_dim != 128))
        throw std::invalid_argument(
            "tensor_kernel: sizes must be positive, heads a multiple of kv_heads, head_dim 64 or 128");
    if (call.workspace == nullptr) throw std::invalid_argument("tensor_kernel: the backward needs its workspace");
    const void* const o = kernel.delta_from == DeltaFrom::o_unrounded ? call.o_unrounded : call.o;
    if (!needs_dp(kernel.delta_from) && o == nullptr)
        throw std::invalid_argument("tensor_kernel: the kernel makes delta of an o that the call does not have");
    const bool is_descaled = call.q_descale != nullptr || call.k_descale != nullptr || call.v_descale != nullptr;
    const bool is_fused = kernel.variant == BackwardVariant{} && !needs_dp(kernel.delta_from);
    if (is_descaled && (kernel.element != Element::e4m3 || !is_fused))
        throw std::invalid_argument(
            "tensor_kernel: the backward takes descale factors in e4m3, variant fused, delta of o");
    const auto whole = [](const Strides& s) { return (s.row | s.head | s.batch) % 16 == 0; };
    if (kernel.element == Element::e4m3 &&
        (kernel.unit != Unit::wgmma || !whole(call.q_strides) || !whole(call.k_strides) || !whole(call.v_strides)))
        throw std::invalid_argument(
            "tensor_kernel: the backward in e4m3 is by wgmma, of rows, heads and batch elements of q, k and v that are "
            "multiples of 16 elements apart");
}

/// Nor the kernels with faults, which are there in bf16, and some in fp16.
inline void expect_altered(const BackwardCall& call, const BackwardKernel& kernel, bool in_fp16) {
    expect_backward(call, kernel);
    const bool has_element = kernel.element == Element::bf16 || (in_fp16 && kernel.element == Element::fp16);
    if (kernel.unit != Unit::wgmma || !has_element || kernel.variant != BackwardVariant{} ||
        call.heads != call.kv_heads)
        throw std::invalid_argument(std::string("tensor_kernel: the backward is altered by wgmma in bf16") +
                                    (in_fp16 ? " or fp16" : "") +
                                    ", variant fused, as many heads of keys as of queries");
}

}  // namespace faultline::tensor_kernel
