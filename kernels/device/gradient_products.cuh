// SPDX-License-Identifier: Apache-2.0
// The products of gradients.cu: tiles of 64 rows of bf16 in shared memory, sums in a thread's registers, by the card's matrix
// unit.
#pragma once

#include <cfloat>
#include <cstdint>

#include <faultline/base/warp_matrix.cuh>
#include <faultline/device/gradient_plan.hpp>
#include <faultline/device/group_fragments.cuh>

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

/// Which elements of a tile of scores, c[n][e], and of 64 rows of gradients a thread has: those of its warp's fragments.
struct Layout {
    __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
    __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
    __device__ static int warp_row() { return warp() % 4 * 16; }
    /// Of a block of `columns`, a half of which is a warp's.
    __device__ static int warp_column(int columns) { return warp() / 4 * (columns / 2); }

    __device__ static int row(int e) { return warp_row() + lane() / 4 + 8 * (e / 2); }
    __device__ static int column(int columns, int n, int e) {
        return warp_column(columns) + lane() % 4 * 2 + 8 * n + e % 2;
    }
    __device__ static int score_column(int n, int e) { return column(side, n, e); }
    template <int d>
    __device__ static int gradient_column(int n, int e) {
        return column(d, n, e);
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
    using At = Layout;
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
    using At = Layout;
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

/// add_scores() in groups.
template <int d>
__device__ __forceinline__ void add_scores_in_groups(float (&c)[4][4], const std::uint32_t* x, const std::uint32_t* y,
                                                     bool& usual) {
    using At = Layout;
    constexpr int pitch = Shared<d>::pitch;
    const int lane = At::lane();
    const std::uint32_t* const own_x = x + At::row(0) * pitch;
    const std::uint32_t* const own_y = y + At::score_column(0, 0) * pitch;
    const std::uint32_t* const at_y = y + (At::warp_column(side) + lane) * pitch;
    group::Anchoring anchoring;
#pragma unroll 1
    for (int t = 0; t < d; t += emulated::groups::terms) {
        const group::Terms of_x[2] = {group::Terms(own_x + t / 2), group::Terms(own_x + 8 * pitch + t / 2)};
        const std::uint32_t a[2] = {own_x[t / 2 + lane % 4], own_x[8 * pitch + t / 2 + lane % 4]};
        std::uint32_t b[4];
        load_matrices<false>(b, at_y + t / 2);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const std::uint32_t* const columns = own_y + 8 * n * pitch + t / 2;
            const group::Terms of_y[2] = {group::Terms(columns), group::Terms(columns + pitch)};
            std::uint32_t sums[2] = {};
            group::raise(sums, of_x, of_y);
            group::add(anchoring, c[n], sums, a, b[n]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (anchoring.was_low(r) && !of_x[r].are_zeros())
                usual = group::are_decided(own_x + r * 8 * pitch + t / 2, own_y + t / 2, 1, 2 * pitch, 4) && usual;
    }
}
/// add_gradients() in groups; x as it is.
template <int d>
__device__ __forceinline__ void add_gradients_in_groups(float (&c)[d / 16][4], const std::uint32_t* x,
                                                        const std::uint32_t* y, bool& usual) {
    using At = Layout;
    constexpr int pitch = Shared<d>::pitch, score_pitch = Shared<d>::score_pitch;
    const int lane = At::lane();
    const std::uint32_t* const own_x = x + At::row(0) * score_pitch;
    const std::uint32_t* const own_y = y + At::gradient_column<d>(0, 0) / 2;
    const std::uint32_t* const at_y = y + lane % 8 * pitch + (At::warp_column(d) + lane / 8 * 8) / 2;
    group::Anchoring anchoring;
#pragma unroll 1
    for (int t = 0; t < side; t += emulated::groups::terms) {
        bool zeros[2];
        std::uint32_t exponents[2][8], b[4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const group::Terms of_x(own_x + r * 8 * score_pitch + t / 2);
            zeros[r] = of_x.are_zeros();
#pragma unroll
            for (int k = 0; k < 8; ++k) exponents[r][k] = of_x.exponent(k);
        }
        const std::uint32_t a[2] = {own_x[t / 2 + lane % 4], own_x[8 * score_pitch + t / 2 + lane % 4]};
#pragma unroll
        for (int n = 0; n < d / 16; ++n) {
            if (n % 4 == 0) load_matrices<true>(b, at_y + t * pitch + n * 8 / 2);
            std::uint32_t sums[2] = {};
            group::raise(sums, exponents, own_y + t * pitch + n * 8 / 2, pitch);
            group::add(anchoring, c[n], sums, a, b[n % 4]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (anchoring.was_low(r) && !zeros[r])
                usual =
                    group::are_decided(own_x + r * 8 * score_pitch + t / 2, own_y + t * pitch, 2 * pitch, 1, d / 16) &&
                    usual;
    }
}
}  // namespace faultline::device::gradients
