// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/forward_launch.cuh>

template void faultline::tensor_kernel::launch_forward_of<__nv_bfloat16>(const ForwardCall&, const ForwardKernel&,
                                                                         cudaStream_t);
