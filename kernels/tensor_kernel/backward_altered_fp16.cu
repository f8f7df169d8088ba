// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/backward_altering.cuh>

namespace faultline::tensor_kernel {
template void run_altered<__half, 64>(const BackwardCall&, const BackwardWorkspace&, ZeroSum, const Alterations&,
                                      cudaStream_t);
template void run_altered<__half, 128>(const BackwardCall&, const BackwardWorkspace&, ZeroSum, const Alterations&,
                                       cudaStream_t);
}  // namespace faultline::tensor_kernel
