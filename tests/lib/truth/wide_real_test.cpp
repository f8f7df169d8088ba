// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/wide_real.hpp>

#include <cmath>
#include <random>

#include <gtest/gtest.h>

namespace faultline {
namespace {

TEST(WideReal, AgreesWithDoubleInItsRange) {
    std::mt19937_64 random(1);
    for (int n = 0; n < 100000; ++n) {
        const double a = std::ldexp(static_cast<double>(random()) - 0x1p63, static_cast<int>(random() % 200) - 160);
        const double b = std::ldexp(static_cast<double>(random()) - 0x1p63, static_cast<int>(random() % 200) - 160);
        const WideReal x(a);
        const WideReal y(b);
        ASSERT_EQ((x + y).to_double(), a + b);
        ASSERT_EQ((x - y).to_double(), a - b);
        ASSERT_EQ((x * y).to_double(), a * b);
        ASSERT_EQ((x / y).to_double(), a / b);
        ASSERT_EQ(x < y, a < b);
        ASSERT_EQ(sqrt(abs(x)).to_double(), std::sqrt(std::fabs(a)));
    }
}

TEST(WideReal, FarBeyondDouble) {
    const WideReal tiny(1.5, -1000000000000);
    EXPECT_EQ((tiny * tiny).exponent, -2000000000000 + 1);
    EXPECT_EQ(sqrt(tiny * tiny), tiny);
    EXPECT_EQ(sqrt(WideReal(1.0, -10001)), WideReal(std::sqrt(2.0), -5001));
    EXPECT_EQ(tiny + WideReal(1.0), WideReal(1.0));
    EXPECT_EQ(tiny / tiny, WideReal(1.0));
    EXPECT_TRUE(tiny < WideReal(1.0));
    EXPECT_TRUE(-tiny > WideReal(-1.0));
    EXPECT_TRUE(WideReal(0.0) < tiny);
    EXPECT_EQ(tiny.to_double(), 0.0);
    // halfway between 1 and its successor, and the smaller summand breaks the tie
    EXPECT_EQ(WideReal(1 + 0x1p-52) + WideReal(0x1p-53), WideReal(1 + 0x1p-51));
    EXPECT_EQ(WideReal(1.0) + WideReal(1.0, -53), WideReal(1.0));
}

TEST(WideReal, Text) {
    EXPECT_EQ(WideReal(0.0).to_string(), "0");
    EXPECT_EQ(WideReal(-1.25e-7).to_string(3), "-1.25e-07");
    EXPECT_EQ(WideReal(1.0, -10000).to_string(4), "5.012e-3011");  // 10^(-10000 log10 2) = 10^-3010.29995663981
    EXPECT_EQ(WideReal(INFINITY).to_string(), "inf");
    EXPECT_EQ(WideReal(-INFINITY).to_string(), "-inf");
    EXPECT_EQ(WideReal(NAN).to_string(), "nan");
}

}  // namespace
}  // namespace faultline
