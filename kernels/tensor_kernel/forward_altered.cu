// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/forward_altering.cuh>
#include <faultline/tensor_kernel/forward_launch.cuh>
#include <faultline/tensor_kernel/request.cuh>

namespace faultline::tensor_kernel {

/// forward_altered_state.cu.
void launch_altered_state(const ForwardCall& call, const ForwardKernel& kernel, const ForwardAlterer::Arguments& in,
                          cudaStream_t stream);

void launch_altered_forward(const ForwardCall& call, const ForwardKernel& kernel, const Alterations& alterations,
                            void* stream) {
    using T = __nv_bfloat16;
    if (kernel.unit != Unit::wgmma || kernel.element != Element::bf16 || kernel.variant != Compiled<>::value ||
        call.heads != call.kv_heads)
        throw std::invalid_argument(
            "tensor_kernel: the forward is altered by wgmma in bf16, with a fused argument, as many heads of keys as of "
            "queries");
    expect_device(kernel.unit);
    const ForwardAlterer::Arguments in{alterations, call.batch};
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    for (int f = 0; f < alterations.count; ++f)
        if (alterations.at[f].site != AlteredSite::p_cast) return launch_altered_state(call, kernel, in, cuda_stream);
    if (call.head_dim == 64)
        launch<T, ForwardTiles<T, 64>, Compiled<>, ForwardAlterer>(call, kernel, in, cuda_stream);
    else
        launch<T, ForwardTiles<T, 128>, Compiled<>, ForwardAlterer>(call, kernel, in, cuda_stream);
}

}  // namespace faultline::tensor_kernel
