// SPDX-License-Identifier: Apache-2.0
// Ampere's groups of eight products by Hopper's mma.m16n8k16 (bf16_groups.hpp), finite operands below groups::largest_operand.
// A warp has 16 rows, and columns by eight. The instruction's second eight terms are the anchors: term 8 + n % 4 is 2^A of column
// n times 1, term 12 + n % 4 the same times -1, with A of each row its own. That is room for four columns: two instructions make
// the eight, and of each a half is used.
#pragma once

#include <cstdint>

#include <faultline/base/warp_matrix.cuh>
#include <faultline/emulated/bf16_groups.hpp>

namespace faultline::device::group {

/// What a thread has to do with the anchors.
struct Anchoring {
    bool near;               ///< its columns are among the first four of eight
    std::uint32_t identity;  ///< its part of the instruction's second operand, terms 8 to 15
    std::uint32_t lowest[2] = {0xFFFFFFFFu, 0xFFFFFFFFu};  ///< anchors of its rows so far, least in either half

    __device__ __forceinline__ Anchoring() {
        constexpr std::uint32_t one = 0x3F80, minus = 0x8000;
        const auto lane = threadIdx.x % 32, quad = lane % 4, column = lane / 4 % 4;
        near = quad < 2;
        const std::uint32_t value = near ? one : one | minus;
        identity = column / 2 == quad % 2 ? value << 16 * (column % 2) : 0;
    }
    /// Whether an element of row r had an anchor too low to be decided, since this was asked last.
    __device__ __forceinline__ bool was_low(int r) {
        const bool low = emulated::groups::are_low(lowest[r]);
        lowest[r] = 0xFFFFFFFFu;
        return low;
    }
};

/// A row's eight terms in shared memory, 16 bytes aligned.
struct Terms {
    std::uint32_t v[4];

    Terms() = default;
    __device__ __forceinline__ explicit Terms(const std::uint32_t* at) {
        const uint4 x = *reinterpret_cast<const uint4*>(at);
        v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
    }
    __device__ __forceinline__ bool are_zeros() const {
        return emulated::groups::magnitudes(v[0] | v[1] | v[2] | v[3]) == 0;
    }
    /// The exponent of term t in both halves.
    __device__ __forceinline__ std::uint32_t exponent(int t) const {
        return emulated::groups::exponents(__byte_perm(v[t / 2], 0, t % 2 == 0 ? 0x1010 : 0x3232));
    }
};

/// Raises the largest sums of exponents of a thread's two rows with its two columns, whose terms lie side by side.
__device__ __forceinline__ void raise(std::uint32_t (&sums)[2], const Terms (&x)[2], const Terms (&y)[2]) {
    using namespace emulated::groups;
    std::uint32_t found[2][2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const std::uint32_t of_y = magnitudes(y[n].v[i]);
#pragma unroll
            for (int r = 0; r < 2; ++r) found[r][n] = larger_sums(exponents(x[r].v[i]), of_y, found[r][n]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const std::uint32_t even = __byte_perm(found[r][0], found[r][1], 0x5410);
        sums[r] = __vmaxu2(sums[r], __vmaxu2(even, __byte_perm(found[r][0], found[r][1], 0x7632)));
    }
}
/// The same where y has the pair of columns of term t at t * pitch. x: Terms::exponent() of all terms.
__device__ __forceinline__ void raise(std::uint32_t (&sums)[2], const std::uint32_t (&x)[2][8], const std::uint32_t* y,
                                      int pitch) {
    using namespace emulated::groups;
#pragma unroll
    for (int t = 0; t < terms; ++t) {
        const std::uint32_t of_y = magnitudes(y[t * pitch]);
#pragma unroll
        for (int r = 0; r < 2; ++r) sums[r] = larger_sums(x[r][t], of_y, sums[r]);
    }
}

/// A thread's part of 16 x 8 sums with their anchors, of which the fraction bits that the rule has make the size.
struct Anchored {
    std::uint32_t near[2], far[2];
    float of_near[4], of_far[4];

    __device__ __forceinline__ Anchored(Anchoring& at, const float* c, const std::uint32_t (&sums)[2],
                                        int fraction_bits) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const std::uint32_t of_c = __byte_perm(__float_as_uint(c[2 * r]), __float_as_uint(c[2 * r + 1]), 0x7632);
            const std::uint32_t own = emulated::groups::anchors(sums[r], of_c, fraction_bits);
            at.lowest[r] = __vminu2(at.lowest[r], own);
            const std::uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, own, 2);
            near[r] = at.near ? own : other;
            far[r] = at.near ? other : own;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) of_near[e] = of_far[e] = c[e];
    }
    /// += eight products; a, b: the fragments of their terms as in mma.m16n8k8.
    __device__ __forceinline__ void add(const Anchoring& at, const std::uint32_t (&a)[2], std::uint32_t b) {
        mma_bf16(of_near, {a[0], a[1], near[0], near[1]}, b, at.identity);
        mma_bf16(of_far, {a[0], a[1], far[0], far[1]}, b, at.identity);
    }
    __device__ __forceinline__ void store(const Anchoring& at, float* c) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) c[e] = at.near ? of_near[e] : of_far[e];
    }
};
/// c += the eight products, by Ampere's rule.
__device__ __forceinline__ void add(Anchoring& at, float* c, const std::uint32_t (&sums)[2],
                                    const std::uint32_t (&a)[2], std::uint32_t b) {
    Anchored anchored(at, c, sums, emulated::groups::fraction_bits);
    anchored.add(at, a, b);
    anchored.store(at, c);
}

/// Whether a thread's sums of a row, of which some anchor was low, are decided all the same. x: the row's terms, y: those of the thread's first column,
/// y_step and 8 y_column numbers from a term, and from eight columns, to the next.
__device__ __noinline__ inline bool are_decided(const std::uint32_t* x, const std::uint32_t* y, int y_step,
                                                int y_column, int columns) {
    bool all = true;
    for (int n = 0; n < columns; ++n)
        for (int side_by_side = 0; side_by_side < 2; ++side_by_side)
            all = emulated::groups::are_decided(
                      reinterpret_cast<const std::uint16_t*>(x),
                      reinterpret_cast<const std::uint16_t*>(y) + (8 * n + side_by_side) * y_column, y_step) &&
                  all;
    return all;
}

}  // namespace faultline::device::group
