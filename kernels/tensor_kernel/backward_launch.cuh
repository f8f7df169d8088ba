// SPDX-License-Identifier: Apache-2.0
// A call of the backward becomes tensor maps, grids and compiled kernels. Instantiated for each element type in a file of its
// own.
#pragma once

#include <algorithm>
#include <stdexcept>

#include <faultline/tensor_kernel/backward.cuh>
#include <faultline/tensor_kernel/backward.hpp>
#include <faultline/tensor_kernel/backward_rows.cuh>
#include <faultline/tensor_kernel/backward_steps.cuh>
#include <faultline/tensor_kernel/backward_workspace.hpp>
#include <faultline/tensor_kernel/head_map.cuh>

namespace faultline::tensor_kernel {

inline unsigned blocks_of(std::int64_t work, int each) { return static_cast<unsigned>((work + each - 1) / each); }

template <class T, class O, int d>
void prepare(const BackwardCall& call, const BackwardWorkspace& at, const O* o, const BackwardVariant& variant,
             cudaStream_t stream) {
    const std::int64_t rows = static_cast<std::int64_t>(call.batch) * call.heads * at.n_padded;
    const float unit = variant.base == ExpBase::e ? 1.0f : 1.44269502162933349609375f;  // log2(e) in fp32
    const PrepareArguments<T, O> in{static_cast<const T*>(call.dout),
                                    o,
                                    call.lse,
                                    at.lse,
                                    at.delta,
                                    reinterpret_cast<float4*>(at.dq),
                                    call.dout_strides.row,
                                    call.dout_strides.head,
                                    call.dout_strides.batch,
                                    call.o_strides.row,
                                    call.o_strides.head,
                                    call.o_strides.batch,
                                    call.heads,
                                    call.n_q,
                                    at.n_padded,
                                    rows,
                                    unit};
    const auto run = variant.delta_order == DeltaOrder::octet_pairs ? prepare_backward<T, O, d, DeltaOrder::octet_pairs>
                                                                    : prepare_backward<T, O, d, DeltaOrder::octets>;
    run<<<blocks_of(rows * (d / 8), prepare_threads), prepare_threads, 0, stream>>>(in);
    check(cudaGetLastError(), "launching the backward's first step");
}

template <class T>
CUtensorMap queries_map(const BackwardCall& call, const void* base, const Strides& strides, int rows) {
    return head_map<T>(base, strides, call.batch, call.heads, call.n_q, call.head_dim, rows);
}
template <class T>
CUtensorMap keys_map(const BackwardCall& call, const void* base, const Strides& strides, int rows) {
    return head_map<T>(base, strides, call.batch, call.kv_heads, call.n_k, call.head_dim, rows);
}
inline float exponent_of(const BackwardCall& call, const BackwardVariant& variant) {
    const auto scale = static_cast<float>(call.scale);
    return variant.base == ExpBase::e ? scale : static_cast<float>(static_cast<double>(scale) * 1.4426950408889634074);
}

/// Delta of P and dP, or the factors of a projection.
template <class T, int d, class Variant, bool projected>
void run_rows(const BackwardCall& call, const BackwardWorkspace& at, const BackwardKernel& kernel,
              cudaStream_t stream) {
    using Tiles = RowTiles<T, d>;
    RowArguments in{};
    in.q = queries_map<T>(call, call.q, call.q_strides, Tiles::block_q);
    in.dout = queries_map<T>(call, call.dout, call.dout_strides, Tiles::block_q);
    in.k = keys_map<T>(call, call.k, call.k_strides, Tiles::block_k);
    in.v = keys_map<T>(call, call.v, call.v_strides, Tiles::block_k);
    in.lse = at.lse;
    in.delta = at.delta;
    in.factor = at.factor;
    in.largest = at.largest;
    in.heads = call.heads;
    in.kv_heads = call.kv_heads;
    in.n_q = call.n_q;
    in.n_k = call.n_k;
    in.n_padded = at.n_padded;
    in.causal = call.causal;
    in.scale = static_cast<float>(call.scale);
    in.exponent = exponent_of(call, Variant::value);
    in.delta_from = kernel.delta_from;
    in.zero_sum = kernel.zero_sum;
    const auto run = backward_rows<T, Tiles, Variant, projected>;
    check(cudaFuncSetAttribute(run, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles::shared_bytes),
          "setting the shared memory of the tensor-core backward");
    const dim3 grid(blocks_of(call.n_q, Tiles::block_q), static_cast<unsigned>(call.batch * call.heads));
    run<<<grid, Tiles::threads, Tiles::shared_bytes, stream>>>(in);
    check(cudaGetLastError(), "launching the row sums of the tensor-core backward");
}

template <class T, int d, class Variant>
void run_backward(const BackwardCall& call, const BackwardWorkspace& at, ZeroSum zero_sum, cudaStream_t stream) {
    using Tiles = BackwardTiles<T, d>;
    constexpr BackwardVariant variant = Variant::value;
    BackwardArguments in{};
    in.q = queries_map<T>(call, call.q, call.q_strides, Tiles::block_q);
    in.dout = queries_map<T>(call, call.dout, call.dout_strides, Tiles::block_q);
    in.k = keys_map<T>(call, call.k, call.k_strides, Tiles::block_k);
    in.v = keys_map<T>(call, call.v, call.v_strides, Tiles::block_k);
    in.dk = call.dk;
    in.dv = call.dv;
    in.dk_row = call.dk_strides.row;
    in.dk_head = call.dk_strides.head;
    in.dk_batch = call.dk_strides.batch;
    in.dv_row = call.dv_strides.row;
    in.dv_head = call.dv_strides.head;
    in.dv_batch = call.dv_strides.batch;
    in.lse = at.lse;
    in.delta = at.delta;
    in.factor = at.factor;
    in.largest = at.largest;
    in.zero_sum = zero_sum;
    in.dq = at.dq;
    in.turn = call.deterministic ? at.turn : nullptr;
    in.kv_heads = call.kv_heads;
    in.group = call.heads / call.kv_heads;
    in.n_q = call.n_q;
    in.n_k = call.n_k;
    in.n_padded = at.n_padded;
    in.q_tiles = at.q_tiles;
    in.k_tiles = (call.n_k + Tiles::block_k - 1) / Tiles::block_k;
    in.all_heads = call.batch * call.kv_heads;
    // Q, dO and dq of the heads in work at once stay in the second-level cache: of those tried on an H200 (50 MB) the best.
    const double head_bytes = 8.0 * call.n_q * d * in.group;
    in.heads_at_once = std::clamp(static_cast<int>(21e6 / head_bytes), 1, in.all_heads);
    in.causal = call.causal;
    in.scale = static_cast<float>(call.scale);
    in.exponent = exponent_of(call, variant);
    const auto run = backward<T, Tiles, Variant>;
    check(cudaFuncSetAttribute(run, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles::shared_bytes),
          "setting the shared memory of the tensor-core backward");
    run<<<in.k_tiles * in.all_heads, Tiles::threads, Tiles::shared_bytes, stream>>>(in);
    check(cudaGetLastError(), "launching the tensor-core backward");
}

template <class T, int d>
void finish(const BackwardCall& call, const BackwardWorkspace& at, const BackwardVariant& variant,
            cudaStream_t stream) {
    const FinishArguments<T> in{at.dq,
                                static_cast<T*>(call.dq),
                                call.dq_strides.row,
                                call.dq_strides.head,
                                call.dq_strides.batch,
                                call.heads,
                                call.n_q,
                                at.q_tiles,
                                variant.ds_scale == DsScale::before ? 1.0f : static_cast<float>(call.scale)};
    finish_backward<T, d><<<dim3(2 * at.q_tiles, call.batch * call.heads), 128, 0, stream>>>(in);
    check(cudaGetLastError(), "launching the backward's last step");
}

template <class T, int d, class Variant>
bool run_if(const BackwardCall& call, const BackwardWorkspace& at, const BackwardKernel& kernel, cudaStream_t stream) {
    if (kernel.variant != Variant::value) return false;
    constexpr bool has_row_pass = Variant::value == Fused::value || Variant::value.projected;
    if (needs_dp(kernel.delta_from)) {
        if constexpr (has_row_pass)
            run_rows<T, d, Fused, false>(call, at, kernel, stream);
        else
            return false;
    }
    if constexpr (Variant::value.projected) run_rows<T, d, Fused, true>(call, at, kernel, stream);
    run_backward<T, d, Variant>(call, at, kernel.zero_sum, stream);
    return true;
}

template <class T, int d>
void launch_backward_of(const BackwardCall& call, const BackwardKernel& kernel, cudaStream_t stream) {
    const BackwardWorkspace at(call);
    if (call.deterministic)
        check(cudaMemsetAsync(at.turn, 0, at.turn_bytes(), stream), "clearing the turns of the tensor-core backward");
    if (kernel.delta_from == DeltaFrom::o_unrounded)
        prepare<T, float, d>(call, at, call.o_unrounded, kernel.variant, stream);
    else
        prepare<T, T, d>(call, at, needs_dp(kernel.delta_from) ? nullptr : static_cast<const T*>(call.o),
                         kernel.variant, stream);
    const bool known =
        run_if<T, d, Fused>(call, at, kernel, stream) || run_if<T, d, Unfused>(call, at, kernel, stream) ||
        run_if<T, d, ScaledBeforeCast>(call, at, kernel, stream) ||
        run_if<T, d, CorrectlyRounded>(call, at, kernel, stream) || run_if<T, d, CudnnLike>(call, at, kernel, stream) ||
        run_if<T, d, Projected>(call, at, kernel, stream);
    if (!known) throw std::invalid_argument("tensor_kernel: not one of the kernels that supported_backward() names");
    finish<T, d>(call, at, kernel.variant, stream);
}

}  // namespace faultline::tensor_kernel
