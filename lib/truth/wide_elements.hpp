// SPDX-License-Identifier: Apache-2.0
// What the fast path does with one key of a row, for the vector loops of the processor (row_passes, elementary,
// products, softcap_row, fast_columns) and for the threads of a device (kernels/truth_teams) alike. Choices are written
// as selections, so that the loops vectorise.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <faultline/base/host_device.hpp>
#include <faultline/random/bits_as.hpp>
#include <faultline/truth/double_double.hpp>

namespace faultline::detail {

/// Terms smaller than 2^-300 of a row's (or column's) largest are left out of its sums and go into the bound.
inline constexpr double flush_exponent = -300;
/// An upper bound of what such a term, mantissa below 8, amounts to.
inline constexpr double flushed_term = 0x1p-297;
/// The exponent that stands for "nothing here": below every other, and differences with it are still exact.
inline constexpr double no_exponent = -0x1p50;
/// Exponents below this say that there is nothing (no_exponent and what little may have been added to it).
inline constexpr double none_exponent = -0x1p49;
/// Covers the roundings and products of errors in a bound's own arithmetic.
inline constexpr double round_up = 1 + 0x1p-20;

/// 2^k for an integer k in [-1022, 1023]: its exponent field, made by an addition that leaves k + 1023 in the low bits.
FAULTLINE_HD_INLINE double power_of_two(double k) {
    return bits_as<double>(bits_as<std::uint64_t>(k + (0x1.8p52 + 1023)) << 52);
}

/// floor(log2 |x|) of a normal x; -1023 of 0.
FAULTLINE_HD_INLINE double exponent_of(double x) {
    const std::uint64_t field = (bits_as<std::uint64_t>(x) >> 52) & 0x7ff;
    return bits_as<double>(field | 0x4330000000000000) - (0x1p52 + 1023);
}

/// The smallest power of two above a normal x > 0.
FAULTLINE_HD_INLINE double power_beyond(double x) { return power_of_two(exponent_of(x) + 1); }

/// high + low times 2^exponent.
struct WideValue {
    double high, low, exponent;
};

/// What is known of p_j: relative error alpha + beta |exponent_j|.
struct RelativeError {
    double alpha;
    double beta;
};
FAULTLINE_HD_INLINE double relative_error(RelativeError of, double exponent) {
    return of.alpha + of.beta * std::fabs(exponent);
}

/// A sum times 2^exponent with an error times 2^exponent. exponent is none_exponent when it is exactly 0.
struct WideSum {
    DoubleDouble value;
    double exponent = 0;
    double error = 0;
};

/// The depth of a sum of so many terms as a tree (tree_sum): its error relative to sum |a_j| is this times add_error.
FAULTLINE_HD_INLINE constexpr double tree_depth(std::ptrdiff_t count) {
    int width = 0;
    for (; count > 0; count /= 2) ++width;
    return width + 1;
}

/// One product into the pair (acc, low) of lemma 1.
FAULTLINE_HD_INLINE void product_step(double a, double b, double& acc, double& low) {
    const double t = std::fma(a, b, acc);
    const double h = t - acc;
    low += std::fma(a, b, -h);
    acc = t;
}
/// The same with a factor a_high + a_low.
FAULTLINE_HD_INLINE void product_step(double a_high, double a_low, double b, double& acc, double& low) {
    const double t = std::fma(a_high, b, acc);
    const double h = t - acc;
    low += std::fma(a_low, b, std::fma(a_high, b, -h));
    acc = t;
}
/// The sum that began at sigma, exactly.
FAULTLINE_HD_INLINE DoubleDouble finished(double sigma, double acc, double low) { return two_sum(acc - sigma, low); }

/// p scaled to 2^reference, 0 below the flush threshold.
FAULTLINE_HD_INLINE DoubleDouble scaled_to(WideValue p, double reference) {
    const double k = p.exponent - reference;
    const double factor = power_of_two(k < flush_exponent ? 0 : k);
    const double f = k < flush_exponent ? 0 : factor;
    return {p.high * f, p.low * f};
}

/// The exponent of a with an error; no_exponent where it is exactly 0.
FAULTLINE_HD_INLINE double size_exponent(double high, double error, double exponent) {
    const double size = std::fabs(high) + error;
    const double e = exponent + exponent_of(size);
    return size == 0 ? no_exponent : e;
}

/// A term of a sum on one scale.
struct ScaledTerm {
    DoubleDouble value;
    double magnitude, error;
};

/// a with an error on the scale of 2^reference, 0 below the flush threshold.
FAULTLINE_HD_INLINE ScaledTerm scaled_to(WideValue a, double error, double reference) {
    const double size = std::fabs(a.high) + error;
    const double k = a.exponent - reference;
    const bool flush = k + exponent_of(size) < flush_exponent;
    const double factor = power_of_two(flush ? 0 : k);
    const double f = flush ? 0 : factor;
    const double flushed = flush ? flushed_term : 0;
    return {{a.high * f, a.low * f}, std::fabs(a.high) * f, error * f + (size == 0 ? 0 : flushed)};
}

/// p_j d_j, whose exponent (size_exponent of d_j and p_j's) is `term`, on the scale of 2^reference.
FAULTLINE_HD_INLINE ScaledTerm weighted_term(WideValue p, RelativeError p_error, DoubleDouble d, double d_error,
                                             double term, double reference, double own_error) {
    const bool flush = term - reference < flush_exponent;
    const double factor = power_of_two(flush ? 0 : p.exponent - reference);
    const double f = flush ? 0 : factor;
    const DoubleDouble weight{p.high * f, p.low * f};
    const DoubleDouble u = weight * d;
    const double flushed = flush ? flushed_term : 0;
    const double error = std::fabs(u.high) * (p_error.alpha + p_error.beta * std::fabs(p.exponent) + own_error) +
                         weight.high * d_error + (p.high == 0 ? 0 : flushed);
    return {u, 0, error};
}

/// A value with the bound of its error, both times 2^exponent.
struct WideBounded {
    WideValue value;
    double error;
};

/// The sum of p_j d_j as the gradient has it: on its own scale and on that of the d_j.
struct Rest {
    WideSum wide;
    DoubleDouble near;
    double near_error;
};
FAULTLINE_HD_INLINE Rest rest_of(const WideSum& sum) {
    // On the scale of the d_j themselves. Below 2^-900 it is lost on them: they are 2^-550 at least.
    constexpr double lost = -900;
    Rest rest{sum, {}, 0};
    if (sum.exponent >= lost) {
        const double factor = power_of_two(sum.exponent);
        rest.near = {sum.value.high * factor, sum.value.low * factor};
        rest.near_error = sum.error * factor;
    } else if (sum.exponent != none_exponent) {
        rest.near_error = 0x1p-800;  // mantissa below count * 8 < 2^60
    }
    return rest;
}

/// ds_j = p_j (d_j - rest). Where d_j is exactly 0 what is left is -p_j rest, on any scale.
FAULTLINE_HD_INLINE WideBounded gradient_element(WideValue p, RelativeError p_error, DoubleDouble d, double d_error,
                                                 const Rest& rest) {
    const bool alone = std::fabs(d.high) + d_error == 0;
    const DoubleDouble subtrahend{alone ? rest.wide.value.high : rest.near.high,
                                  alone ? rest.wide.value.low : rest.near.low};
    const DoubleDouble g = d - subtrahend;
    const double g_error =
        d_error + (alone ? rest.wide.error : rest.near_error) + add_error * (std::fabs(d.high) + std::fabs(g.high));
    const DoubleDouble r = DoubleDouble{p.high, p.low} * g;
    const double p_relative = p_error.alpha + p_error.beta * std::fabs(p.exponent) + mul_error;
    return {{r.high, r.low, p.exponent + (alone ? rest.wide.exponent : 0)},
            p.high * (g_error + std::fabs(g.high) * p_relative) * round_up};
}

/// The exponent of a_j (column_j - pivot).
FAULTLINE_HD_INLINE double centred_exponent(double high, double error, double exponent, double column, double pivot) {
    const double size = (std::fabs(high) + error) * std::fabs(column - pivot);
    const double e = exponent + exponent_of(size);
    return size == 0 ? no_exponent : e;
}
/// a_j (column_j - pivot), whose exponent is `term`, on the scale of 2^reference.
FAULTLINE_HD_INLINE ScaledTerm centred_term(WideValue a, double error, double column, double pivot, double term,
                                            double reference, double own_error) {
    const bool flush = term - reference < flush_exponent;
    const double factor = power_of_two(flush ? 0 : a.exponent - reference);
    const double f = flush ? 0 : factor;
    const DoubleDouble difference = two_sum(column, -pivot);
    const DoubleDouble u = DoubleDouble{a.high * f, a.low * f} * difference;
    const double flushed = (flush & (term > none_exponent)) ? flushed_term : 0;
    return {u, 0, error * f * std::fabs(difference.high) + own_error * std::fabs(u.high) + flushed};
}

/// a + b, where |a.exponent| and |b.exponent| may lie far apart; a.exponent = 0.
FAULTLINE_HD_INLINE WideSum add(const WideSum& a, const WideSum& b) {
    constexpr double lost = -900;
    if (b.exponent == none_exponent) return a;
    if (a.value.high == 0 && a.error == 0) return b;
    if (b.exponent < lost) return {a.value, 0, a.error + (std::fabs(b.value.high) + b.error) * 0x1p-890 + 0x1p-1000};
    const double factor = power_of_two(b.exponent);
    const DoubleDouble sum = a.value + DoubleDouble{b.value.high * factor, b.value.low * factor};
    return {sum, 0, (a.error + b.error * factor + add_error * std::fabs(sum.high)) * (1 + 0x1p-40)};
}

}  // namespace faultline::detail
