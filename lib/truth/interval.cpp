// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/interval.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <faultline/truth/double_double.hpp>
#include <faultline/truth/wide_real.hpp>

namespace faultline::detail {
namespace {

// Smaller than 2^(-2^40) counts as zero; see truth.hpp.
constexpr mpfr_exp_t negligible_exponent = -(mpfr_exp_t{1} << 40);

bool negligible(const Real& x) { return mpfr_zero_p(x) != 0 || mpfr_get_exp(x) <= negligible_exponent; }

/// 53-bit rounding of x to nearest as a wide number.
WideReal rounded(const Real& x) {
    if (mpfr_zero_p(x)) return {};
    long exponent = 0;
    const double mantissa = mpfr_get_d_2exp(&exponent, x, MPFR_RNDN);
    return {mantissa, exponent};
}

}  // namespace

void set(Interval& r, double x) {
    mpfr_set_d(r.lo, x, MPFR_RNDD);
    mpfr_set_d(r.hi, x, MPFR_RNDU);
}

void add(Interval& r, const Interval& a, const Interval& b) {
    mpfr_add(r.lo, a.lo, b.lo, MPFR_RNDD);
    mpfr_add(r.hi, a.hi, b.hi, MPFR_RNDU);
}

void add(Interval& r, const Interval& a, double b) {
    mpfr_add_d(r.lo, a.lo, b, MPFR_RNDD);
    mpfr_add_d(r.hi, a.hi, b, MPFR_RNDU);
}

void sub(Interval& r, const Interval& a, const Interval& b) {
    if (&r == &b) {
        const Interval copy = b;
        sub(r, a, copy);
        return;
    }
    mpfr_sub(r.lo, a.lo, b.hi, MPFR_RNDD);
    mpfr_sub(r.hi, a.hi, b.lo, MPFR_RNDU);
}

namespace {

bool not_negative(const Real& x) { return mpfr_sgn(static_cast<mpfr_srcptr>(x)) >= 0; }

/// b >= 0 and r is not b: each end of a meets the end of b that takes it farthest.
void mul_by_positive(Interval& r, const Interval& a, const Interval& b) {
    mpfr_mul(r.lo, a.lo, not_negative(a.lo) ? b.lo : b.hi, MPFR_RNDD);
    mpfr_mul(r.hi, a.hi, not_negative(a.hi) ? b.hi : b.lo, MPFR_RNDU);
}

}  // namespace

void mul(Interval& r, const Interval& a, const Interval& b) {
    if (not_negative(b.lo) && &r != &b) return mul_by_positive(r, a, b);
    if (not_negative(a.lo) && &r != &a) return mul_by_positive(r, b, a);
    // the extremes are among the four products of ends
    Real lo(r.bits());
    Real hi(r.bits());
    Real t(r.bits());
    mpfr_mul(lo, a.lo, b.lo, MPFR_RNDD);
    mpfr_mul(hi, a.lo, b.lo, MPFR_RNDU);
    const auto widen = [&](const Real& x, const Real& y) {
        mpfr_mul(t, x, y, MPFR_RNDD);
        mpfr_min(lo, lo, t, MPFR_RNDD);
        mpfr_mul(t, x, y, MPFR_RNDU);
        mpfr_max(hi, hi, t, MPFR_RNDU);
    };
    widen(a.lo, b.hi);
    widen(a.hi, b.lo);
    widen(a.hi, b.hi);
    mpfr_swap(r.lo, lo);
    mpfr_swap(r.hi, hi);
}

void mul(Interval& r, const Interval& a, double b) {
    Real lo(r.bits());
    mpfr_mul_d(lo, b >= 0 ? a.lo : a.hi, b, MPFR_RNDD);
    mpfr_mul_d(r.hi, b >= 0 ? a.hi : a.lo, b, MPFR_RNDU);
    mpfr_swap(r.lo, lo);
}

void div(Interval& r, const Interval& a, const Interval& b) {
    // b > 0: the lower end over what makes it smallest
    Real lo(r.bits());
    mpfr_div(lo, a.lo, mpfr_sgn(static_cast<mpfr_srcptr>(a.lo)) >= 0 ? b.hi : b.lo, MPFR_RNDD);
    mpfr_div(r.hi, a.hi, mpfr_sgn(static_cast<mpfr_srcptr>(a.hi)) >= 0 ? b.lo : b.hi, MPFR_RNDU);
    mpfr_swap(r.lo, lo);
}

void exp(Interval& r, const Interval& a) {
    mpfr_exp(r.lo, a.lo, MPFR_RNDD);
    mpfr_exp(r.hi, a.hi, MPFR_RNDU);
}

void log1p(Interval& r, const Interval& a) {
    mpfr_log1p(r.lo, a.lo, MPFR_RNDD);
    mpfr_log1p(r.hi, a.hi, MPFR_RNDU);
}

void tanh(Interval& r, const Interval& a) {
    mpfr_tanh(r.lo, a.lo, MPFR_RNDD);
    mpfr_tanh(r.hi, a.hi, MPFR_RNDU);
}

void sech_squared(Interval& r, const Interval& a) {
    // even, and falls with |a|
    const bool around_zero =
        mpfr_sgn(static_cast<mpfr_srcptr>(a.lo)) <= 0 && mpfr_sgn(static_cast<mpfr_srcptr>(a.hi)) >= 0;
    const bool upper_is_farther = mpfr_cmpabs(a.hi, a.lo) >= 0;
    Real lo(r.bits());
    mpfr_sech(lo, upper_is_farther ? a.hi : a.lo, MPFR_RNDD);
    if (around_zero)
        mpfr_set_ui(r.hi, 1, MPFR_RNDU);
    else
        mpfr_sech(r.hi, upper_is_farther ? a.lo : a.hi, MPFR_RNDU);
    mpfr_sqr(r.hi, r.hi, MPFR_RNDU);
    mpfr_sqr(lo, lo, MPFR_RNDD);
    mpfr_swap(r.lo, lo);
}

bool same_point(const Interval& a, const Interval& b) {
    return mpfr_equal_p(a.lo, a.hi) != 0 && mpfr_equal_p(b.lo, b.hi) != 0 && mpfr_equal_p(a.lo, b.lo) != 0;
}

void inverse_sqrt(Interval& r, unsigned long n) {
    Real exact(64);
    mpfr_set_ui(exact, n, MPFR_RNDN);
    mpfr_rec_sqrt(r.lo, exact, MPFR_RNDD);
    mpfr_rec_sqrt(r.hi, exact, MPFR_RNDU);
}

namespace {

/// sum_c a_c b_c as high + low, if that is exact; most scores are, their inputs having few bits.
bool exact_dot(const double* a, const double* b, std::ptrdiff_t count, DoubleDouble& sum) {
    constexpr double least_product = 0x1p-900;  // its low part is a normal number
    sum = {};
    bool exact = true;
    for (std::ptrdiff_t c = 0; c < count && exact; ++c) {
        const double product = a[c] * b[c];
        const DoubleDouble high = two_sum(sum.high, product);
        const DoubleDouble low = two_sum(sum.low, high.low);
        const bool safe = std::fabs(product) > least_product || a[c] == 0 || b[c] == 0;
        exact = safe && std::isfinite(high.high) && std::fma(a[c], b[c], -product) == 0 && low.low == 0;
        sum = {high.high, low.high};
    }
    return exact;
}

}  // namespace

void dot(Interval& sum, const double* a, const double* b, std::ptrdiff_t count) {
    DoubleDouble exact;
    if (exact_dot(a, b, count, exact)) {
        set(sum, exact.high);
        add(sum, sum, exact.low);
        return;
    }
    Real product(106);  // two doubles' product is exact
    set(sum, 0);
    for (std::ptrdiff_t c = 0; c < count; ++c) {
        mpfr_set_d(product, a[c], MPFR_RNDN);
        mpfr_mul_d(product, product, b[c], MPFR_RNDN);
        mpfr_add(sum.lo, sum.lo, product, MPFR_RNDD);
        mpfr_add(sum.hi, sum.hi, product, MPFR_RNDU);
    }
}

bool decided(const Interval& a) {
    if (negligible(a.lo) && negligible(a.hi)) return true;
    return rounded(a.lo) == rounded(a.hi);
}

void store(const Interval& a, CertifiedMatrix& out, std::size_t at) {
    if (negligible(a.lo) && negligible(a.hi)) {
        out.value[at] = 0;
        out.exponent[at] = 0;
        out.bound[at] = mpfr_zero_p(a.lo) && mpfr_zero_p(a.hi) ? 0 : std::numeric_limits<double>::denorm_min();
        return;
    }
    // An interval around 0 says nothing but its width: value 0.
    const bool around_zero =
        mpfr_sgn(static_cast<mpfr_srcptr>(a.lo)) < 0 && mpfr_sgn(static_cast<mpfr_srcptr>(a.hi)) > 0;
    Real middle(a.bits() + 1);
    if (!around_zero) {
        mpfr_add(middle, a.lo, a.hi, MPFR_RNDN);
        mpfr_div_2ui(middle, middle, 1, MPFR_RNDN);
    }
    const WideReal value = rounded(middle);
    Real nearest(53);
    mpfr_set_d(nearest, value.mantissa, MPFR_RNDN);
    mpfr_mul_2si(nearest, nearest, static_cast<long>(value.exponent), MPFR_RNDN);
    Real below(64);
    Real radius(64);
    mpfr_sub(below, nearest, a.lo, MPFR_RNDU);
    mpfr_sub(radius, a.hi, nearest, MPFR_RNDU);
    mpfr_max(radius, radius, below, MPFR_RNDU);
    const std::int64_t size = around_zero ? mpfr_get_exp(static_cast<mpfr_srcptr>(radius)) : value.exponent;
    const long scale = std::abs(size) <= 900 ? 0 : static_cast<long>(size);
    out.value[at] = scale == 0 ? value.to_double() : value.mantissa;
    out.exponent[at] = scale;
    mpfr_mul_2si(radius, radius, -scale, MPFR_RNDU);
    out.bound[at] = mpfr_get_d(radius, MPFR_RNDU);
}

}  // namespace faultline::detail
