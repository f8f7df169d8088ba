// SPDX-License-Identifier: Apache-2.0
// Unevaluated sums of two doubles, |low| <= ulp(high) / 2, after Joldes, Muller, Popescu, "Tight and rigorous error
// bounds for basic building blocks of double-word arithmetic", ACM TOMS 44 (2017). With u = 2^-53 their relative errors,
// which hold when nothing underflows, stand at each function. Small enough to be inlined into clones of loops; the same
// functions on a device (compiled without contraction).
#pragma once

#include <cmath>

#include <faultline/base/host_device.hpp>

namespace faultline::detail {

struct DoubleDouble {
    double high = 0;
    double low = 0;
};

inline constexpr double u2 = 0x1p-106;  // u^2

/// a + b exactly (Knuth).
FAULTLINE_HD_INLINE DoubleDouble two_sum(double a, double b) {
    const double s = a + b;
    const double t = s - a;
    return {s, (a - (s - t)) + (b - t)};
}

/// a + b exactly when |a| >= |b| or a = 0 (Dekker).
FAULTLINE_HD_INLINE DoubleDouble fast_two_sum(double a, double b) {
    const double s = a + b;
    return {s, b - (s - a)};
}

FAULTLINE_HD_INLINE DoubleDouble operator-(DoubleDouble a) { return {-a.high, -a.low}; }

/// AccurateDWPlusDW: 3u^2 + 13u^3.
FAULTLINE_HD_INLINE DoubleDouble operator+(DoubleDouble a, DoubleDouble b) {
    const DoubleDouble s = two_sum(a.high, b.high);
    const DoubleDouble t = two_sum(a.low, b.low);
    const DoubleDouble v = fast_two_sum(s.high, s.low + t.high);
    return fast_two_sum(v.high, t.low + v.low);
}
FAULTLINE_HD_INLINE DoubleDouble operator-(DoubleDouble a, DoubleDouble b) { return a + -b; }

/// SloppyDWPlusDW: 3u^2 when a and b have the same sign; useless otherwise.
FAULTLINE_HD_INLINE DoubleDouble add_same_sign(DoubleDouble a, DoubleDouble b) {
    const DoubleDouble s = two_sum(a.high, b.high);
    return fast_two_sum(s.high, s.low + (a.low + b.low));
}

/// DWTimesDW3: 4u^2.
FAULTLINE_HD_INLINE DoubleDouble operator*(DoubleDouble a, DoubleDouble b) {
    const double p = a.high * b.high;
    const double e = std::fma(a.high, b.high, -p);
    const double t = std::fma(a.high, b.low, a.low * b.low);
    return fast_two_sum(p, e + std::fma(a.low, b.high, t));
}

/// DWTimesFP3: 2u^2.
FAULTLINE_HD_INLINE DoubleDouble operator*(DoubleDouble a, double b) {
    const double p = a.high * b;
    return fast_two_sum(p, std::fma(a.low, b, std::fma(a.high, b, -p)));
}

/// DWDivDW2: 15u^2 + 56u^3.
FAULTLINE_HD_INLINE DoubleDouble operator/(DoubleDouble a, DoubleDouble b) {
    const double q = a.high / b.high;
    const DoubleDouble r = b * q;
    return fast_two_sum(q, ((a.high - r.high) + (a.low - r.low)) / b.high);
}

/// Upper bounds in the theorems' form, the u^3 terms included.
inline constexpr double add_error = 3.01 * u2;
inline constexpr double mul_error = 4.01 * u2;
inline constexpr double mul_double_error = 2.01 * u2;
inline constexpr double div_error = 15.01 * u2;

}  // namespace faultline::detail
