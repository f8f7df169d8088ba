// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/forward_launch.cuh>

namespace faultline::tensor_kernel {

/// The streaming state as the call says, in key tiles of 64, for heads of 64. bf16.
void launch_state(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    using Tiles = ForwardTiles<__nv_bfloat16, 64, 2, 4, 64>;
    if (call.head_dim != Tiles::head_dim || kernel.block_k != Tiles::block_k)
        throw std::invalid_argument("tensor_kernel: not one of the kernels that supported() names");
    launch<__nv_bfloat16, Tiles, WithState, NoRecorder>(call, kernel, {}, stream);
}

}  // namespace faultline::tensor_kernel
