// SPDX-License-Identifier: Apache-2.0
// A warp's matrix instructions for 16-bit operands, compute capability 8.0 and later (PTX ISA, "Matrix fragments for
// mma.m16n8k16" and "ldmatrix").
#pragma once

#include <cstdint>

namespace faultline {

/// c += a b of one mma.m16n8k16: of a and c rows lane/4 and lane/4 + 8, columns in pairs; b: of column lane/4 the rows 2t, 2t+1
/// and 2t+8, 2t+9, where t = lane%4.
__device__ __forceinline__ void mma_bf16(float* c, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// The same of finite operands as two sums of eight products, one after the other: the other eight are zeros, and infinity
/// times one of them would be NaN.
__device__ __forceinline__ void mma_bf16_by_eight(float* c, const std::uint32_t (&a)[4], std::uint32_t b0,
                                                  std::uint32_t b1) {
    mma_bf16(c, {a[0], a[1], 0, 0}, b0, b1);
    mma_bf16(c, {0, 0, a[2], a[3]}, b0, b1);
}
__device__ __forceinline__ void mma_fp16(float* c, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four 8 x 8 matrices of 16-bit numbers out of shared memory, the rows of matrix i at the addresses of lanes 8i to 8i+7;
/// transposed or not.
template <bool transposed>
__device__ __forceinline__ void load_matrices(std::uint32_t (&x)[4], const void* row) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
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

}  // namespace faultline
