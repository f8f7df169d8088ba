// SPDX-License-Identifier: Apache-2.0
// exp2_rounded and log2_rounded against MPFR: what they call certain is right, their binary64 value within its bound, and they
// are uncertain where the exact value lies next to the midpoint of two floats.
#include <faultline/special/correct_rounding.hpp>

#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "measured.hpp"

namespace faultline {
namespace {

using special_test::from_bits;

enum class Of { exp2, log2 };

/// The float nearest to f(x), ties to even, subnormal results too: once rounded from 200 digits.
float nearest_float(Of f, float x) {
    mpfr_t y;
    mpfr_init2(y, 200);
    mpfr_set_flt(y, x, MPFR_RNDN);
    (f == Of::exp2 ? mpfr_exp2 : mpfr_log2)(y, y, MPFR_RNDN);
    const float rounded = mpfr_get_flt(y, MPFR_RNDN);
    mpfr_clear(y);
    return rounded;
}

/// |wide / f(x) - 1|.
double relative_error(Of f, float x, double wide) {
    mpfr_t y;
    mpfr_init2(y, 200);
    mpfr_set_flt(y, x, MPFR_RNDN);
    (f == Of::exp2 ? mpfr_exp2 : mpfr_log2)(y, y, MPFR_RNDN);
    mpfr_d_div(y, wide, y, MPFR_RNDN);
    mpfr_sub_ui(y, y, 1, MPFR_RNDN);
    const double error = std::abs(mpfr_get_d(y, MPFR_RNDN));
    mpfr_clear(y);
    return error;
}

void expect_right(Of f, float x) {
    const RoundedValue found = f == Of::exp2 ? exp2_rounded(x) : log2_rounded(x);
    if (found.certain) {
        ASSERT_EQ(found.nearest, nearest_float(f, x)) << x;
    }
    if (found.wide != 0 && std::isfinite(found.wide)) {
        ASSERT_LE(relative_error(f, x, found.wide), 0x1p-50) << x;
    }
}

TEST(CorrectRounding, WhatIsCertainIsMpfrs) {
    std::mt19937 random(7);
    std::uniform_real_distribution<float> exponents(-151.0f, 129.0f);
    for (int i = 0; i < 2500; ++i) {
        expect_right(Of::exp2, exponents(random));
        expect_right(Of::exp2, std::ldexp(exponents(random), -static_cast<int>(random() % 32)));
        expect_right(Of::log2, from_bits(1 + static_cast<std::uint32_t>(random()) % 0x7F7FFFFFu));
        expect_right(Of::log2, 1 + std::ldexp(exponents(random), -8 - static_cast<int>(random() % 23)));
    }
}

TEST(CorrectRounding, Ends) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (int n = -149; n < 128; ++n) {
        EXPECT_EQ(exp2_rounded(static_cast<float>(n)).nearest, std::ldexp(1.0f, n));
        EXPECT_TRUE(exp2_rounded(static_cast<float>(n)).certain) << n;
        const RoundedValue power = log2_rounded(std::ldexp(1.0f, n));
        EXPECT_EQ(power.nearest, static_cast<float>(n));
        EXPECT_TRUE(power.certain) << n;
    }
    EXPECT_EQ(exp2_rounded(infinity).nearest, infinity);
    EXPECT_EQ(exp2_rounded(128.0f).nearest, infinity);
    EXPECT_EQ(exp2_rounded(-infinity).nearest, 0.0f);
    EXPECT_EQ(log2_rounded(0.0f).nearest, -infinity);
    EXPECT_EQ(log2_rounded(infinity).nearest, infinity);
    EXPECT_TRUE(std::isnan(log2_rounded(-1.0f).nearest));
    EXPECT_TRUE(log2_rounded(-1.0f).certain);
    EXPECT_FALSE(exp2_rounded(-150.0f).certain) << "midway between 0 and 2^-149";
}

// Beside the midpoint of two floats, within the error of binary64 and outside of it.
TEST(CorrectRounding, NearAMidpointIsNotDecided) {
    for (const double unit : {1.0, 0x1p-140, 0x1p100}) {
        const double step = std::max(0x1p-23 * unit, 0x1p-149);  // of the floats there
        const double midpoint = unit + step / 2;
        for (const double apart : {0.0, 0x1p-51, -0x1p-51})
            EXPECT_FALSE(detail::rounded_value(midpoint * (1 + apart)).certain) << unit << " " << apart;
        const RoundedValue above = detail::rounded_value(midpoint * (1 + 0x1p-48));
        const RoundedValue below = detail::rounded_value(midpoint * (1 - 0x1p-48));
        EXPECT_TRUE(above.certain);
        EXPECT_TRUE(below.certain);
        EXPECT_EQ(above.nearest, static_cast<float>(unit + step));
        EXPECT_EQ(below.nearest, static_cast<float>(unit));
    }
}

}  // namespace
}  // namespace faultline
