// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include <faultline/tensor_kernel/forward_mma_launch.cuh>

namespace faultline::tensor_kernel {
namespace {

template <class T, int d>
void launch_variant(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    const auto launched = [&]<class Variant>(Variant) {
        if (kernel.variant != Variant::value) return false;
        launch_mma<T, d, d == 64 ? 128 : 64, Variant>(call, kernel, stream);
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
