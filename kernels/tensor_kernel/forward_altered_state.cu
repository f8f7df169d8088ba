// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/forward_altering.cuh>
#include <faultline/tensor_kernel/forward_launch.cuh>

namespace faultline::tensor_kernel {

/// launch_altered_forward where there are faults of the streaming state. Kernels of their own: those of p alone stay as they
/// are, and these are slow to compile.
void launch_altered_state(const ForwardCall& call, const ForwardKernel& kernel, const ForwardAlterer::Arguments& in,
                          cudaStream_t stream) {
    using T = __nv_bfloat16;
    if (call.head_dim == 64)
        launch<T, ForwardTiles<T, 64>, Compiled<>, ForwardStateAlterer>(call, kernel, in, stream);
    else
        launch<T, ForwardTiles<T, 128>, Compiled<>, ForwardStateAlterer>(call, kernel, in, stream);
}

}  // namespace faultline::tensor_kernel
