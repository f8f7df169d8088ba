// SPDX-License-Identifier: Apache-2.0
// wgmma.mma_async.m64nNk16 with bf16 or fp16 operands and fp32 accumulator, and the descriptors of operands in shared memory
// under the 128-byte swizzle (PTX ISA 8.7, "Asynchronous warpgroup level matrix instructions").
//
// Operands in shared memory are panels as a tensor map of a box with 64 innermost elements and 128-byte swizzle brings them:
// [rows][64] elements, 128 bytes a row, 1024-byte aligned. A matrix of 128 innermost elements is two panels.
//
// Accumulator d[N/2] of a thread, with w = warp in the group, g = lane/4, t = lane%4:
//     d[4j], d[4j+1]: row 16w+g, columns 8j+2t, 8j+2t+1; d[4j+2], d[4j+3]: row 16w+g+8, the same columns.
// A in registers, four words of two elements for 16 of k: {row g, k 2t}, {row g+8, k 2t}, {row g, k 2t+8}, {row g+8, k 2t+8}.
// So the accumulator columns 16i to 16i+15 of one product, packed in pairs d[8i..8i+7], are A for step i of the next.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <faultline/tensor_kernel/hopper.cuh>

namespace faultline::tensor_kernel {

namespace detail {
constexpr std::uint64_t swizzle_128 = std::uint64_t{1} << 62;
__device__ __forceinline__ std::uint64_t address_field(std::uint32_t bytes) { return (bytes & 0x3FFFF) >> 4; }
}  // namespace detail

/// Operand whose panel rows are its own rows (of A: m, of B: n) and whose panel columns are k: "K-major". Begins at k = 0 of
/// the panel; 16 of k further is + 2 (32 bytes), up to 64 of k; then the next panel. Eight rows are 1024 bytes apart from
/// the next eight (stride byte offset); the leading byte offset has no meaning under the swizzle.
__device__ __forceinline__ std::uint64_t k_major(const void* panel) {
    return detail::address_field(shared_address(panel)) | std::uint64_t{1} << 16 | std::uint64_t{1024 >> 4} << 32 |
           detail::swizzle_128;
}
/// Operand whose panel rows are k and whose panel columns are its own rows (m or n): "MN-major", the transposed read. 16 of k
/// further is + 128 (2048 bytes). panel_bytes: from one panel (64 of m or n) to the next, for operands of more than 64.
__device__ __forceinline__ std::uint64_t mn_major(const void* panel, std::uint32_t panel_bytes) {
    return detail::address_field(shared_address(panel)) | std::uint64_t{panel_bytes >> 4} << 16 |
           std::uint64_t{1024 >> 4} << 32 | detail::swizzle_128;
}
/// k_major of panels whose rows are 64 bytes, under the 64-byte swizzle (512-byte aligned).
__device__ __forceinline__ std::uint64_t k_major_64(const void* panel) {
    return detail::address_field(shared_address(panel)) | std::uint64_t{1} << 16 | std::uint64_t{512 >> 4} << 32 |
           std::uint64_t{2} << 62;
}
constexpr std::uint64_t k_major_step = 2, mn_major_step = 128;  ///< what 16 of k (32 of e4m3) add to a descriptor

/// Before the first wgmma of a group, and wherever the accumulator or A's registers were written by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until all but the last `pending` groups are complete.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
/// Tells the compiler that registers change here: it must not move their uses across, although no instruction stands here.
template <int count>
__device__ __forceinline__ void keep(float (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Wgmma<T, N>: d (+)= a b, T = __nv_bfloat16 or __half; accumulate = 0 begins at zero. ss: both from shared memory, a_mn and
/// b_mn 1 where the descriptor is mn_major. rs: a from registers.
template <class T, int n>
struct Wgmma;

// The accumulator as operands %0 to %(N/2 - 1), in asm text and as constraints.
// clang-format off
#define FAULTLINE_D64 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FAULTLINE_D128 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FAULTLINE_D256 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FAULTLINE_F8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FAULTLINE_F32(i) \
    FAULTLINE_F8(i), FAULTLINE_F8(i + 8), FAULTLINE_F8(i + 16), FAULTLINE_F8(i + 24)
#define FAULTLINE_C64 FAULTLINE_F32(0)
#define FAULTLINE_C128 FAULTLINE_F32(0), FAULTLINE_F32(32)
#define FAULTLINE_C256 FAULTLINE_C128, FAULTLINE_F32(64), FAULTLINE_F32(96)
// clang-format on

// NEXT..: the numbers of the operands after the accumulator.
#define FAULTLINE_WGMMA(TYPE, NAME, N, N0, N1, N2, N3, N4, N5, N6)                                                 \
    template <>                                                                                                    \
    struct Wgmma<TYPE, N> {                                                                                        \
        template <int a_mn = 0, int b_mn = 0>                                                                      \
        __device__ __forceinline__ static void ss(float (&d)[N / 2], std::uint64_t a, std::uint64_t b,             \
                                                  int accumulate) {                                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" N2                                                   \
                         ", 0;\n"                                                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FAULTLINE_D##N       \
                         "}, %" N0 ", %" N1 ", p, 1, 1, %" N3 ", %" N4 ";\n}\n"                                    \
                         : FAULTLINE_C##N                                                                          \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(a_mn), "n"(b_mn));                                 \
        }                                                                                                          \
        template <int b_mn = 0>                                                                                    \
        __device__ __forceinline__ static void rs(float (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b, \
                                                  int accumulate) {                                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" N5                                                   \
                         ", 0;\n"                                                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FAULTLINE_D##N       \
                         "}, {%" N0 ", %" N1 ", %" N2 ", %" N3 "}, %" N4 ", p, 1, 1, %" N6 ";\n}\n"                \
                         : FAULTLINE_C##N                                                                          \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(b_mn));        \
        }                                                                                                          \
    };
FAULTLINE_WGMMA(__nv_bfloat16, "bf16", 64, "32", "33", "34", "35", "36", "37", "38")
FAULTLINE_WGMMA(__half, "f16", 64, "32", "33", "34", "35", "36", "37", "38")
FAULTLINE_WGMMA(__nv_bfloat16, "bf16", 128, "64", "65", "66", "67", "68", "69", "70")
FAULTLINE_WGMMA(__half, "f16", 128, "64", "65", "66", "67", "68", "69", "70")
FAULTLINE_WGMMA(__nv_bfloat16, "bf16", 256, "128", "129", "130", "131", "132", "133", "134")
FAULTLINE_WGMMA(__half, "f16", 256, "128", "129", "130", "131", "132", "133", "134")
#undef FAULTLINE_WGMMA

/// The same of e4m3, 32 of k a step, which has no transposed read: both operands are K-major. A in registers, four words of
/// four elements for 32 of k: {row g, k 4t to 4t+3}, {row g+8, the same}, {row g, k 16+4t to 16+4t+3}, {row g+8, the same}.
template <int n>
struct WgmmaE4m3;
#define FAULTLINE_WGMMA(N, N0, N1, N2, N3, N4, N5)                                                                 \
    template <>                                                                                                    \
    struct WgmmaE4m3<N> {                                                                                          \
        __device__ __forceinline__ static void ss(float (&d)[N / 2], std::uint64_t a, std::uint64_t b,             \
                                                  int accumulate) {                                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" N2                                                   \
                         ", 0;\n"                                                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FAULTLINE_D##N               \
                         "}, %" N0 ", %" N1 ", p, 1, 1;\n}\n"                                                      \
                         : FAULTLINE_C##N                                                                          \
                         : "l"(a), "l"(b), "r"(accumulate));                                                       \
        }                                                                                                          \
        __device__ __forceinline__ static void rs(float (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b, \
                                                  int accumulate) {                                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" N5                                                   \
                         ", 0;\n"                                                                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FAULTLINE_D##N               \
                         "}, {%" N0 ", %" N1 ", %" N2 ", %" N3 "}, %" N4 ", p, 1, 1;\n}\n"                         \
                         : FAULTLINE_C##N                                                                          \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                   \
        }                                                                                                          \
    };
FAULTLINE_WGMMA(64, "32", "33", "34", "35", "36", "37")
FAULTLINE_WGMMA(128, "64", "65", "66", "67", "68", "69")
#undef FAULTLINE_WGMMA
#undef FAULTLINE_D64
#undef FAULTLINE_C64
#undef FAULTLINE_D128
#undef FAULTLINE_C128
#undef FAULTLINE_D256
#undef FAULTLINE_C256
#undef FAULTLINE_F8
#undef FAULTLINE_F32

}  // namespace faultline::tensor_kernel
