// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include <faultline/tensor_kernel/forward_mma_launch.cuh>

namespace faultline::tensor_kernel {

/// The streaming state as the call says, in key tiles of its size. bf16.
void launch_mma_state(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    const auto launched = [&]<int d, int keys>(std::integer_sequence<int, d, keys>) {
        if (call.head_dim != d || kernel.block_k != keys) return false;
        launch_mma<__nv_bfloat16, d, keys, WithState>(call, kernel, stream);
        return true;
    };
    using std::integer_sequence;
    const bool known = launched(integer_sequence<int, 64, 64>{}) || launched(integer_sequence<int, 64, 32>{}) ||
                       launched(integer_sequence<int, 64, 128>{}) || launched(integer_sequence<int, 128, 64>{}) ||
                       launched(integer_sequence<int, 128, 32>{});
    if (!known) throw std::invalid_argument("tensor_kernel: not one of the kernels that supported() names");
}

}  // namespace faultline::tensor_kernel
