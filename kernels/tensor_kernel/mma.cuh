// SPDX-License-Identifier: Apache-2.0
// What a kernel by mma.sync is made of (compute capability 8.0 and later): the product, and copies into shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include <faultline/base/warp_matrix.cuh>
#include <faultline/tensor_kernel/hopper.cuh>

namespace faultline::tensor_kernel {

/// c += a b of one mma.m16n8k16 (warp_matrix.cuh).
template <class T>
__device__ __forceinline__ void mma(float* c, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>)
        mma_fp16(c, a, b0, b1);
    else
        mma_bf16(c, a, b0, b1);
}

/// Rows of d elements in shared memory whose groups of eight are permuted within 64, so that eight rows' same group lies in
/// eight different banks' quads.
template <class T, int d>
__device__ __forceinline__ T* group_of_eight(T* rows, int row, int group) {
    return rows + row * d + (group ^ (row % 8)) * 8;
}

/// Begins to copy rows first to first + rows - 1 of [n, d]; those past the end arrive as zeros. By the whole block.
template <class T, int d, int rows, int threads>
__device__ __forceinline__ void copy_rows(T* to, const T* from, std::int64_t stride, int first, int n) {
#pragma unroll
    for (int i = 0; i < rows * d / 8 / threads; ++i) {
        const int at = i * threads + threadIdx.x, row = at / (d / 8), group = at % (d / 8);
        const bool inside = first + row < n;
        const T* source = from + (inside ? first + row : 0) * stride + group * 8;
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(group_of_eight<T, d>(to, row, group))),
            "l"(source), "r"(inside ? 16 : 0)
            : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits for all but the last `pending` copies of this thread.
template <int pending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace faultline::tensor_kernel
