// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include <faultline/tensor_kernel/call_arguments.cuh>
#include <faultline/tensor_kernel/forward_mma.cuh>
#include <faultline/tensor_kernel/tensor_map.cuh>

namespace faultline::tensor_kernel {
namespace {

template <class T, int d, class Variant>
void launch(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    constexpr int keys = d == 64 ? 128 : 64;
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

template <class T, int d>
void launch_variant(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    const auto launched = [&]<class Variant>(Variant) {
        if (kernel.variant != Variant::value) return false;
        launch<T, d, Variant>(call, kernel, stream);
        return true;
    };
    using enum ArgumentForm;
    if (launched(Compiled<>{}) || launched(Compiled<unfused>{}) || launched(Compiled<subtract_then_scale>{}) ||
        launched(Compiled<fused, false, true>{}))
        return;
    throw std::invalid_argument("tensor_kernel: not one of the kernels that supported() names");
}

}  // namespace

void launch_mma_of(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    const bool half = kernel.element == Element::fp16;
    if (call.head_dim == 64)
        return half ? launch_variant<__half, 64>(call, kernel, stream)
                    : launch_variant<__nv_bfloat16, 64>(call, kernel, stream);
    half ? launch_variant<__half, 128>(call, kernel, stream) : launch_variant<__nv_bfloat16, 128>(call, kernel, stream);
}

}  // namespace faultline::tensor_kernel
