// SPDX-License-Identifier: Apache-2.0
// One score under a softcap: c tanh(u) with u = scale q k^T / c, and the slope 1 - tanh^2(u), which has an exponent of
// its own. With E = e^(-2|u|): tanh|u| = (1 - E)/(1 + E) and the slope is 4E/(1 + E)^2. Bounds: docs/numerics-truth.md,
// lemma 5.
#pragma once

#include <faultline/truth/exp_element.hpp>

namespace faultline::detail {

/// What is one for all scores of a row.
struct Softcap {
    double cap = 0;          // 0: none
    double positive = 1;     // sign of the scale
    DoubleDouble factor;     // scale / cap
    double scale_error = 0;  // relative
};

/// What the dot products' error makes of a row.
struct SoftcapErrors {
    double x_relative, x_absolute;  // of -2|u|
    double score;                   // absolute, of the capped scores; infinite where it is not known well enough
};

inline constexpr double softcap_more = 1.01;  // covers products of errors and the bound's own arithmetic
/// E below 2^-300 (mantissa below 2.1) is lost on the 1 that it is added to.
inline constexpr double softcap_lost_on_one = 0x1p-296;

FAULTLINE_HD_INLINE SoftcapErrors softcap_errors(const Softcap& c, double dot_error) {
    constexpr double largest_product = 0.3679;  // of t e^-t, rounded up: |x| E
    constexpr double first_order = 0x1p-40;     // above it the errors of E are not small: the row goes the slow way
    const double x_relative = softcap_more * (c.scale_error + div_error + mul_error);
    const double x_absolute = softcap_more * 2 * std::fabs(c.factor.high) * dot_error;
    // E is off by E exp_error + E |x| x_relative + E x_absolute, and dtanh/dE = -2/(1 + E)^2 is at most 2
    const double of_e = exp_error + softcap_more * (largest_product * x_relative + x_absolute);
    const double of_tanh = softcap_more * (2 * of_e + 2 * add_error + div_error + softcap_lost_on_one);
    const bool known = of_e <= first_order;
    return {x_relative, x_absolute, known ? softcap_more * c.cap * (of_tanh + mul_double_error) : HUGE_VAL};
}

/// -2|u|
FAULTLINE_HD_INLINE DoubleDouble softcap_argument(DoubleDouble s, DoubleDouble factor) {
    const DoubleDouble u = s * factor;
    const double sign = u.high > 0 ? -2.0 : 2.0;
    return {sign * u.high, sign * u.low};
}

struct CappedScore {
    DoubleDouble score;
    WideValue slope;
    double slope_error;  // relative
};
/// From E = e^x with x = softcap_argument.
FAULTLINE_HD_INLINE CappedScore capped(double cap, double positive, double x_relative, double x_absolute, double s_high,
                                       double x, WideValue e) {
    const bool lost = e.exponent < flush_exponent;
    const double f = power_of_two(lost ? 0 : e.exponent);
    const DoubleDouble small{lost ? 0 : e.high * f, lost ? 0 : e.low * f};
    const DoubleDouble one{1, 0};
    const DoubleDouble sum = one + small;
    const DoubleDouble t = (one - small) / sum;
    const double sign = s_high * positive < 0 ? -cap : cap;
    const DoubleDouble slope = DoubleDouble{4 * e.high, 4 * e.low} / (sum * sum);
    const bool none = e.high == 0;
    const double of_e = exp_error + softcap_more * (std::fabs(x) * x_relative + x_absolute);
    const double relative = softcap_more * (3 * of_e + 2 * add_error + mul_error + div_error + 2 * softcap_lost_on_one);
    return {t * sign, {none ? 0 : slope.high, none ? 0 : slope.low, e.exponent}, none ? 0 : relative};
}

/// ds times the slope.
FAULTLINE_HD_INLINE WideBounded chained(WideValue ds, double error, WideValue slope, double slope_error) {
    const bool none = slope.high == 0;
    const DoubleDouble r = DoubleDouble{ds.high, ds.low} * DoubleDouble{slope.high, slope.low};
    return {{r.high, r.low, none ? no_exponent : ds.exponent + slope.exponent},
            softcap_more * (slope.high * error + std::fabs(r.high) * (slope_error + mul_error))};
}

}  // namespace faultline::detail
