// SPDX-License-Identifier: Apache-2.0
// exp of one double-double to about 100 bits, its exponent apart, for host and device. Table-driven as in Tang,
// "Table-driven implementation of the exponential function in IEEE floating-point arithmetic", ACM TOMS 15 (1989), in
// double-double. Proof: docs/numerics-truth.md, lemma 3.
#pragma once

#include <cmath>
#include <cstdint>

#include <faultline/truth/wide_elements.hpp>

namespace faultline::detail {

/// Arguments of exp go down to here; below, a key counts as masked (truth.hpp).
inline constexpr double exp_lowest = -0x1p40;
/// Relative error of exp on [exp_lowest, 2^-10], the argument being exact.
inline constexpr double exp_error = 0x1p-101;

inline constexpr int exp_table_size = 64;
inline constexpr int exp_last_power = 11;  // r^12 / 12! < 2^-118 for |r| <= 0.0058

/// The constants of exp (exp_constants() in elementary.hpp makes them).
struct ExpConstants {
    alignas(64) double power_high[exp_table_size];  // 2^(i/64)
    alignas(64) double power_low[exp_table_size];
    DoubleDouble inverse_factorial[exp_last_power + 1];
    double per_step;             // 64/ln 2
    double step1, step2, step3;  // ln 2 / 64 in three doubles
};

/// c + x when |x| is well below |c|: relative error at most 5u^2.
FAULTLINE_HD_INLINE DoubleDouble add_small(DoubleDouble c, DoubleDouble x) {
    const DoubleDouble s = fast_two_sum(c.high, x.high);
    return {s.high, s.low + (c.low + x.low)};
}

/// exp(max(x, exp_lowest)): high in [0.99, 2.02], exponent an integer. From r^6/6! < 2^-54 on terms are computed in
/// double, whose relative error is then below u^2 of the sum.
FAULTLINE_HD_INLINE WideValue exp_above_lowest(const ExpConstants& k, double x_high, double x_low) {
    constexpr double shift = 0x1.8p52;  // adding it rounds to an integer and leaves that integer in the low bits
    const double xh = x_high < exp_lowest ? exp_lowest : x_high;
    const double xl = x_high < exp_lowest ? 0 : x_low;
    const double shifted = std::fma(xh, k.per_step, shift);
    const double steps = shifted - shift;
    const auto index = bits_as<std::int64_t>(shifted) & (exp_table_size - 1);
    // r = x - steps * ln 2 / 64; the first difference is exact, and so are the two sums after it
    const double r1 = std::fma(-steps, k.step1, xh);
    const double m = steps * k.step2;
    const double m_low = std::fma(steps, k.step2, -m);
    const DoubleDouble a = two_sum(r1, -m);
    const DoubleDouble b = two_sum(a.high, xl);
    const DoubleDouble r = fast_two_sum(b.high, ((a.low + b.low) - m_low) - steps * k.step3);
    const double t = r.high;
    const DoubleDouble* c = k.inverse_factorial;
    const double tail =
        c[6].high + t * (c[7].high + t * (c[8].high + t * (c[9].high + t * (c[10].high + t * c[11].high))));
    const DoubleDouble one{1, 0};
    DoubleDouble y = add_small(c[5], {t * tail, 0});
    y = add_small(c[4], r * y);
    y = add_small(c[3], r * y);
    y = add_small(c[2], r * y);
    y = add_small(one, r * y);
    y = add_small(one, r * y);
    const DoubleDouble power{k.power_high[index], k.power_low[index]};
    const DoubleDouble p = power * fast_two_sum(y.high, y.low);
    // steps - index is a multiple of 64
    return {p.high, p.low, (steps - static_cast<double>(static_cast<std::int32_t>(index))) * (1.0 / exp_table_size)};
}

/// The same; where x_high < exp_lowest: 0 and no_exponent.
FAULTLINE_HD_INLINE WideValue exp_or_masked(double x_high, WideValue above) {
    const bool masked = x_high < exp_lowest;
    return {masked ? 0 : above.high, masked ? 0 : above.low, masked ? no_exponent : above.exponent};
}

}  // namespace faultline::detail
