// SPDX-License-Identifier: Apache-2.0
#include "judge.hpp"

#include <mpfr.h>
#include <algorithm>
#include <cmath>
#include <limits>

namespace faultline::testing {
namespace {

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// Enough for the sum of any two neighbours of any binary64 (2098 bits apart at most) to be exact.
constexpr mpfr_prec_t wide = 2200;

class Number {
  public:
    explicit Number(mpfr_prec_t precision) { mpfr_init2(value_, precision); }
    ~Number() { mpfr_clear(value_); }
    Number(const Number&) = delete;
    Number& operator=(const Number&) = delete;
    operator mpfr_ptr() { return value_; }

  private:
    mpfr_t value_;
};

std::vector<Case> make_cases() {
    constexpr Format e3m4{.precision = 5, .emin = -2, .emax = 3};
    constexpr Format fp16_no_subnormals{.precision = 11, .emin = -14, .emax = 15, .subnormals = false};
    constexpr Format e4m3_no_subnormals{.precision = 4,
                                        .emin = -6,
                                        .emax = 8,
                                        .subnormals = false,
                                        .infinities = false,
                                        .nans = NanKind::single_code,
                                        .saturates = true};
    return {
        {"fp32", fp32, 24, -126, 0x1.fffffep127, 0x1p-149, 32, inf, nan},
        {"tf32", tf32, 11, -126, 0x1.ffcp127, 0x1p-136, 19, inf, nan},
        {"bf16", bf16, 8, -126, 0x1.fep127, 0x1p-133, 16, inf, nan},
        {"fp16", fp16, 11, -14, 65504, 0x1p-24, 16, inf, nan},
        {"e5m2", e5m2, 3, -14, 57344, 0x1p-16, 8, 57344, nan},
        {"e4m3", e4m3, 4, -6, 448, 0x1p-9, 8, 448, nan},
        {"e3m2", e3m2, 3, -2, 28, 0.0625, 6, 28, 28},
        {"e2m3", e2m3, 4, 0, 7.5, 0.125, 6, 7.5, 7.5},
        {"e2m1", e2m1, 2, 0, 6, 0.5, 4, 6, 6},
        {"e5m2-nosat", with_saturation(e5m2, false), 3, -14, 57344, 0x1p-16, 8, inf, nan},
        {"e4m3-nosat", with_saturation(e4m3, false), 4, -6, 448, 0x1p-9, 8, nan, nan},
        {"fp16-sat", with_saturation(fp16, true), 11, -14, 65504, 0x1p-24, 16, 65504, nan},
        {"bf16-sat", with_saturation(bf16, true), 8, -126, 0x1.fep127, 0x1p-133, 16, 0x1.fep127, nan},
        {"e3m4", e3m4, 5, -2, 15.5, 0x1p-6, 8, inf, nan},
        {"fp16-nosub", fp16_no_subnormals, 11, -14, 65504, 0x1p-14, 16, inf, nan},
        {"e4m3-nosub", e4m3_no_subnormals, 4, -6, 448, 0x1p-6, 8, 448, nan},
    };
}

/// The neighbours of |x| toward and away from zero with the exponent unbounded above.
void neighbours(double magnitude, const Case& c, mpfr_ptr below, mpfr_ptr above) {
    if (!c.format.subnormals && magnitude < c.min) {
        mpfr_set_zero(below, 1);
        mpfr_set_d(above, c.min, MPFR_RNDN);
        return;
    }
    // MPFR writes a number as 0.1... 2^e, so its smallest exponent is that of 2^(emin-p+1) plus one.
    const mpfr_exp_t saved = mpfr_get_emin();
    Number low(c.precision), high(c.precision);
    mpfr_set_emin(c.emin - (c.precision - 1) + 1);
    mpfr_subnormalize(low, mpfr_set_d(low, magnitude, MPFR_RNDZ), MPFR_RNDZ);
    mpfr_subnormalize(high, mpfr_set_d(high, magnitude, MPFR_RNDA), MPFR_RNDA);
    mpfr_set_emin(saved);
    mpfr_set(below, low, MPFR_RNDN);
    mpfr_set(above, high, MPFR_RNDN);
}

/// floor(2^64 t) + random_bits >= 2^64 in wide arithmetic, t = (|x| - below) / (above - below).
bool carries(double magnitude, mpfr_ptr below, mpfr_ptr above, std::uint64_t random_bits) {
    Number gap(wide), part(wide);
    mpfr_sub(gap, above, below, MPFR_RNDN);
    mpfr_d_sub(part, magnitude, below, MPFR_RNDN);
    mpfr_div(part, part, gap, MPFR_RNDN);  // t, exact: the gap is a power of two
    mpfr_mul_2ui(part, part, 64, MPFR_RNDN);
    mpfr_floor(part, part);
    mpfr_add_ui(part, part, random_bits, MPFR_RNDN);
    mpfr_div_2ui(part, part, 64, MPFR_RNDN);
    return mpfr_cmp_ui(part, 1) >= 0;
}

}  // namespace

const std::vector<Case>& cases() {
    static const std::vector<Case> all = make_cases();
    return all;
}

std::vector<Case> narrow_cases() {
    std::vector<Case> narrow;
    for (const Case& c : cases()) {
        if (c.bits <= 16) narrow.push_back(c);
    }
    return narrow;
}

Judgement::Judgement(double x, const Case& c) : x_(x), case_(c) {
    if (std::isnan(x) || std::isinf(x) || x == 0) return;
    static thread_local Number low(64), high(64), middle(wide), quanta(wide);
    const double magnitude = std::fabs(x);
    neighbours(magnitude, c, low, high);
    below_ = mpfr_get_d(low, MPFR_RNDN);
    above_ = mpfr_get_d(high, MPFR_RNDN);
    if (mpfr_equal_p(low, high)) return;
    mpfr_add(middle, low, high, MPFR_RNDN);
    mpfr_div_2ui(middle, middle, 1, MPFR_RNDN);
    against_middle_ = -mpfr_cmp_d(middle, magnitude);
    mpfr_sub(quanta, high, low, MPFR_RNDN);
    mpfr_div(quanta, low, quanta, MPFR_RNDN);  // the lower neighbour in units of the gap: an integer
    mpfr_div_2ui(quanta, quanta, 1, MPFR_RNDN);
    odd_ = mpfr_integer_p(quanta) == 0;
}

bool Judgement::goes_away(Rounding mode, std::uint64_t random_bits) const {
    switch (mode) {
        case Rounding::nearest_even:
            return against_middle_ > 0 || (against_middle_ == 0 && odd_);
        case Rounding::nearest_away:
            return against_middle_ >= 0;
        case Rounding::toward_zero:
            return false;
        case Rounding::upward:
            return x_ > 0;
        case Rounding::downward:
            return x_ < 0;
        case Rounding::to_odd:
            return !odd_;
        case Rounding::stochastic:
            break;
    }
    static thread_local Number low(64), high(64);
    neighbours(std::fabs(x_), case_, low, high);
    return carries(std::fabs(x_), low, high, random_bits);
}

double Judgement::rounded(Rounding mode, std::uint64_t random_bits) const {
    if (std::isnan(x_)) return case_.nan;
    if (std::isinf(x_)) return std::copysign(case_.infinite, x_);
    if (x_ == 0) return x_;
    const double result = below_ != above_ && goes_away(mode, random_bits) ? above_ : below_;
    if (result <= case_.max) return std::copysign(result, x_);
    const bool stays = mode == Rounding::toward_zero || mode == Rounding::to_odd ||
                       mode == (x_ < 0 ? Rounding::upward : Rounding::downward);
    return std::copysign(stays ? case_.max : case_.infinite, x_);
}

double judged_by_mpfr_alone(double x, const Case& c, Rounding mode) {
    const mpfr_rnd_t rounding = mode == Rounding::nearest_even  ? MPFR_RNDN
                                : mode == Rounding::toward_zero ? MPFR_RNDZ
                                : mode == Rounding::upward      ? MPFR_RNDU
                                                                : MPFR_RNDD;
    const mpfr_exp_t saved_emin = mpfr_get_emin(), saved_emax = mpfr_get_emax();
    Number value(c.precision);
    mpfr_set_emin(c.emin - (c.precision - 1) + 1);
    mpfr_set_emax(std::ilogb(c.max) + 1);
    mpfr_subnormalize(value, mpfr_set_d(value, x, rounding), rounding);
    const double result = mpfr_get_d(value, MPFR_RNDN);
    mpfr_set_emin(saved_emin);
    mpfr_set_emax(saved_emax);
    return result;
}

std::string label(const ::testing::TestParamInfo<Case>& info) {
    std::string text = info.param.name;
    std::replace(text.begin(), text.end(), '-', '_');
    return text;
}

bool same(double a, double b) {
    return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

}  // namespace faultline::testing
