// SPDX-License-Identifier: Apache-2.0
// FlashAttention-4's exp2 by polynomial: its error against MPFR, and the values at its ends.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <mpfr.h>

#include <faultline/special/ex2_polynomial.hpp>

namespace faultline {
namespace {

double relative_error(float x) {
    mpfr_t exact, apart;
    mpfr_inits2(120, exact, apart, nullptr);
    mpfr_set_flt(exact, x, MPFR_RNDN);
    mpfr_exp2(exact, exact, MPFR_RNDN);
    mpfr_set_flt(apart, exp2_polynomial(x), MPFR_RNDN);
    mpfr_sub(apart, apart, exact, MPFR_RNDN);
    mpfr_div(apart, apart, exact, MPFR_RNDN);
    const double error = mpfr_get_d(apart, MPFR_RNDN);
    mpfr_clears(exact, apart, nullptr);
    return error;
}

TEST(Ex2Polynomial, IsWithinItsStatedErrorAndReachesIt) {
    double largest = 0, least = 0;
    for (int n = 0; n <= 4096; ++n)
        for (const int whole : {-100, -9, -1, 0, 7}) {
            const double error = relative_error(static_cast<float>(whole + n / 4096.0));
            largest = std::max(largest, error), least = std::min(least, error);
        }
    EXPECT_LT(largest, 8.8e-5);
    EXPECT_GT(least, -8.8e-5);
    EXPECT_GT(largest, 8.6e-5) << "the bound is not tight: another polynomial";
    EXPECT_LT(least, -8.4e-5);
}

TEST(Ex2Polynomial, WholeNumbersAreExactAndTheRestEndsAtZero) {
    for (int n = -126; n <= 126; ++n) EXPECT_EQ(exp2_polynomial(static_cast<float>(n)), std::ldexp(1.0f, n)) << n;
    EXPECT_EQ(exp2_polynomial(-127), 0);
    EXPECT_EQ(exp2_polynomial(-std::numeric_limits<float>::infinity()), 0);
    EXPECT_EQ(exp2_polynomial(-1e30f), 0);
    // The fraction of -2^-30 rounds to 1, where the polynomial is 1.99983: exp2 steps down by its error there, 8.5e-5.
    EXPECT_LT(exp2_polynomial(-0x1p-30f), 1 - 8e-5f);
    EXPECT_GT(exp2_polynomial(-0x1p-30f), 1 - 9e-5f);
}

}  // namespace
}  // namespace faultline
