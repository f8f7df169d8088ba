// SPDX-License-Identifier: Apache-2.0
// A call of the forward becomes tensor maps, a grid and one of the compiled kernels. Instantiated for each element type in a
// file of its own.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <type_traits>

#include <faultline/tensor_kernel/call_arguments.cuh>
#include <faultline/tensor_kernel/forward.cuh>
#include <faultline/tensor_kernel/forward.hpp>
#include <faultline/tensor_kernel/head_map.cuh>
#include <faultline/tensor_kernel/launch_counters.hpp>
#include <faultline/tensor_kernel/run_beside.cuh>

namespace faultline::tensor_kernel {

/// Counters of the launches in flight (of this element type); each kernel leaves its own at zero.
static __device__ int next_tiles[LaunchCounters::count][2];
static LaunchCounters launch_counters;

/// All of `in` but the tensor maps, and what is of its element type alone.
template <class T, class Tiles>
void set_launch(ForwardArguments<T>& in, const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    set_call(in, call, kernel, Tiles::block_q);
    void* counters = nullptr;
    check(cudaGetSymbolAddress(&counters, next_tiles), "finding the tile counters");
    const std::thread::id thread = stream == cudaStreamPerThread ? std::this_thread::get_id() : std::thread::id{};
    in.next = static_cast<int*>(counters) + launch_counters.next(stream, thread) * 2;
}

template <class Tiles, class Rec, class... Parameters, class... Arguments>
void start_forward(void (*run)(Parameters...), int blocks, cudaStream_t stream, bool beside_the_last,
                   const Arguments&... arguments) {
    constexpr int bytes = BlockMemory<Tiles, Rec>::bytes;
    check(cudaFuncSetAttribute(run, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "setting the shared memory of the tensor-core forward");
    run_beside(run, dim3(blocks), Tiles::threads, bytes, stream, beside_the_last, arguments...);
}

/// With the tensor maps, and what is of its element type alone, in `in`.
template <class T, class Tiles, class Variant, class Rec>
void launch_filled(ForwardArguments<T>& in, const ForwardCall& call, const ForwardKernel& kernel,
                   const typename Rec::Arguments& recording, cudaStream_t stream) {
    set_launch<T, Tiles>(in, call, kernel, stream);
    bool beside_the_last = false;
    if constexpr (Scales<Rec>) beside_the_last = !Rec::begins_the_next;
    start_forward<Tiles, Rec>(forward<T, Tiles, Variant, Rec>, std::min(in.tiles, multiprocessors()), stream,
                              beside_the_last, in, recording);
}

template <class T, class Tiles>
ForwardArguments<T> with_maps(const ForwardCall& call) {
    ForwardArguments<T> in{};
    in.q = head_map<T>(call.q, call.q_strides, call.batch, call.heads, call.n_q, call.head_dim, Tiles::block_q);
    in.k = head_map<T>(call.k, call.k_strides, call.batch, call.kv_heads, call.n_k, call.head_dim, Tiles::block_k);
    in.v = head_map<T>(call.v, call.v_strides, call.batch, call.kv_heads, call.n_k, call.head_dim, Tiles::block_k);
    return in;
}

template <class T, class Tiles, class Variant, class Rec>
void launch(const ForwardCall& call, const ForwardKernel& kernel, const typename Rec::Arguments& recording,
            cudaStream_t stream) {
    ForwardArguments<T> in = with_maps<T, Tiles>(call);
    launch_filled<T, Tiles, Variant, Rec>(in, call, kernel, recording, stream);
}

template <class T, class Tiles>
void launch_variant(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    const auto launched = [&]<class Variant>(Variant) {
        if (kernel.variant != Variant::value) return false;
        launch<T, Tiles, Variant, NoRecorder>(call, kernel, {}, stream);
        return true;
    };
    using enum ArgumentForm;
    if (!launched(Compiled<>{}) && !launched(Compiled<subtract_then_scale>{}) &&
        !launched(Compiled<fused, false, true>{}) && !launched(Compiled<unfused>{}) &&
        !launched(Compiled<fused, true>{}) && !launched(Compiled<fused, false, false, RowSumAdds::rounded>{}))
        throw std::invalid_argument("tensor_kernel: not one of the kernels that supported() names");
}

template <class T>
void launch_forward_of(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    if (call.head_dim == 64) return launch_variant<T, ForwardTiles<T, 64>>(call, kernel, stream);
    launch_variant<T, ForwardTiles<T, 128>>(call, kernel, stream);
}

}  // namespace faultline::tensor_kernel
