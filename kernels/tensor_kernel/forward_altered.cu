// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/forward_altered_launch.cuh>
#include <faultline/tensor_kernel/request.cuh>

namespace faultline::tensor_kernel {

/// forward_altered_state.cu, forward_altered_fp16.cu.
extern template void launch_altered_state<__nv_bfloat16>(const ForwardCall&, const ForwardKernel&,
                                                         const ForwardAlterations&, cudaStream_t);
extern template void launch_altered_p<__half>(const ForwardCall&, const ForwardKernel&, const ForwardAlterations&,
                                              cudaStream_t);
extern template void launch_altered_state<__half>(const ForwardCall&, const ForwardKernel&, const ForwardAlterations&,
                                                  cudaStream_t);

void launch_altered_forward(const ForwardCall& call, const ForwardKernel& kernel, const Alterations& alterations,
                            void* stream) {
    const bool half = kernel.element == Element::fp16;
    expect_altered(call, kernel, true);
    expect_device(kernel.unit);
    const ForwardAlterations in{alterations, call.batch};
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    bool of_state = false;
    for (int f = 0; f < alterations.count; ++f) of_state |= alterations.at[f].site != AlteredSite::p_cast;
    if (of_state)
        half ? launch_altered_state<__half>(call, kernel, in, cuda_stream)
             : launch_altered_state<__nv_bfloat16>(call, kernel, in, cuda_stream);
    else
        half ? launch_altered_p<__half>(call, kernel, in, cuda_stream)
             : launch_altered_p<__nv_bfloat16>(call, kernel, in, cuda_stream);
}

}  // namespace faultline::tensor_kernel
