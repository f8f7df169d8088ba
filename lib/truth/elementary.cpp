// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/elementary.hpp>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include <faultline/base/clones.hpp>
#include <faultline/truth/mpfr_real.hpp>

namespace faultline::detail {
namespace {

constexpr int table_bits = 6;
constexpr int table_size = 1 << table_bits;
constexpr int last_power = 11;      // r^12 / 12! < 2^-118 for |r| <= 0.0058
constexpr int first_in_double = 6;  // r^6 / 6! < 2^-54: from here on double's relative error is below u^2 of the sum

/// x as a double-double; x is left with what they do not hold.
DoubleDouble take(Real& x) {
    DoubleDouble r;
    r.high = mpfr_get_d(x, MPFR_RNDN);
    mpfr_sub_d(x, x, r.high, MPFR_RNDN);
    r.low = mpfr_get_d(x, MPFR_RNDN);
    mpfr_sub_d(x, x, r.low, MPFR_RNDN);
    return r;
}

/// The constants of exp, from MPFR once, so that no digit of them is typed in.
struct ExpConstants {
    alignas(64) std::array<double, table_size> power_high, power_low;  // 2^(i/64)
    std::array<DoubleDouble, last_power + 1> inverse_factorial;
    double per_step;             // 64/ln 2
    double step1, step2, step3;  // ln 2 / 64 in three doubles

    ExpConstants() {
        constexpr int bits = 256;
        Real x(bits);
        for (int i = 0; i < table_size; ++i) {
            mpfr_set_si(x, i, MPFR_RNDN);
            mpfr_div_2ui(x, x, table_bits, MPFR_RNDN);
            mpfr_exp2(x, x, MPFR_RNDN);
            const DoubleDouble power = take(x);
            power_high[static_cast<std::size_t>(i)] = power.high;
            power_low[static_cast<std::size_t>(i)] = power.low;
        }
        for (int n = 0; n <= last_power; ++n) {
            mpfr_fac_ui(x, static_cast<unsigned long>(n), MPFR_RNDN);
            mpfr_ui_div(x, 1, x, MPFR_RNDN);
            inverse_factorial[static_cast<std::size_t>(n)] = take(x);
        }
        mpfr_const_log2(x, MPFR_RNDN);
        mpfr_div_2ui(x, x, table_bits, MPFR_RNDN);
        Real inverse(bits);
        mpfr_ui_div(inverse, 1, x, MPFR_RNDN);
        per_step = mpfr_get_d(inverse, MPFR_RNDN);
        const DoubleDouble first = take(x);
        step1 = first.high;
        step2 = first.low;
        step3 = mpfr_get_d(x, MPFR_RNDN);
    }
};

const ExpConstants& exp_constants() {
    static const ExpConstants constants;
    return constants;
}

/// c + x when |x| is well below |c|: relative error at most 5u^2.
[[gnu::always_inline]] inline DoubleDouble add_small(DoubleDouble c, DoubleDouble x) {
    const DoubleDouble s = fast_two_sum(c.high, x.high);
    return {s.high, s.low + (c.low + x.low)};
}

}  // namespace

FAULTLINE_CLONES
static void exp_loop(const ExpConstants& k, const double* __restrict x_high, const double* __restrict x_low,
                     std::ptrdiff_t count, double* __restrict high, double* __restrict low,
                     double* __restrict exponent) {
    constexpr double shift = 0x1.8p52;  // adding it rounds to an integer and leaves that integer in the low bits
    const double* power_high = k.power_high.data();
    const double* power_low = k.power_low.data();
    const DoubleDouble c1{1, 0};
    const DoubleDouble c2 = k.inverse_factorial[2], c3 = k.inverse_factorial[3], c4 = k.inverse_factorial[4],
                       c5 = k.inverse_factorial[5];
    const double c6 = k.inverse_factorial[6].high, c7 = k.inverse_factorial[7].high, c8 = k.inverse_factorial[8].high,
                 c9 = k.inverse_factorial[9].high, c10 = k.inverse_factorial[10].high,
                 c11 = k.inverse_factorial[11].high;
    const double per_step = k.per_step, step1 = k.step1, step2 = k.step2, step3 = k.step3;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const double given = x_high[j];
        const double given_low = x_low[j];
        const double xh = given < exp_lowest ? exp_lowest : given;
        const double xl = given < exp_lowest ? 0 : given_low;
        const double shifted = std::fma(xh, per_step, shift);
        const double steps = shifted - shift;
        const auto index = std::bit_cast<std::int64_t>(shifted) & (table_size - 1);
        // r = x - steps * ln 2 / 64; the first difference is exact, and so are the two sums after it
        const double r1 = std::fma(-steps, step1, xh);
        const double m = steps * step2;
        const double m_low = std::fma(steps, step2, -m);
        const DoubleDouble a = two_sum(r1, -m);
        const DoubleDouble b = two_sum(a.high, xl);
        const DoubleDouble r = fast_two_sum(b.high, ((a.low + b.low) - m_low) - steps * step3);
        const double t = r.high;
        const double tail = c6 + t * (c7 + t * (c8 + t * (c9 + t * (c10 + t * c11))));
        DoubleDouble y = add_small(c5, {t * tail, 0});
        y = add_small(c4, r * y);
        y = add_small(c3, r * y);
        y = add_small(c2, r * y);
        y = add_small(c1, r * y);
        y = add_small(c1, r * y);
        const DoubleDouble power{power_high[index], power_low[index]};
        const DoubleDouble p = power * fast_two_sum(y.high, y.low);
        high[j] = p.high;
        low[j] = p.low;
        // steps - index is a multiple of 64
        exponent[j] = (steps - static_cast<double>(static_cast<std::int32_t>(index))) * (1.0 / table_size);
    }
    // A loop of its own: in the first, these choices would become a branch around it all, which does not vectorise.
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const bool masked = x_high[j] < exp_lowest;
        high[j] = masked ? 0 : high[j];
        low[j] = masked ? 0 : low[j];
        exponent[j] = masked ? no_exponent : exponent[j];
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
