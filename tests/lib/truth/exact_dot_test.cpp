// SPDX-License-Identifier: Apache-2.0
// The judge's integer dot products against MPFR with more bits than any exact sum has.
#include <cmath>
#include <cstddef>

#include <gtest/gtest.h>

#include <faultline/truth/exact_dot.hpp>

#include "problems.hpp"

namespace faultline {
namespace {

using detail::exact_dot;
using detail::IntegerRows;
using detail::Real;

/// sum_c a_c b_c or sum_c |a_c b_c|, exactly: all products of doubles lie within 4300 bits.
Real plain_sum(const double* a, const double* b, std::ptrdiff_t count, bool absolute) {
    Real sum(4400), product(128);
    for (std::ptrdiff_t c = 0; c < count; ++c) {
        mpfr_set_d(product, a[c], MPFR_RNDN);
        mpfr_mul_d(product, product, b[c], MPFR_RNDN);
        if (absolute) mpfr_abs(product, product, MPFR_RNDN);
        mpfr_add(sum, sum, product, MPFR_RNDN);
    }
    return sum;
}

/// How many of the pairs of rows the integers held; those are exact.
int expect_exact(const Matrix& a, const Matrix& b) {
    const IntegerRows x(a.view()), y(b.view());
    int held = 0;
    for (std::ptrdiff_t i = 0; i < a.rows; ++i)
        for (std::ptrdiff_t j = 0; j < b.rows; ++j) {
            Real sum(320), size(53);
            if (!exact_dot(x, i, y, j, a.cols, sum, size)) continue;
            ++held;
            const Real right = plain_sum(a.view().row(i), b.view().row(j), a.cols, false);
            EXPECT_TRUE(mpfr_equal_p(static_cast<mpfr_srcptr>(sum), static_cast<mpfr_srcptr>(right)) != 0)
                << i << ", " << j;
            Real up(53);
            const Real absolute = plain_sum(a.view().row(i), b.view().row(j), a.cols, true);
            mpfr_set(up, absolute, MPFR_RNDU);
            EXPECT_TRUE(mpfr_equal_p(static_cast<mpfr_srcptr>(size), static_cast<mpfr_srcptr>(up)) != 0)
                << i << ", " << j;
        }
    return held;
}

TEST(ExactDot, LowFormatsAreHeldAndExact) {
    test::Generator g(91);
    for (const int significand : {4, test::bf16_bits, test::fp16_bits})
        EXPECT_EQ(expect_exact(g.matrix(9, 96, 3, significand), g.matrix(7, 96, 1e-3, significand)), 63);
}

TEST(ExactDot, CancellationIsExact) {
    test::Generator g(92);
    Matrix a = g.matrix(4, 64, 1, test::fp32_bits), b = g.matrix(4, 64, 1, test::fp32_bits);
    for (std::ptrdiff_t i = 0; i < 4; ++i)
        for (std::ptrdiff_t c = 0; c < 32; ++c) {  // the second half takes back the first, all but its last bit
            a(i, c + 32) = a(i, c);
            b(i, c + 32) = -b(i, c) * (c == i ? 1 + 0x1p-20 : 1);
        }
    EXPECT_GT(expect_exact(a, b), 0);
}

TEST(ExactDot, WhatIntegersDoNotHoldIsLeft) {
    test::Generator g(93);
    EXPECT_EQ(expect_exact(g.wide_matrix(5, 16, -149, 100, 24), g.wide_matrix(5, 16, -149, 100, 24)), 0);
    // around the limit: some are held and exact, some are not
    const int held = expect_exact(g.wide_matrix(20, 8, -42, 0, 24), g.wide_matrix(20, 8, -42, 0, 24));
    EXPECT_GT(held, 0);
    EXPECT_LT(held, 400);
    Matrix zeros(3, 5);
    EXPECT_EQ(expect_exact(zeros, g.matrix(2, 5, 1, 8)), 6);
    Matrix extreme(1, 2);
    extreme(0, 0) = 0x1p-1074;
    extreme(0, 1) = -0x1p-1074;
    EXPECT_EQ(expect_exact(extreme, extreme), 1);
}

}  // namespace
}  // namespace faultline
