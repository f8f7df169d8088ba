// SPDX-License-Identifier: Apache-2.0
// The products of gradients.cu: tiles of 64 rows of bf16 in shared memory, sums in a thread's registers, by the card's matrix
// unit or by the thread (bf16_groups.hpp).
#pragma once

#include <cfloat>
#include <cstdint>

#include <faultline/base/warp_matrix.cuh>
#include <faultline/device/gradient_plan.hpp>
#include <faultline/emulated/bf16_groups.hpp>

namespace faultline::device::gradients {

template <class T>
using View = emulated::View<T>;

inline constexpr int threads = 256, side = 64;  ///< of a block; rows and keys of a tile of scores

/// What a tile's rows have beside their operands, in shared memory.
struct RowValues {
    double reference[side], shift[side], delta[side];
};
template <int d>
struct Shared {
    static constexpr int pitch = (d + 8) / 2;  ///< of an operand's row, in pairs: rows begin in different banks
    static constexpr int score_pitch = (side + 8) / 2;
    std::uint32_t q[side * pitch], k[side * pitch], v[side * pitch], dout[side * pitch];
    std::uint32_t p[side * score_pitch], ds[side * score_pitch];
    RowValues rows;
};

/// Two numbers as bf16 in one register; usual: both are finite and numbers of it.
template <Products products>
__device__ __forceinline__ std::uint32_t pair(double2 x, bool& usual) {
    const float low = static_cast<float>(x.x), high = static_cast<float>(x.y);
    const std::uint32_t l = __float_as_uint(low), h = __float_as_uint(high);
    usual = usual && static_cast<double>(low) == x.x && static_cast<double>(high) == x.y && ((l | h) & 0xFFFFu) == 0 &&
            fabsf(low) <= FLT_MAX && fabsf(high) <= FLT_MAX;
    const std::uint32_t both = __byte_perm(l, h, 0x7632);
    if constexpr (products == Products::groups) usual = usual && emulated::groups::are_operands(both);
    return both;
}

/// Rows [first, first + side) of an operand of d columns; those from `rows` on are zeros.
template <Products products, int d>
__device__ __forceinline__ void load(const View<const double>& from, int first, int rows, std::uint32_t* to,
                                     bool& usual) {
#pragma unroll 8
    for (int i = 0; i < side * d / 2 / threads; ++i) {
        const int e = i * threads + static_cast<int>(threadIdx.x), row = e / (d / 2), at = e % (d / 2);
        double2 x{0, 0};
        if (row < rows) x = *reinterpret_cast<const double2*>(from.row(first + row) + 2 * at);
        to[row * Shared<d>::pitch + at] = pair<products>(x, usual);
    }
}

/// Which elements of a tile of scores, c[n][e], and of 64 rows of gradients a thread has. By the card's unit those of its warp's
/// fragments; otherwise four rows, and columns side by side among the threads.
template <Products products>
struct Layout {
    static constexpr bool by_unit = products != Products::groups;
    __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
    __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
    __device__ static int warp_row() { return warp() % 4 * 16; }
    /// Of a block of `columns`, a half of which is a warp's.
    __device__ static int warp_column(int columns) { return warp() / 4 * (columns / 2); }
    __device__ static int across() { return static_cast<int>(threadIdx.x % 16); }
    __device__ static int down() { return static_cast<int>(threadIdx.x / 16); }

    __device__ static int row(int e) { return by_unit ? warp_row() + lane() / 4 + 8 * (e / 2) : 4 * down() + e; }
    __device__ static int score_column(int n, int e) {
        return by_unit ? warp_column(side) + lane() % 4 * 2 + 8 * n + e % 2 : across() + 16 * n;
    }
    template <int d>
    __device__ static int gradient_column(int n, int e) {
        return by_unit ? warp_column(d) + lane() % 4 * 2 + 8 * n + e % 2 : 2 * (across() + 16 * (n / 2)) + n % 2;
    }
};

template <Products products>
__device__ __forceinline__ void multiply_fragments(float* c, const std::uint32_t (&a)[4], std::uint32_t b0,
                                                   std::uint32_t b1) {
    if constexpr (products == Products::sixteen)
        mma_bf16(c, a, b0, b1);
    else
        mma_bf16_by_eight(c, a, b0, b1);
}

/// c += x y^T: 64 rows of x, 64 of y, d terms.
template <Products products, int d>
__device__ __forceinline__ void add_scores(float (&c)[4][4], const std::uint32_t* x, const std::uint32_t* y) {
    constexpr int pitch = Shared<d>::pitch;
    using At = Layout<products>;
    const int lane = At::lane(), next = lane / 8 % 2 * 8, far = lane / 16 * 8;
    const std::uint32_t* const at_x = x + (At::warp_row() + next + lane % 8) * pitch + far / 2;
    const std::uint32_t* const at_y = y + (At::warp_column(side) + far + lane % 8) * pitch + next / 2;
#pragma unroll
    for (int t = 0; t < d; t += 16) {
        std::uint32_t a[4], b[4];
        load_matrices<false>(a, at_x + t / 2);
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            load_matrices<false>(b, at_y + n * 8 * pitch + t / 2);
            multiply_fragments<products>(c[n], a, b[0], b[1]);
            multiply_fragments<products>(c[n + 1], a, b[2], b[3]);
        }
    }
}
/// c += x y of 64 terms: x [64, 64], or its transpose, y [64, d].
template <Products products, int d, bool transposed>
__device__ __forceinline__ void add_gradients(float (&c)[d / 16][4], const std::uint32_t* x, const std::uint32_t* y) {
    constexpr int pitch = Shared<d>::pitch, score_pitch = Shared<d>::score_pitch;
    using At = Layout<products>;
    const int lane = At::lane(), next = lane / 8 % 2 * 8, far = lane / 16 * 8, row = At::warp_row();
    const std::uint32_t* const at_x = transposed ? x + (far + lane % 8) * score_pitch + (row + next) / 2
                                                 : x + (row + next + lane % 8) * score_pitch + far / 2;
    const std::uint32_t* const at_y = y + (next + lane % 8) * pitch + (At::warp_column(d) + far) / 2;
#pragma unroll
    for (int t = 0; t < side; t += 16) {
        std::uint32_t a[4], b[4];
        load_matrices<transposed>(a, at_x + (transposed ? t * score_pitch : t / 2));
#pragma unroll
        for (int n = 0; n < d / 16; n += 2) {
            load_matrices<true>(b, at_y + t * pitch + n * 8 / 2);
            multiply_fragments<products>(c[n], a, b[0], b[1]);
            multiply_fragments<products>(c[n + 1], a, b[2], b[3]);
        }
    }
}

/// c += x y of so many terms in groups. x: rows of terms, `x_pitch` pairs from one to the next. y: rows of terms, of the columns
/// score_column(), or (by_terms) terms of gradient_column().
template <int d, int columns, int all_terms, bool by_terms>
__device__ __forceinline__ void add_in_groups(float (&c)[columns][4], const std::uint32_t* x, int x_pitch,
                                              const std::uint32_t* y, bool& usual) {
    using At = Layout<Products::groups>;
    constexpr int pitch = Shared<d>::pitch, terms = emulated::groups::terms;
#pragma unroll 1
    for (int first = 0; first < all_terms; first += terms) {
        std::uint32_t xs[4][4], ys[by_terms ? 1 : columns][4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const uint4 v = *reinterpret_cast<const uint4*>(x + At::row(e) * x_pitch + first / 2);
            xs[e][0] = v.x, xs[e][1] = v.y, xs[e][2] = v.z, xs[e][3] = v.w;
        }
        if constexpr (!by_terms) {
#pragma unroll
            for (int n = 0; n < columns; ++n) {
                const uint4 v = *reinterpret_cast<const uint4*>(y + At::score_column(n, 0) * pitch + first / 2);
                ys[n][0] = v.x, ys[n][1] = v.y, ys[n][2] = v.z, ys[n][3] = v.w;
            }
        }
        const auto of_y = [&](int t, int m) {
            if constexpr (by_terms)
                return y[(first + t) * pitch + At::across() + 16 * m];
            else
                return __byte_perm(ys[2 * m][t / 2], ys[2 * m + 1][t / 2], t % 2 == 0 ? 0x5410 : 0x7632);
        };
        std::uint32_t undecided = emulated::groups::add<columns>(
            c, [&](int e, int i) { return xs[e][i]; }, of_y);
        for (; undecided != 0; undecided &= undecided - 1) {
            const int at = __ffs(static_cast<int>(undecided)) - 1, n = at / 4, e = at % 4;
            const auto* const row = reinterpret_cast<const std::uint16_t*>(x + At::row(e) * x_pitch + first / 2);
            const int column = by_terms ? At::template gradient_column<d>(n, e) : At::score_column(n, e);
            const auto* const all_y = reinterpret_cast<const std::uint16_t*>(y);
            const auto* const of_column =
                by_terms ? all_y + first * 2 * pitch + column : all_y + column * 2 * pitch + first;
            usual = emulated::groups::vanish(row, of_column, by_terms ? 2 * pitch : 1) && usual;
        }
    }
}
}  // namespace faultline::device::gradients
