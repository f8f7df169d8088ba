// SPDX-License-Identifier: Apache-2.0
// A call of the forward becomes tensor maps, a grid and one of the compiled kernels. Instantiated for each element type in a
// file of its own.
#pragma once

#include <atomic>
#include <stdexcept>

#include <faultline/tensor_kernel/forward.cuh>
#include <faultline/tensor_kernel/forward.hpp>
#include <faultline/tensor_kernel/head_map.cuh>

namespace faultline::tensor_kernel {

/// Counters of the launches in flight (of this element type); each kernel leaves its own at zero.
static __device__ int next_tiles[64];

template <class T, class Tiles, class Variant>
void launch(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    static std::atomic<unsigned> launches{0};
    ForwardArguments<T> in{};
    in.q = head_map<T>(call.q, call.q_strides, call.batch, call.heads, call.n_q, call.head_dim, Tiles::block_q);
    in.k = head_map<T>(call.k, call.k_strides, call.batch, call.kv_heads, call.n_k, call.head_dim, Tiles::block_k);
    in.v = head_map<T>(call.v, call.v_strides, call.batch, call.kv_heads, call.n_k, call.head_dim, Tiles::block_k);
    in.o = static_cast<T*>(call.o);
    in.o_unrounded = call.o_unrounded;
    in.lse = call.lse;
    in.o_row = call.o_strides.row;
    in.o_head = call.o_strides.head;
    in.o_batch = call.o_strides.batch;
    in.heads = call.heads;
    in.kv_heads = call.kv_heads;
    in.n_q = call.n_q;
    in.n_k = call.n_k;
    in.causal = call.causal;
    in.natural = static_cast<float>(call.scale);
    in.scales.exponent = static_cast<float>(static_cast<double>(in.natural) * 1.4426950408889634074);
    in.scales.stable_beta = static_cast<float>(kernel.stable_beta);
    in.scales.stable_tolerance = static_cast<float>(kernel.stable_tolerance / static_cast<double>(in.natural));
    in.q_tiles = (call.n_q + Tiles::block_q - 1) / Tiles::block_q;
    const int all_heads = call.batch * call.heads;
    in.tiles = in.q_tiles * all_heads;
    // Keys and values of the heads in work at once stay in half of an H100's second-level cache of 50 MB.
    const double head_bytes = 2.0 * call.n_k * call.head_dim * sizeof(T) * call.kv_heads / call.heads;
    in.heads_at_once = std::clamp(static_cast<int>(25e6 / head_bytes), 1, all_heads);
    void* counters = nullptr;
    check(cudaGetSymbolAddress(&counters, next_tiles), "finding the tile counters");
    in.next = static_cast<int*>(counters) + launches++ % std::size(next_tiles);
    const auto run = forward<T, Tiles, Variant>;
    check(cudaFuncSetAttribute(run, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles::shared_bytes),
          "setting the shared memory of the tensor-core forward");
    run<<<std::min(in.tiles, multiprocessors()), Tiles::threads, Tiles::shared_bytes, stream>>>(in);
    check(cudaGetLastError(), "launching the tensor-core forward");
}

template <class T, class Tiles>
void launch_variant(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    const auto launched = [&]<class Variant>(Variant) {
        if (kernel.variant != Variant::value) return false;
        launch<T, Tiles, Variant>(call, kernel, stream);
        return true;
    };
    using enum ArgumentForm;
    if (launched(Compiled<>{}) || launched(Compiled<unfused>{}) || launched(Compiled<subtract_then_scale>{}) ||
        launched(Compiled<fused, true>{}) || launched(Compiled<fused, false, true>{}) ||
        launched(Compiled<fused, false, false, RowSumAdds::rounded>{}))
        return;
    throw std::invalid_argument("tensor_kernel: not one of the kernels that supported() names");
}

template <class T>
void launch_forward_of(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    if (call.head_dim == 64) return launch_variant<T, ForwardTiles<T, 64>>(call, kernel, stream);
    launch_variant<T, ForwardTiles<T, 128>>(call, kernel, stream);
}

}  // namespace faultline::tensor_kernel
