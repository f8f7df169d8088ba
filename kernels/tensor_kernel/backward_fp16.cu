// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/backward_launch.cuh>

namespace faultline::tensor_kernel {
// For backward_altered.cu, where faults stand at delta alone.
template void run_backward<__half, 64, Fused>(const BackwardCall&, const BackwardWorkspace&, ZeroSum,
                                              const NoBackwardRecorder::Arguments&, cudaStream_t);
template void run_backward<__half, 128, Fused>(const BackwardCall&, const BackwardWorkspace&, ZeroSum,
                                               const NoBackwardRecorder::Arguments&, cudaStream_t);
template void launch_backward_of<__half, 64>(const BackwardCall&, const BackwardKernel&, cudaStream_t);
template void launch_backward_of<__half, 128>(const BackwardCall&, const BackwardKernel&, cudaStream_t);
}  // namespace faultline::tensor_kernel
