// SPDX-License-Identifier: Apache-2.0
// The altered forward of an element type, instantiated in files of their own: they are slow to compile.
#pragma once

#include <faultline/tensor_kernel/forward_altering.cuh>
#include <faultline/tensor_kernel/forward_launch.cuh>

namespace faultline::tensor_kernel {

/// Faults of p alone.
template <class T>
void launch_altered_p(const ForwardCall& call, const ForwardKernel& kernel, const ForwardAlterations& in,
                      cudaStream_t stream) {
    if (call.head_dim == 64)
        launch<T, ForwardTiles<T, 64>, Compiled<>, ForwardAlterer<T>>(call, kernel, in, stream);
    else
        launch<T, ForwardTiles<T, 128>, Compiled<>, ForwardAlterer<T>>(call, kernel, in, stream);
}

/// Where there are faults of the streaming state. Kernels of their own: those of p alone stay as they are.
template <class T>
void launch_altered_state(const ForwardCall& call, const ForwardKernel& kernel, const ForwardAlterations& in,
                          cudaStream_t stream) {
    if (call.head_dim == 64)
        launch<T, ForwardTiles<T, 64>, Compiled<>, ForwardStateAlterer<T>>(call, kernel, in, stream);
    else
        launch<T, ForwardTiles<T, 128>, Compiled<>, ForwardStateAlterer<T>>(call, kernel, in, stream);
}

}  // namespace faultline::tensor_kernel
