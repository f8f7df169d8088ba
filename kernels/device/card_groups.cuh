// SPDX-License-Identifier: Apache-2.0
// Sums with anchors (group_fragments.cuh) of terms that card_product.cuh has staged, into a warp's 16 by 16.
#pragma once

#include <cstdint>

#include <faultline/device/group_fragments.cuh>

namespace faultline::device::card {

inline constexpr int terms = 16;         ///< of one instruction
inline constexpr int narrow_terms = 32;  ///< of a fused add with 13 fraction bits

__device__ __forceinline__ void load_matrices(std::uint32_t (&x)[4], const std::uint32_t* row, bool transposed) {
    transposed ? faultline::load_matrices<true>(x, row) : faultline::load_matrices<false>(x, row);
}

/// at_x, at_y: the first terms as load_matrices() takes them; own_x, own_y: those of the thread's first row and column.
template <class LinesX, class LinesY>
struct Groups {
    static constexpr int pitch = LinesX::row_pitch, term_pitch = LinesY::term_pitch;
    static_assert(LinesX::row_pitch == LinesY::row_pitch);
    const std::uint32_t *at_x, *at_y, *own_x, *own_y;
    bool y_by_rows;

    /// Where a term's column of y is, from the first one's.
    __device__ __forceinline__ int of_y(int t) const { return y_by_rows ? t / 2 : t * term_pitch; }
    __device__ __forceinline__ void load(std::uint32_t (&a)[4], std::uint32_t (&b)[4], int t) const {
        load_matrices(a, at_x + t / 2, false);
        load_matrices(b, at_y + of_y(t), !y_by_rows);
    }
    /// Of eight terms from `first` on: raises sums[m] of eight columns each; x and y `apart` words from the operands.
    __device__ __forceinline__ void largest(std::uint32_t (&sums)[2][2], const group::Terms (&x)[2], int first,
                                            int apart) const {
        const std::uint32_t* const y = own_y + apart + of_y(first);
        if (y_by_rows) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const std::uint32_t* const column = y + 8 * m * pitch;
                group::raise(sums[m], x, {group::Terms(column), group::Terms(column + pitch)});
            }
        } else {
            std::uint32_t exponents[2][8];
#pragma unroll
            for (int e = 0; e < 16; ++e) exponents[e / 8][e % 8] = x[e / 8].exponent(e % 8);
#pragma unroll
            for (int m = 0; m < 2; ++m) group::raise(sums[m], exponents, y + 4 * m, term_pitch);
        }
    }
    __device__ __forceinline__ void rows(group::Terms (&x)[2], int first, int apart) const {
        const std::uint32_t* const from = own_x + apart + first / 2;
        x[0] = group::Terms(from);
        x[1] = group::Terms(from + 8 * pitch);
    }

    /// n terms in Ampere's groups; false: a sum is not to be had this way.
    __device__ __forceinline__ bool add(float (&sum)[2][4], int n) const {
        group::Anchoring anchoring;
        bool usual = true;
#pragma unroll 1
        for (int t = 0; t < n; t += terms) {
            std::uint32_t a[4], b[4];
            load(a, b, t);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int first = t + half * emulated::groups::terms;
                group::Terms x[2];
                rows(x, first, 0);
                std::uint32_t sums[2][2] = {};
                largest(sums, x, first, 0);
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    group::add(anchoring, sum[m], sums[m], {a[2 * half], a[2 * half + 1]}, b[2 * m + half]);
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (anchoring.was_low(r) && !x[r].are_zeros())
                        usual = group::are_decided(own_x + r * 8 * pitch + first / 2, own_y + of_y(first),
                                                   y_by_rows ? 1 : 2 * term_pitch, y_by_rows ? 2 * pitch : 1, 2) &&
                                usual;
            }
        }
        return usual;
    }

    /// n terms in fused adds of 32 with 13 fraction bits. The exponents stand `apart` words behind the operands. Products that are
    /// not zero lie above 2^-13, so that what is cut from c, which is 0 or above 2^-100 (can_begin()), is as the rule has it.
    __device__ __forceinline__ void add_narrow(float (&sum)[2][4], int n, int apart) const {
        using namespace emulated::groups;
        group::Anchoring anchoring;
#pragma unroll 1
        for (int t = 0; t < n; t += narrow_terms) {
            std::uint32_t sums[2][2] = {};
#pragma unroll
            for (int first = 0; first < narrow_terms; first += emulated::groups::terms) {
                group::Terms x[2];
                rows(x, t + first, apart);
                largest(sums, x, t + first, apart);
            }
            group::Anchored at[2] = {group::Anchored(anchoring, sum[0], sums[0], narrow_fraction_bits),
                                     group::Anchored(anchoring, sum[1], sums[1], narrow_fraction_bits)};
#pragma unroll
            for (int first = 0; first < narrow_terms; first += terms) {
                std::uint32_t a[4], b[4];
                load(a, b, t + first);
#pragma unroll
                for (int half = 0; half < 2;
                     ++half)  // what they leave is a multiple of the unit below 2^24 of it: exact
#pragma unroll
                    for (int m = 0; m < 2; ++m) at[m].add(anchoring, {a[2 * half], a[2 * half + 1]}, b[2 * m + half]);
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                at[m].store(anchoring, sum[m]);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    sum[m][e] = __uint_as_float(__float_as_uint(sum[m][e]) & ~0u << (23 - narrow_fraction_bits));
            }
        }
    }
};

}  // namespace faultline::device::card
