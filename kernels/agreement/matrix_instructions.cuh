// SPDX-License-Identifier: Apache-2.0
// The matrix instructions under test, one struct each. They share a shape: a row of A and a column of B are 32 bytes
// whatever the type, so the fragments of m16n8k16 (16-bit), m16n8k8 (tf32) and m16n8k32 (8-bit) hold the same words:
// thread 4g + t of a warp has words t and t + 4 of rows g and g + 8 of A, words t and t + 4 of column g of B, and results
// (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). PTX ISA, "Matrix fragments for mma.m16n8k*". wgmma.m64n8k* with A in
// registers gives each of four warps 16 rows in that same layout ("Register fragments for wgmma.mma_async.m64n8k*").
#pragma once

#include <cstdint>
#include <type_traits>

namespace faultline::agreement {

/// A storage format as its bits: what the instruction reads.
struct Storage {
    int bits;  // of one element
    int exponent_bits;
    int fraction_bits;
    bool ieee;          // all exponent bits set: infinity and NaN; otherwise (e4m3) only all bits set is NaN
    int register_bits;  // room in the register: 32 for tf32, whose low 13 bits the unit drops

    __host__ __device__ constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
    __host__ __device__ constexpr int largest_field() const { return (1 << exponent_bits) - (ieee ? 2 : 1); }
};
constexpr Storage fp16{16, 5, 10, true, 16}, bf16{16, 8, 7, true, 16}, tf32{32, 8, 23, true, 32},
    fp32{32, 8, 23, true, 32}, e4m3{8, 4, 3, false, 8}, e5m2{8, 5, 2, true, 8};

/// Fragments of one thread.
struct Fragments {
    std::uint32_t a[4];
    std::uint32_t b[2];
    std::uint64_t b_descriptor;  // of B in shared memory, for wgmma
};

#define FAULTLINE_MMA_F32(NAME, INPUT, SHAPE, TYPES)                                                      \
    struct NAME {                                                                                         \
        static constexpr Storage input = INPUT;                                                           \
        static constexpr bool half_accumulator = false;                                                   \
        __device__ static void run(const Fragments& f, std::uint32_t (&c)[4]) {                           \
            asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPES                                  \
                         ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"                                      \
                         "{%0,%1,%2,%3};"                                                                 \
                         : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                 \
                         : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "r"(f.b[0]), "r"(f.b[1])); \
        }                                                                                                 \
    };
FAULTLINE_MMA_F32(MmaBf16, bf16, "m16n8k16", "bf16.bf16")
FAULTLINE_MMA_F32(MmaFp16, fp16, "m16n8k16", "f16.f16")
FAULTLINE_MMA_F32(MmaTf32, tf32, "m16n8k8", "tf32.tf32")
FAULTLINE_MMA_F32(MmaE4m3, e4m3, "m16n8k32", "e4m3.e4m3")
FAULTLINE_MMA_F32(MmaE5m2, e5m2, "m16n8k32", "e5m2.e5m2")
#undef FAULTLINE_MMA_F32

struct MmaFp16Half {
    static constexpr Storage input = fp16;
    static constexpr bool half_accumulator = true;
    __device__ static void run(const Fragments& f, std::uint32_t (&c)[2]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1},{%2,%3,%4,%5},{%6,%7},{%0,%1};"
                     : "+r"(c[0]), "+r"(c[1])
                     : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "r"(f.b[0]), "r"(f.b[1]));
    }
};

__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// TAIL: scale-d = 1 (C is added), scale-a = scale-b = 1 and, for 16-bit types, B not transposed (k contiguous).
#define FAULTLINE_WGMMA_F32(NAME, INPUT, SHAPE, TYPES, TAIL)                                                           \
    struct NAME {                                                                                                      \
        static constexpr Storage input = INPUT;                                                                        \
        static constexpr bool half_accumulator = false;                                                                \
        __device__ static void run(const Fragments& f, std::uint32_t (&c)[4]) {                                        \
            float d[4] = {__uint_as_float(c[0]), __uint_as_float(c[1]), __uint_as_float(c[2]), __uint_as_float(c[3])}; \
            wgmma_begin();                                                                                             \
            asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES " {%0,%1,%2,%3},{%4,%5,%6,%7},%8," TAIL   \
                         ";"                                                                                           \
                         : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                              \
                         : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "l"(f.b_descriptor));                   \
            wgmma_end();                                                                                               \
            for (int i = 0; i < 4; ++i) c[i] = __float_as_uint(d[i]);                                                  \
        }                                                                                                              \
    };
FAULTLINE_WGMMA_F32(WgmmaBf16, bf16, "m64n8k16", "bf16.bf16", "1,1,1,0")
FAULTLINE_WGMMA_F32(WgmmaFp16, fp16, "m64n8k16", "f16.f16", "1,1,1,0")
FAULTLINE_WGMMA_F32(WgmmaTf32, tf32, "m64n8k8", "tf32.tf32", "1,1,1")
FAULTLINE_WGMMA_F32(WgmmaE4m3, e4m3, "m64n8k32", "e4m3.e4m3", "1,1,1")
FAULTLINE_WGMMA_F32(WgmmaE5m2, e5m2, "m64n8k32", "e5m2.e5m2", "1,1,1")
#undef FAULTLINE_WGMMA_F32

#define FAULTLINE_WGMMA_F16(NAME, INPUT, SHAPE, TYPES, TAIL)                                                       \
    struct NAME {                                                                                                  \
        static constexpr Storage input = INPUT;                                                                    \
        static constexpr bool half_accumulator = true;                                                             \
        __device__ static void run(const Fragments& f, std::uint32_t (&c)[2]) {                                    \
            wgmma_begin();                                                                                         \
            asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f16." TYPES " {%0,%1},{%2,%3,%4,%5},%6," TAIL ";" \
                         : "+r"(c[0]), "+r"(c[1])                                                                  \
                         : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "l"(f.b_descriptor));               \
            wgmma_end();                                                                                           \
        }                                                                                                          \
    };
FAULTLINE_WGMMA_F16(WgmmaFp16Half, fp16, "m64n8k16", "f16.f16", "1,1,1,0")
FAULTLINE_WGMMA_F16(WgmmaE4m3Half, e4m3, "m64n8k32", "e4m3.e4m3", "1,1,1")
FAULTLINE_WGMMA_F16(WgmmaE5m2Half, e5m2, "m64n8k32", "e5m2.e5m2", "1,1,1")
#undef FAULTLINE_WGMMA_F16

/// Shared-memory descriptor of one 8-column block of B, k contiguous, no swizzle: two 8 x 16-byte core matrices, 128 bytes
/// apart (leading byte offset); the stride between 8-column blocks is not used with n = 8. PTX ISA, "Matrix descriptor".
__device__ inline std::uint64_t descriptor(const void* shared) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
    const auto encode = [](std::uint32_t x) { return static_cast<std::uint64_t>((x & 0x3FFFF) >> 4); };
    return encode(address) | encode(128) << 16 | encode(256) << 32;
}

}  // namespace faultline::agreement
