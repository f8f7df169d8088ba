// SPDX-License-Identifier: Apache-2.0
// What a kernel by mma.sync is made of (compute capability 8.0 and later): the product, matrices out of shared memory, and
// copies into it.
#pragma once

#include <cstdint>
#include <type_traits>

#include <faultline/tensor_kernel/hopper.cuh>

namespace faultline::tensor_kernel {

/// c += a b of one mma.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"): a, c as wgmma.cuh has them for a warp; b: of
/// column lane/4 the rows 2t, 2t+1 and 2t+8, 2t+9.
template <class T>
__device__ __forceinline__ void mma(float* c, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
            "%1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Rows of d elements in shared memory whose groups of eight are permuted within 64, so that eight rows' same group lies in
/// eight different banks' quads.
template <class T, int d>
__device__ __forceinline__ T* group_of_eight(T* rows, int row, int group) {
    return rows + row * d + (group ^ (row % 8)) * 8;
}

/// Four 8 x 8 matrices, matrix i by the addresses of lanes 8i to 8i+7; transposed or not.
template <bool transposed, class T>
__device__ __forceinline__ void load_matrices(std::uint32_t (&x)[4], const T* row) {
    const std::uint32_t address = shared_address(row);
    if constexpr (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
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
