// SPDX-License-Identifier: Apache-2.0
// A matrix unit's fused adds in the registers of a team's threads: fused_float.hpp with the product inside of the truncating
// sum. a b + A rounded toward zero, |A| = 2^(u+52) with the sign of a b, is A plus the exact product cut to a multiple of the
// unit 2^u, since binary64's spacing from |A| on is 2^u. That takes three operations of binary64 for a product, and the largest
// exponent one addition and comparison of 16-bit integers for two (viaddmax on Hopper).
#pragma once

#include <cstdint>

#include <faultline/emulated/product_block.hpp>
#include <faultline/tensor_core/fused_float.hpp>

namespace faultline::emulated::product {

// Exponents in 16 bits. That of a zero that takes no part, and of what fused::add has to decide: their sums with each other
// and with an ordinary one (-1074 to 500) stay on the same side of `decided`.
inline constexpr int no_exponent = -8000, huge_exponent = 10000, largest_ordinary = 500, decided = 900;

/// Operands of a block of shape S in shared memory, with the exponents that go into the search for the largest.
template <class S>
struct Exponents {
    alignas(16) std::uint32_t x[S::terms * S::x_pitch];  ///< twice the same
    alignas(16) std::int16_t y[S::terms * S::y_pitch];
};
template <class S>
struct Staged {
    Panels<double, S> values;
    Exponents<S> exponents;
};

/// max(so_far, x + y) in both halves of 32 bits.
FAULTLINE_HD inline std::uint32_t larger_sums(std::uint32_t x, std::uint32_t y, std::uint32_t so_far) {
#if defined(__CUDA_ARCH__)
    return __viaddmax_s16x2(x, y, so_far);
#else
    std::uint32_t r = 0;
    for (int half = 0; half < 32; half += 16) {
        const int sum = static_cast<std::int16_t>(x >> half) + static_cast<std::int16_t>(y >> half);
        const int old = static_cast<std::int16_t>(so_far >> half);
        r |= static_cast<std::uint32_t>(static_cast<std::uint16_t>(sum > old ? sum : old)) << half;
    }
    return r;
#endif
}
FAULTLINE_HD inline std::uint32_t both(int x) {
    return static_cast<std::uint32_t>(static_cast<std::uint16_t>(x)) * 0x10001u;
}

/// x y + anchor toward zero, anchor with the sign of x y and above it.
FAULTLINE_HD inline double anchored(double x, double y, double anchor) {
#if defined(__CUDA_ARCH__)
    return __fma_rz(x, y, anchor);
#else
    return fused::detail::sum_toward_zero(fused::detail::product_toward_zero(x, y), anchor);
#endif
}
FAULTLINE_HD inline double from_upper(std::uint32_t upper) {
#if defined(__CUDA_ARCH__)
    return __hiloint2double(static_cast<int>(upper), 0);
#else
    return fused::from_bits(static_cast<std::uint64_t>(upper) << 32);
#endif
}

/// How an operand of a matrix unit is staged.
struct UnitInput {
    int min_exponent, fraction_bits, of_zero;

    FAULTLINE_HD double value(double x) const {
        return fraction_bits == 0 ? x : truncated(x, fraction_bits, min_exponent);
    }
    FAULTLINE_HD_CALLED static double truncated(double x, int fraction_bits, int min_exponent) {
        return fused::truncate_input(x, fraction_bits, min_exponent);
    }
    FAULTLINE_HD int exponent(double x) const {
        const std::uint32_t upper = fused::detail::upper_half(x);
        const int e = static_cast<int>(upper >> 20 & 0x7FF) - 1023;
        if (x == 0) return of_zero;
        if (e > largest_ordinary) return huge_exponent;
        return e > min_exponent ? e : min_exponent;
    }
};
FAULTLINE_HD inline UnitInput unit_input(const MatrixUnit& u, int min_exponent) {
    return {min_exponent, u.input_fraction_bits,
            u.zero == ZeroOperand::ignored ? no_exponent : zero_operand_exponent(u.zero, min_exponent)};
}

/// fused::add of staged terms.
template <class S>
FAULTLINE_HD_CALLED double add_in_general(const MatrixUnit& u, const double* x, const double* y, int count, double c) {
    return fused::add(
        u, [&](int t) { return x[t * S::wide_x_pitch]; }, [&](int t) { return y[t * S::y_pitch]; }, count, c);
}

/// A fused add of `count` staged terms from `t0` on: c, a lane's part of C, row by row, becomes the unit's value.
template <class S>
FAULTLINE_HD inline void fused_add(const MatrixUnit& u, const Staged<S>& staged, const Lane& lane, int t0, int count,
                                   double (&c)[lane_elements]) {
    constexpr std::uint32_t sign_bit = 0x80000000u;
    std::uint32_t largest[lane_rows];
    FAULTLINE_HD_UNROLL
    for (int r = 0; r < lane_rows; ++r) largest[r] = both(2 * no_exponent);
    const std::uint32_t* xe = staged.exponents.x + t0 * S::x_pitch + lane.row;
    const std::int16_t* ye = staged.exponents.y + t0 * S::y_pitch + lane.column;
    FAULTLINE_HD_UNROLL_BY(4)
    for (int t = 0; t < count; ++t) {
        const auto x = several<lane_rows>(xe + t * S::x_pitch);
        const auto y = several<lane_columns>(ye + t * S::y_pitch);
        const std::uint32_t pair =
            static_cast<std::uint16_t>(y.v[0]) | static_cast<std::uint32_t>(static_cast<std::uint16_t>(y.v[1])) << 16;
        FAULTLINE_HD_UNROLL
        for (int r = 0; r < lane_rows; ++r) largest[r] = larger_sums(x.v[r], pair, largest[r]);
    }
    std::uint32_t anchor[lane_elements];  // its upper half
    unsigned undecided = 0;
    double sum[lane_elements];
    const int c_min = accumulator_min_exponent(u.output), c_zero = fused::zero_exponent(u.output);
    FAULTLINE_HD_UNROLL
    for (int e = 0; e < lane_elements; ++e) {
        int exponent = static_cast<std::int16_t>(largest[e / lane_columns] >> 16 * (e % lane_columns));
        const int of_c = fused::detail::exponent_of(c[e], c_min, c_zero);
        exponent = exponent > of_c ? exponent : of_c;
        undecided |= exponent > decided ? 1u << e : 0u;
        exponent = exponent > decided ? 0 : exponent;
        anchor[e] = static_cast<std::uint32_t>(exponent - u.fraction_bits + 52 + 1023) << 20;
        const double own = from_upper(anchor[e] | (fused::detail::upper_half(c[e]) & sign_bit));
        sum[e] = fused::detail::sum_toward_zero(c[e], own) - own;
    }
    const double* xs = staged.values.x + t0 * S::wide_x_pitch + lane.row;
    const double* ys = staged.values.y + t0 * S::y_pitch + lane.column;
    FAULTLINE_HD_UNROLL_BY(4)
    for (int t = 0; t < count; ++t) {
        const auto x = several<lane_rows>(xs + t * S::wide_x_pitch);
        const auto y = several<lane_columns>(ys + t * S::y_pitch);
        FAULTLINE_HD_UNROLL
        for (int e = 0; e < lane_elements; ++e) {
            const double a = x.v[e / lane_columns], b = y.v[e % lane_columns];
            const std::uint32_t sign = (fused::detail::upper_half(a) ^ fused::detail::upper_half(b)) & sign_bit;
            const double own = from_upper(anchor[e] ^ sign);
            sum[e] += anchored(a, b, own) - own;
        }
    }
    unsigned rare = undecided;  // results that are not normal numbers of the output format, or not to be had this way
    double result[lane_elements];
    FAULTLINE_HD_UNROLL
    for (int e = 0; e < lane_elements; ++e)
        rare |= fused::detail::written_as_normal(sum[e], u.output, result[e]) ? 0u : 1u << e;
    if (rare != 0) {
        FAULTLINE_HD_UNROLL
        for (int e = 0; e < lane_elements; ++e) {
            const int unit = static_cast<int>(anchor[e] >> 20) - 1023 - 52;
            if ((undecided >> e & 1) != 0)
                result[e] = add_in_general<S>(u, xs + e / lane_columns, ys + e % lane_columns, count, c[e]);
            else if ((rare >> e & 1) != 0)
                result[e] = fused::detail::written_in_general(sum[e], unit, u.output);
        }
    }
    FAULTLINE_HD_UNROLL
    for (int e = 0; e < lane_elements; ++e) c[e] = result[e];
}

/// A matrix unit of at most most_terms terms.
struct ByUnit {
    template <class S>
    using Memory = Staged<S>;
    using Sum = double;
    MatrixUnit unit;
    UnitInput x, y;

    FAULTLINE_HD explicit ByUnit(const MatrixUnit& u)
        : unit(u), x(unit_input(u, u.a_min_exponent)), y(unit_input(u, u.b_min_exponent)) {}
    [[nodiscard]] FAULTLINE_HD int longest(int n) const { return n / unit.terms * unit.terms; }
    template <class S>
    FAULTLINE_HD void set_x(Staged<S>& m, int t, int r, double v) const {
        v = x.value(v);
        m.values.x[t * S::wide_x_pitch + r] = v;
        m.exponents.x[t * S::x_pitch + r] = both(x.exponent(v));
    }
    template <class S>
    FAULTLINE_HD void set_y(Staged<S>& m, int t, int r, double v) const {
        v = y.value(v);
        m.values.y[t * S::y_pitch + r] = v;
        m.exponents.y[t * S::y_pitch + r] = static_cast<std::int16_t>(y.exponent(v));
    }
    template <class S>
    FAULTLINE_HD void add(const Staged<S>& m, const Lane& lane, int n, double (&c)[lane_elements]) const {
        for (int t = 0; t < n; t += unit.terms) {
            const int count = n - t < unit.terms ? n - t : unit.terms;
            fused_add<S>(unit, m, lane, t, count, c);
        }
    }
};

}  // namespace faultline::emulated::product
