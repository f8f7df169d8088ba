// SPDX-License-Identifier: Apache-2.0
// A product of matrices by the card's own matrix unit, where the plan's rule is its or can be had of it: on Hopper mma.m16n8k16
// of bf16 is, for every input of 92 million that were tried, the fused add of 16 products of lib/tensor_core
// (docs/results/tensor-core-rule.md). An operand that is no number of the unit's format, or a sum that is no float, takes the
// arithmetic of kernels/emulated, block by block. Other cards take it throughout: their units have other rules, and none of
// them was measured.
#pragma once

#include <cstdint>

#include <faultline/base/warp_matrix.cuh>
#include <faultline/device/card_groups.cuh>
#include <faultline/device/cuda_backend.cuh>
#include <faultline/emulated/product.hpp>

namespace faultline::device {

namespace card {

inline constexpr int chunk = 64;  ///< terms that stand in shared memory at once

/// What the unit makes.
enum class Way : unsigned char {
    none,
    sixteen,  ///< its own rule: fused adds of 16 products
    eight,    ///< the same of 8, the others zeros
    groups,   ///< Ampere's (bf16_groups.hpp)
    narrow,   ///< that of Hopper's e4m3: fused adds of 32 products with 13 fraction bits, written with 13
};
/// Whether it has anchors (group_fragments.cuh): operands and beginnings are bounded, and X lies in rows.
template <Way way>
inline constexpr bool is_anchored = way == Way::groups || way == Way::narrow;
__device__ __forceinline__ Way way_of(const Accumulation& order) {
    constexpr int of_bf16 = -126;
    const MatrixUnit& u = order.unit;
    if (order.kind != Accumulation::Kind::fused || u.a_min_exponent != u.b_min_exponent || u.input_fraction_bits != 0 ||
        u.zero != ZeroOperand::ignored)
        return Way::none;
    if (u.output == OutputFormat::e8m13_rz && u.a_min_exponent == emulated::groups::narrow_min_exponent &&
        u.terms == narrow_terms && u.fraction_bits == emulated::groups::narrow_fraction_bits)
        return Way::narrow;
    if (u.output != OutputFormat::f32_rz || u.a_min_exponent != of_bf16) return Way::none;
    if (u.fraction_bits == 25) return u.terms == terms ? Way::sixteen : u.terms == terms / 2 ? Way::eight : Way::none;
    return u.terms == emulated::groups::terms && u.fraction_bits == emulated::groups::fraction_bits ? Way::groups
                                                                                                    : Way::none;
}

/// Two numbers as bf16 in one register, the first in the lower half; `fits` where both are numbers of it, and of those that
/// the way takes: infinity times the zeros that fill an instruction up would be NaN.
template <Way way>
__device__ __forceinline__ std::uint32_t pair(double2 x, bool& fits) {
    const auto low = static_cast<float>(x.x), high = static_cast<float>(x.y);
    std::uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    const float2 back = {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
    fits = fits && static_cast<double>(back.x) == x.x && static_cast<double>(back.y) == x.y;  // not for NaN
    if constexpr (way == Way::eight) fits = fits && isfinite(back.x) && isfinite(back.y);
    if constexpr (is_anchored<way>) fits = fits && emulated::groups::are_operands(bits);
    return bits;
}

/// `rows` rows (or columns of the product) of an operand on their way into shared memory, in lines as they lie in memory: a
/// line is a row's terms, or a term of all rows. What lies beyond the matrix is 0.
template <int rows>
struct Lines {
    static constexpr int pairs = rows * chunk / 2 / threads_per_team;  ///< a thread's
    /// Eight numbers longer than a line, so that eight lines' same 16 bytes lie in different banks.
    static constexpr int row_pitch = (chunk + 8) / 2, term_pitch = (rows + 8) / 2;  ///< in pairs
    static constexpr int as_rows = rows * row_pitch, as_terms = chunk * term_pitch;
    static constexpr int words = as_rows > as_terms ? as_rows : as_terms;

    const double* from;
    std::ptrdiff_t line_stride;
    bool by_rows;  ///< a line is a row's terms
    bool aligned;  ///< two numbers can be read at once
    int valid_rows;

    __device__ __forceinline__ Lines(const double* first, std::ptrdiff_t row_stride, std::ptrdiff_t term_stride,
                                     std::ptrdiff_t left)
        : from(first),
          line_stride(term_stride == 1 ? row_stride : term_stride),
          by_rows(term_stride == 1),
          aligned(reinterpret_cast<std::uintptr_t>(first) % 16 == 0 && line_stride % 2 == 0),
          valid_rows(left < rows ? static_cast<int>(left) : rows) {}
    /// Whether a line is a row of the matrix or of its transpose, without gaps.
    __device__ __forceinline__ static bool can(std::ptrdiff_t row_stride, std::ptrdiff_t term_stride) {
        return row_stride == 1 || term_stride == 1;
    }

    /// Starts the loads of pairs [begin, begin + count) of a thread, `n` terms from `first_term` on.
    template <int count>
    __device__ __forceinline__ void fetch(double2 (&x)[count], int begin, std::ptrdiff_t first_term, int n) const {
        const int in_line = by_rows ? n : valid_rows, lines = by_rows ? valid_rows : n;
        const double* const start = from + first_term * (by_rows ? 1 : line_stride);
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int e = 2 * ((begin + i) * threads_per_team + static_cast<int>(threadIdx.x));
            const int line = by_rows ? e / chunk : e / rows, at = by_rows ? e % chunk : e % rows;
            x[i] = {0, 0};
            const double* const two = start + line * line_stride + at;
            if (line >= lines || at >= in_line) continue;
            if (aligned && at + 1 < in_line) {
                x[i] = *reinterpret_cast<const double2*>(two);
            } else {
                x[i].x = two[0];
                if (at + 1 < in_line) x[i].y = two[1];
            }
        }
    }
    /// Into `to`; exponents, where the way has some of its own, `apart` words further on.
    template <Way way, int count>
    __device__ __forceinline__ void put(const double2 (&x)[count], int begin, std::uint32_t* to,
                                        [[maybe_unused]] int apart, bool& fits) const {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int e = 2 * ((begin + i) * threads_per_team + static_cast<int>(threadIdx.x));
            const std::uint32_t bits = pair<way>(x[i], fits);
            const int at = by_rows ? e / chunk * row_pitch + e % chunk / 2 : e / rows * term_pitch + e % rows / 2;
            to[at] = bits;
            if constexpr (way == Way::narrow) to[apart + at] = emulated::groups::narrow_exponents(bits);
        }
    }
    /// Where the 16 rows from `row` on and the 16 terms from `term` on stand, for load_matrices: `inner` is 1 where matrices
    /// that follow each other are of the same rows (an operand y), 0 where they are of the same terms (x).
    __device__ __forceinline__ const std::uint32_t* matrices(const std::uint32_t* staged, int row, int term,
                                                             int inner) const {
        const int lane = static_cast<int>(threadIdx.x % 32), next = lane / 8 % 2 * 8, far = lane / 16 * 8;
        const int row_part = inner ? far : next, term_part = inner ? next : far;
        if (by_rows) return staged + (row + row_part + lane % 8) * row_pitch + (term + term_part) / 2;
        return staged + (term + term_part + lane % 8) * term_pitch + (row + row_part) / 2;
    }
};

/// So many blocks that the unit had begun, and that are none for it; of this process (Parts::blocks_left).
static __device__ unsigned long long blocks_left = 0;

/// By kernels/emulated: what the card cannot do.
template <class S, class Team>
__device__ __noinline__ void block_by_rule(const Team& team, const MatrixUnit& unit, const emulated::Operands& in,
                                           const emulated::View<double>& c, const emulated::Begin& begin,
                                           std::ptrdiff_t row0, std::ptrdiff_t column0) {
    if (threadIdx.x == 0) atomicAdd(&blocks_left, 1ULL);
    emulated::product::block<S>(team, emulated::product::ByUnit(unit), in, c, begin, row0, column0);
}

/// The block of C at (row0, column0), of S::rows by S::columns: 16 by 16 of it a warp's.
template <Way way, class S, class Team>
__device__ __forceinline__ void block(const Team& team, const MatrixUnit& unit, const emulated::Operands& in,
                                      const emulated::View<double>& c, const emulated::Begin& begin,
                                      std::ptrdiff_t row0, std::ptrdiff_t column0) {
    constexpr int down = S::rows / 16;
    static_assert(S::rows * S::columns == 16 * 16 * threads_per_team / 32);
    using LinesX = Lines<S::rows>;
    using LinesY = Lines<S::columns>;
    constexpr int apart = LinesX::words + LinesY::words, staged = way == Way::narrow ? 2 * apart : apart;
    static_assert(staged * sizeof(std::uint32_t) <= emulated::product::staging_bytes);
    auto* const staged_x = static_cast<std::uint32_t*>(team.shared());
    std::uint32_t* const staged_y = staged_x + LinesX::words;
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    const int row = warp % down * 16, column = warp / down * 16;
    const bool works = row0 + row < c.rows && column0 + column < c.cols;
    const std::ptrdiff_t first_row = row0 + row + lane / 4, first_column = column0 + column + lane % 4 * 2;
    bool fits = true;
    float sum[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const std::ptrdiff_t i = first_row + e / 2 % 2 * 8, j = first_column + e / 4 * 8 + e % 2;
        const double start = begin.at == emulated::Begin::At::c && i < c.rows && j < c.cols ? c(i, j) : 0.0;
        sum[e / 4][e % 4] = static_cast<float>(start);
        fits = fits && static_cast<double>(sum[e / 4][e % 4]) == start;
        if constexpr (is_anchored<way>) fits = fits && emulated::groups::can_begin(sum[e / 4][e % 4]);
    }
    const LinesX x(in.x + row0 * in.x_row, in.x_row, in.x_step, c.rows - row0);
    const LinesY y(in.y + column0 * in.y_col, in.y_col, in.y_step, c.cols - column0);
    for (std::ptrdiff_t first = 0; first < in.k; first += chunk) {
        const int n = in.k - first < chunk ? static_cast<int>(in.k - first) : chunk;
        constexpr int y_part = LinesY::pairs < 8 ? LinesY::pairs : 8;
        double2 of_x[LinesX::pairs], of_y[y_part];
        x.fetch(of_x, 0, first, n);
        y.fetch(of_y, 0, first, n);
        x.template put<way>(of_x, 0, staged_x, apart, fits);
        y.template put<way>(of_y, 0, staged_y, apart, fits);
#pragma unroll
        for (int part = y_part; part < LinesY::pairs; part += y_part) {
            y.fetch(of_y, part, first, n);
            y.template put<way>(of_y, part, staged_y, apart, fits);
        }
        if (!__syncthreads_and(fits)) {
            block_by_rule<S>(team, unit, in, c, begin, row0, column0);
            return;
        }
        if (works) {
            const std::uint32_t* const at_x = x.matrices(staged_x, row, 0, 0);
            const std::uint32_t* const at_y = y.matrices(staged_y, column, 0, 1);
            if constexpr (is_anchored<way>) {
                const std::uint32_t* const own_x = staged_x + (row + lane / 4) * LinesX::row_pitch;
                const int own_column = column + lane % 4 * 2;
                const std::uint32_t* const own_y =
                    staged_y + (y.by_rows ? own_column * LinesY::row_pitch : own_column / 2);
                const Groups<LinesX, LinesY> groups{at_x, at_y, own_x, own_y, y.by_rows};
                if constexpr (way == Way::groups)
                    fits = groups.add(sum, n) && fits;
                else
                    groups.add_narrow(sum, n, apart);
            } else {
#pragma unroll
                for (int t = 0; t < chunk; t += terms) {  // terms that are not there are zeros, which take no part
                    std::uint32_t a[4], b[4];
                    load_matrices(a, at_x + t * (x.by_rows ? 1 : 2 * LinesX::term_pitch) / 2, !x.by_rows);
                    load_matrices(b, at_y + t * (y.by_rows ? 1 : 2 * LinesY::term_pitch) / 2, !y.by_rows);
                    if constexpr (way == Way::sixteen) {
                        mma_bf16(sum[0], a, b[0], b[1]);
                        mma_bf16(sum[1], a, b[2], b[3]);
                    } else {
                        mma_bf16_by_eight(sum[0], a, b[0], b[1]);
                        mma_bf16_by_eight(sum[1], a, b[2], b[3]);
                    }
                }
            }
        }
        team.sync();
    }
    if constexpr (way == Way::groups) {
        if (!__syncthreads_and(fits)) {
            block_by_rule<S>(team, unit, in, c, begin, row0, column0);
            return;
        }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const std::ptrdiff_t i = first_row + e / 2 % 2 * 8, j = first_column + e / 4 * 8 + e % 2;
        if (i >= c.rows || j >= c.cols) continue;
        const float s = sum[e / 4][e % 4];
        begin.store(c(i, j), isnan(s) ? fused::canonical_nan() : static_cast<double>(s));
    }
}

template <Way way, class S, class Team>
__device__ __forceinline__ void blocks(const Team& team, const MatrixUnit& unit, const emulated::Operands& in,
                                       const emulated::View<double>& c, const emulated::Begin& begin) {
    for (std::ptrdiff_t i = 0; i < c.rows; i += S::rows)
        for (std::ptrdiff_t j = 0; j < c.cols; j += S::columns) block<way, S>(team, unit, in, c, begin, i, j);
    team.sync();
}

/// In blocks of the shape that leaves fewest warps idle.
template <Way way, class Team>
__device__ __noinline__ void by(const Team& team, const MatrixUnit& unit, const emulated::Operands& in,
                                const emulated::View<double>& c, const emulated::Begin& begin) {
    using namespace emulated::product;
    if constexpr (way == Way::narrow) {  // Wide with its exponents has no room
        if (c.rows <= Square::rows || c.cols > Tall::columns) return blocks<way, Square>(team, unit, in, c, begin);
        return blocks<way, Tall>(team, unit, in, c, begin);
    } else if (c.rows <= Wide::rows && c.cols > Square::columns)
        blocks<way, Wide>(team, unit, in, c, begin);
    else if (c.rows > Square::rows && c.cols <= Tall::columns)
        blocks<way, Tall>(team, unit, in, c, begin);
    else
        blocks<way, Square>(team, unit, in, c, begin);
}

}  // namespace card

/// The threads of a block that has the card's matrix unit.
struct UnitTeam : BlockTeam {
    /// C <- C + X Y by it (emulated::multiply()); false where it is not for that.
    __device__ bool multiply([[maybe_unused]] const Accumulation& order, [[maybe_unused]] const emulated::Operands& in,
                             [[maybe_unused]] const emulated::View<double>& c,
                             [[maybe_unused]] const emulated::Begin& begin) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
        using Lines = card::Lines<32>;
        if (in.k <= 0 || !Lines::can(in.x_row, in.x_step) || !Lines::can(in.y_col, in.y_step)) return false;
        const card::Way way = card::way_of(order);
        if (way == card::Way::sixteen)
            card::by<card::Way::sixteen>(*this, order.unit, in, c, begin);
        else if (way == card::Way::eight)
            card::by<card::Way::eight>(*this, order.unit, in, c, begin);
        else if (way == card::Way::groups && in.x_step == 1)
            card::by<card::Way::groups>(*this, order.unit, in, c, begin);
        else if (way == card::Way::narrow && in.x_step == 1)
            card::by<card::Way::narrow>(*this, order.unit, in, c, begin);
        else
            return false;
        return true;
#endif
        return false;
    }
};

}  // namespace faultline::device
