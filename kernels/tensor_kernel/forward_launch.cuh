// SPDX-License-Identifier: Apache-2.0
// A call of the forward becomes tensor maps, a grid and one of the compiled kernels. Instantiated for each element type in a
// file of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <type_traits>

#include <faultline/tensor_kernel/call_arguments.cuh>
#include <faultline/tensor_kernel/forward.cuh>
#include <faultline/tensor_kernel/forward.hpp>
#include <faultline/tensor_kernel/head_map.cuh>
#include <faultline/tensor_kernel/run_beside.cuh>

namespace faultline::tensor_kernel {

/// Counters of the launches in flight (of this element type); each kernel leaves its own at zero.
static __device__ int next_tiles[64][2];
static std::atomic<unsigned> launches{0};

/// With the tensor maps, and what is of its element type alone, in `in`.
template <class T, class Tiles, class Variant, class Rec>
void launch_filled(ForwardArguments<T>& in, const ForwardCall& call, const ForwardKernel& kernel,
                   const typename Rec::Arguments& recording, cudaStream_t stream) {
    set_call(in, call, kernel, Tiles::block_q);
    void* counters = nullptr;
    check(cudaGetSymbolAddress(&counters, next_tiles), "finding the tile counters");
    in.next = static_cast<int*>(counters) + launches++ % std::size(next_tiles) * 2;
    const int blocks = std::min(in.tiles, multiprocessors());
    const auto start = [&]<class Own>(std::type_identity<Own>, auto* run, int count, bool beside_the_last) {
        constexpr int bytes = BlockMemory<Tiles, Own>::bytes;
        check(cudaFuncSetAttribute(run, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
              "setting the shared memory of the tensor-core forward");
        run_beside(run, dim3(count), Tiles::threads, bytes, stream, beside_the_last, in, recording);
    };
    if constexpr (Rec::records) {
        // Those that are looked at come first, since they take longer and would end late after all others, which take the
        // multiprocessors that are free, and the rest when these blocks end.
        start(std::type_identity<Rec>{}, forward<T, Tiles, Variant, Rec>, recording.blocks, false);
        if (!recording.is_all())
            start(std::type_identity<NoRecorder>{}, forward_others<T, Tiles, Variant, Rec>, blocks, true);
    } else {
        start(std::type_identity<Rec>{}, forward<T, Tiles, Variant, Rec>, blocks, false);
    }
}

template <class T, class Tiles, class Variant, class Rec>
void launch(const ForwardCall& call, const ForwardKernel& kernel, const typename Rec::Arguments& recording,
            cudaStream_t stream) {
    ForwardArguments<T> in{};
    in.q = head_map<T>(call.q, call.q_strides, call.batch, call.heads, call.n_q, call.head_dim, Tiles::block_q);
    in.k = head_map<T>(call.k, call.k_strides, call.batch, call.kv_heads, call.n_k, call.head_dim, Tiles::block_k);
    in.v = head_map<T>(call.v, call.v_strides, call.batch, call.kv_heads, call.n_k, call.head_dim, Tiles::block_k);
    launch_filled<T, Tiles, Variant, Rec>(in, call, kernel, recording, stream);
}

template <class T, class Tiles, class Rec>
void launch_variant(const ForwardCall& call, const ForwardKernel& kernel, const typename Rec::Arguments& recording,
                    cudaStream_t stream) {
    const auto launched = [&]<class Variant>(Variant) {
        if (kernel.variant != Variant::value) return false;
        launch<T, Tiles, Variant, Rec>(call, kernel, recording, stream);
        return true;
    };
    using enum ArgumentForm;
    if (launched(Compiled<>{}) || launched(Compiled<subtract_then_scale>{}) || launched(Compiled<fused, false, true>{}))
        return;
    if constexpr (!Rec::records)
        if (launched(Compiled<unfused>{}) || launched(Compiled<fused, true>{}) ||
            launched(Compiled<fused, false, false, RowSumAdds::rounded>{}))
            return;
    throw std::invalid_argument("tensor_kernel: not one of the kernels that supported() names");
}

template <class T>
void launch_forward_of(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    if (call.head_dim == 64) return launch_variant<T, ForwardTiles<T, 64>, NoRecorder>(call, kernel, {}, stream);
    launch_variant<T, ForwardTiles<T, 128>, NoRecorder>(call, kernel, {}, stream);
}

}  // namespace faultline::tensor_kernel
