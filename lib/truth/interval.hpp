// SPDX-License-Identifier: Apache-2.0
// Interval arithmetic on MPFR's directed rounding: every result contains the exact value, whatever the precision. The
// slow path of truth is made of it, so its bounds need no error analysis.
#pragma once

#include <faultline/truth/certified.hpp>
#include <faultline/truth/mpfr_real.hpp>

namespace faultline::detail {

/// [lo, hi]; [0, 0] at first. The arguments of an operation may be the result.
struct Interval {
    Real lo;
    Real hi;

    explicit Interval(int bits) : lo(bits), hi(bits) {}
    [[nodiscard]] mpfr_prec_t bits() const { return mpfr_get_prec(lo); }
};

void set(Interval& r, double x);
void add(Interval& r, const Interval& a, const Interval& b);
void add(Interval& r, const Interval& a, double b);
void sub(Interval& r, const Interval& a, const Interval& b);
void mul(Interval& r, const Interval& a, const Interval& b);
void mul(Interval& r, const Interval& a, double b);
/// b > 0
void div(Interval& r, const Interval& a, const Interval& b);
void exp(Interval& r, const Interval& a);
/// a > -1
void log1p(Interval& r, const Interval& a);
void tanh(Interval& r, const Interval& a);
/// r <- 1 - tanh^2(a), with all its digits where tanh is next to 1
void sech_squared(Interval& r, const Interval& a);
/// Whether both are one and the same point.
[[nodiscard]] bool same_point(const Interval& a, const Interval& b);
/// r <- 1/sqrt(n)
void inverse_sqrt(Interval& r, unsigned long n);
/// sum <- sum_c a_c b_c
void dot(Interval& sum, const double* a, const double* b, std::ptrdiff_t count);

/// Whether both ends round to the same 53-bit number (of any exponent), or all lies within 2^(-2^40) of 0.
[[nodiscard]] bool decided(const Interval& a);
/// Element <- the 53-bit number nearest to the middle of a, with a bound that covers all of a.
void store(const Interval& a, CertifiedMatrix& out, std::size_t at);

}  // namespace faultline::detail
