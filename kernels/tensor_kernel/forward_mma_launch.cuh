// SPDX-License-Identifier: Apache-2.0
// A call of the forward by mma.sync becomes a grid.
#pragma once

#include <faultline/tensor_kernel/call_arguments.cuh>
#include <faultline/tensor_kernel/forward_mma.cuh>
#include <faultline/tensor_kernel/tensor_map.cuh>

namespace faultline::tensor_kernel {

/// keys: of a key tile.
template <class T, int d, int keys, class Variant>
void launch_mma(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    using Tiles = MmaTiles<T, d, keys>;
    MmaArguments<T> in{};
    set_call(in, call, kernel, Tiles::block_q);
    in.q = static_cast<const T*>(call.q);
    in.k = static_cast<const T*>(call.k);
    in.v = static_cast<const T*>(call.v);
    in.q_row = call.q_strides.row;
    in.q_head = call.q_strides.head;
    in.q_batch = call.q_strides.batch;
    in.k_row = call.k_strides.row;
    in.k_head = call.k_strides.head;
    in.k_batch = call.k_strides.batch;
    in.v_row = call.v_strides.row;
    in.v_head = call.v_strides.head;
    in.v_batch = call.v_strides.batch;
    const auto run = forward_mma<T, d, keys, Variant>;
    constexpr int bytes = sizeof(typename Tiles::Memory);
    check(cudaFuncSetAttribute(run, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "setting the shared memory of the tensor-core forward");
    run<<<in.tiles, Tiles::threads, bytes, stream>>>(in);
    check(cudaGetLastError(), "launching the tensor-core forward");
}

}  // namespace faultline::tensor_kernel
