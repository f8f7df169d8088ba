// SPDX-License-Identifier: Apache-2.0
// The altered forward of an element type, instantiated in files of their own: they are slow to compile.
#pragma once

#include <faultline/tensor_kernel/forward_altering.cuh>
#include <faultline/tensor_kernel/forward_launch.cuh>

namespace faultline::tensor_kernel {

/// std::invalid_argument where the kernel is not one of those that are compiled with faults. in_fp16: they are for fp16 too.
inline void expect_altered(const ForwardCall& call, const ForwardKernel& kernel, bool in_fp16) {
    const bool element = kernel.element == Element::bf16 || (in_fp16 && kernel.element == Element::fp16);
    if (kernel.unit != Unit::wgmma || !element || kernel.variant != Compiled<>::value || call.heads != call.kv_heads)
        throw std::invalid_argument(
            "tensor_kernel: the forward is altered by wgmma in bf16 or, but for factors, fp16, with a fused argument, as "
            "many heads of keys as of queries");
}

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
