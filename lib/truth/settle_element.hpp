// SPDX-License-Identifier: Apache-2.0
// The last step of the fast path for one element, on host and device: high + low with an error bound becomes a 53-bit
// value with a bound and an exponent, when the bound decides which (Ziv's rounding test).
#pragma once

#include <cmath>
#include <cstdint>

#include <faultline/truth/wide_elements.hpp>

namespace faultline::detail {

/// RN(high + z) = high for all z in [low - error, low + error]: by monotony the ends suffice. `slack` covers the
/// rounding of low +- error, at most u (|low| + error). Without an error high is RN(high + low), ties to even as they
/// should be.
FAULTLINE_HD_INLINE bool decides(double high, double low, double error) {
    const double slack = error * (1 + 0x1p-40) + std::fabs(low) * 0x1p-52;
    const bool both_ends = (high + (low + slack) == high) & (high + (low - slack) == high) & (high != 0);
    return both_ends | ((error == 0) & (high + low == high));
}

/// (|low| + error) * factor, rounded up even where it underflows; 0 stays 0.
FAULTLINE_HD_INLINE double bound_of(double low, double error, double factor) {
    constexpr double smallest = 0x1p-1074;
    const double size = std::fabs(low) + error;
    return size * (1 + 0x1p-50) * factor + (size == 0 ? 0 : smallest);
}

/// An element of a CertifiedMatrix; `decided`: the bound says which 53-bit value it is.
struct Settled {
    double value, bound;
    bool decided;
    std::int64_t exponent;
};

/// Where the common scale 2^exponent lies near 1 (settle_near_scale) and the element is an ordinary number: as
/// settled(), by one multiplication with factor = 2^exponent. Else `decided` is false, which says nothing then.
FAULTLINE_HD_INLINE Settled settled_plainly(double high, double low, double error, double factor) {
    const double v = high * factor;
    const double size = std::fabs(v);
    const bool plain = ((size >= 0x1p-900) & (size <= 0x1p900)) | ((size == 0) & (high == 0));
    const bool decided = plain & decides(high, low, error);
    return {v, bound_of(low, error, factor), decided, 0};
}
inline constexpr double settle_near_scale = 400;  // |exponent|

/// x * 2^shift, rounded once; |shift| < 2044.
FAULTLINE_HD_INLINE double times_power_of_two(double x, double shift) {
    const double half = shift < 0 ? -std::floor(-shift / 2) : std::floor(shift / 2);
    return x * power_of_two(half) * power_of_two(shift - half);
}

FAULTLINE_HD_INLINE Settled settled(const WideSum& x) {
    constexpr double comfortable = 900;  // exponents of CertifiedMatrix::value
    const DoubleDouble sum = two_sum(x.value.high, x.value.low);
    const double given = std::fabs(sum.high);
    const double size = sum.high == 0 && x.error > given ? x.error : given;
    if (x.exponent == none_exponent || size == 0) return {0, 0, true, 0};
    const double own = exponent_of(size);
    const bool fits = std::fabs(own + x.exponent) <= comfortable;
    const double shift = fits ? x.exponent : -own;
    return {times_power_of_two(sum.high, shift), bound_of(sum.low, x.error, times_power_of_two(1, shift)),
            decides(sum.high, sum.low, x.error), fits ? 0 : static_cast<std::int64_t>(x.exponent + own)};
}

}  // namespace faultline::detail
