// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/forward_altered_launch.cuh>

namespace faultline::tensor_kernel {
template void launch_altered_p<__half>(const ForwardCall&, const ForwardKernel&, const ForwardAlterations&,
                                       cudaStream_t);
template void launch_altered_state<__half>(const ForwardCall&, const ForwardKernel&, const ForwardAlterations&,
                                           cudaStream_t);
}  // namespace faultline::tensor_kernel
