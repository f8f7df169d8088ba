// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/elementary.hpp>

#include <cmath>
#include <cstdint>

#include <faultline/base/clones.hpp>
#include <faultline/truth/mpfr_real.hpp>

namespace faultline::detail {
namespace {

/// x as a double-double; x is left with what they do not hold.
DoubleDouble take(Real& x) {
    DoubleDouble r;
    r.high = mpfr_get_d(x, MPFR_RNDN);
    mpfr_sub_d(x, x, r.high, MPFR_RNDN);
    r.low = mpfr_get_d(x, MPFR_RNDN);
    mpfr_sub_d(x, x, r.low, MPFR_RNDN);
    return r;
}

ExpConstants constants_from_mpfr() {
    ExpConstants k;
    constexpr int bits = 256;
    Real x(bits);
    for (int i = 0; i < exp_table_size; ++i) {
        mpfr_set_si(x, i, MPFR_RNDN);
        mpfr_div_2ui(x, x, 6, MPFR_RNDN);
        mpfr_exp2(x, x, MPFR_RNDN);
        const DoubleDouble power = take(x);
        k.power_high[i] = power.high;
        k.power_low[i] = power.low;
    }
    for (int n = 0; n <= exp_last_power; ++n) {
        mpfr_fac_ui(x, static_cast<unsigned long>(n), MPFR_RNDN);
        mpfr_ui_div(x, 1, x, MPFR_RNDN);
        k.inverse_factorial[n] = take(x);
    }
    mpfr_const_log2(x, MPFR_RNDN);
    mpfr_div_2ui(x, x, 6, MPFR_RNDN);
    Real inverse(bits);
    mpfr_ui_div(inverse, 1, x, MPFR_RNDN);
    k.per_step = mpfr_get_d(inverse, MPFR_RNDN);
    const DoubleDouble first = take(x);
    k.step1 = first.high;
    k.step2 = first.low;
    k.step3 = mpfr_get_d(x, MPFR_RNDN);
    return k;
}

}  // namespace

const ExpConstants& exp_constants() {
    static const ExpConstants constants = constants_from_mpfr();
    return constants;
}

FAULTLINE_CLONES
static void exp_loop(const ExpConstants& k, const double* __restrict x_high, const double* __restrict x_low,
                     std::ptrdiff_t count, double* __restrict high, double* __restrict low,
                     double* __restrict exponent) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const WideValue e = exp_above_lowest(k, x_high[j], x_low[j]);
        high[j] = e.high;
        low[j] = e.low;
        exponent[j] = e.exponent;
    }
    // A loop of its own: in the first, these choices would become a branch around it all, which does not vectorise.
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const WideValue e = exp_or_masked(x_high[j], {high[j], low[j], exponent[j]});
        high[j] = e.high;
        low[j] = e.low;
        exponent[j] = e.exponent;
    }
}

void exp(const double* x_high, const double* x_low, std::ptrdiff_t count, double* high, double* low, double* exponent) {
    exp_loop(exp_constants(), x_high, x_low, count, high, low, exponent);
}

DoubleDouble log1p(DoubleDouble t) {
    if (t.high <= log1p_small) {  // t - t^2/2 + t^3/3 - t^4/4; the next term is below 2^-121 of t
        const DoubleDouble series = add_small(
            {1, 0}, t * add_small({-0.5, 0}, t * add_small(DoubleDouble{1, 0} / DoubleDouble{3, 0}, t * -0.25)));
        return t * fast_two_sum(series.high, series.low);
    }
    // Newton from the library's logarithm y, whatever its quality: ln(1+t) = y + ln(1+e), 1 + e = (1+t) exp(-y)
    const double y = std::log1p(t.high);
    constexpr std::ptrdiff_t one_register = 8;
    alignas(64) double argument[one_register] = {-y};
    alignas(64) double zero[one_register] = {};
    alignas(64) double high[one_register];
    alignas(64) double low[one_register];
    alignas(64) double exponent[one_register];
    exp(argument, zero, one_register, high, low, exponent);
    const double scale = std::ldexp(1.0, static_cast<int>(exponent[0]));
    const DoubleDouble product = (DoubleDouble{1, 0} + t) * DoubleDouble{high[0] * scale, low[0] * scale};
    const DoubleDouble e = product - DoubleDouble{1, 0};
    const DoubleDouble square = e * e;
    return (DoubleDouble{y, 0} + e) - DoubleDouble{0.5 * square.high, 0.5 * square.low};
}

DoubleDouble inverse_sqrt(unsigned long n) {
    Real x(256);
    mpfr_set_ui(x, n, MPFR_RNDN);
    mpfr_rec_sqrt(x, x, MPFR_RNDN);
    return take(x);
}

}  // namespace faultline::detail
