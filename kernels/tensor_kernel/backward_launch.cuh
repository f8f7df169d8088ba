// SPDX-License-Identifier: Apache-2.0
// A call of the backward becomes tensor maps, grids and compiled kernels. Instantiated for each element type in a file of its
// own.
#pragma once

#include <algorithm>
#include <stdexcept>

#include <faultline/tensor_kernel/backward.cuh>
#include <faultline/tensor_kernel/backward_common.cuh>
#include <faultline/tensor_kernel/backward_rows.cuh>
#include <faultline/tensor_kernel/head_map.cuh>
#include <faultline/tensor_kernel/run_beside.cuh>

namespace faultline::tensor_kernel {

template <class T>
CUtensorMap queries_map(const BackwardCall& call, const void* base, const Strides& strides, int rows) {
    return head_map<T>(base, strides, call.batch, call.heads, call.n_q, call.head_dim, rows);
}
template <class T>
CUtensorMap keys_map(const BackwardCall& call, const void* base, const Strides& strides, int rows) {
    return head_map<T>(base, strides, call.batch, call.kv_heads, call.n_k, call.head_dim, rows);
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

template <class T, int d, class Variant, class Rec = NoBackwardRecorder>
void run_backward(const BackwardCall& call, const BackwardWorkspace& at, ZeroSum zero_sum,
                  const typename Rec::Arguments& recording, cudaStream_t stream) {
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
    in.zero_sums = call.zero_sums;
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
    const int blocks = in.k_tiles * in.all_heads;
    const auto start = [&](auto* run, int count, bool beside_the_last, const auto& second) {
        check(cudaFuncSetAttribute(run, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles::shared_bytes),
              "setting the shared memory of the tensor-core backward");
        run_beside(run, dim3(count), Tiles::threads, Tiles::shared_bytes, stream, beside_the_last, in, second);
    };
    const auto run = backward<T, Tiles, Variant, Rec>;
    if constexpr (Rec::records) {
        auto arguments = recording;
        arguments.list_for(in);
        const int listed = arguments.listed;
        // Those that are looked at come first, since they take longer and would end late after all others.
        start(run, listed > 0 ? listed : blocks, false, arguments);
        if (listed > 0 && listed < blocks) start(backward_others<T, Tiles, Variant>, blocks, true, arguments.set());
    } else {
        start(run, blocks, false, recording);
    }
}

/// Everything but the main kernel, which `main` launches.
template <class T, int d, class Main>
void launch_steps(const BackwardCall& call, const BackwardKernel& kernel, cudaStream_t stream, const Main& main) {
    const BackwardWorkspace at(call);
    const bool has_row_pass = kernel.variant == Fused::value || kernel.variant.projected;
    if (needs_dp(kernel.delta_from) && !has_row_pass)
        throw std::invalid_argument("tensor_kernel: not one of the kernels that supported_backward() names");
    if (call.deterministic)
        check(cudaMemsetAsync(at.turn, 0, at.turn_bytes(), stream), "clearing the turns of the tensor-core backward");
    if (kernel.delta_from == DeltaFrom::o_unrounded)
        prepare<T, float, d>(call, at, call.o_unrounded, kernel.variant, stream);
    else
        prepare<T, T, d>(call, at, needs_dp(kernel.delta_from) ? nullptr : static_cast<const T*>(call.o),
                         kernel.variant, stream);
    if (needs_dp(kernel.delta_from)) run_rows<T, d, Fused, false>(call, at, kernel, stream);
    if (kernel.variant.projected) run_rows<T, d, Fused, true>(call, at, kernel, stream);
    main(at);
    finish<T, d>(call, at, kernel.variant, stream);
}

template <class T, int d>
void launch_backward_of(const BackwardCall& call, const BackwardKernel& kernel, cudaStream_t stream) {
    launch_steps<T, d>(call, kernel, stream, [&](const BackwardWorkspace& at) {
        const auto run_if = [&]<class Variant>(Variant) {
            if (kernel.variant != Variant::value) return false;
            run_backward<T, d, Variant>(call, at, kernel.zero_sum, {}, stream);
            return true;
        };
        const bool known = run_if(Fused{}) || run_if(Unfused{}) || run_if(ScaledBeforeCast{}) ||
                           run_if(CorrectlyRounded{}) || run_if(CudnnLike{}) || run_if(Projected{});
        if (!known)
            throw std::invalid_argument("tensor_kernel: not one of the kernels that supported_backward() names");
    });
}

}  // namespace faultline::tensor_kernel
