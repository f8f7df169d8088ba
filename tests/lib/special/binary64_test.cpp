// SPDX-License-Identifier: Apache-2.0
#include <faultline/special/binary64.hpp>

#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>
#include <mpfr.h>

namespace faultline {
namespace {

namespace own = binary64_functions;

constexpr double infinity = std::numeric_limits<double>::infinity();

using Function = double (*)(double);
using Judge = int (*)(mpfr_t, const mpfr_t, mpfr_rnd_t);

/// |f(x) - exact| in units of the last place of the exact value, which is normal.
double ulps(Function f, Judge judge, double x) {
    mpfr_t exact, got;
    mpfr_inits2(160, exact, got, nullptr);
    mpfr_set_d(exact, x, MPFR_RNDN);
    judge(exact, exact, MPFR_RNDN);
    mpfr_set_d(got, f(x), MPFR_RNDN);
    const int exponent = std::max<int>(static_cast<int>(mpfr_get_exp(exact)) - 53, -1074);
    mpfr_sub(got, got, exact, MPFR_RNDN);
    mpfr_mul_2si(got, got, -exponent, MPFR_RNDN);
    const double error = std::abs(mpfr_get_d(got, MPFR_RNDN));
    mpfr_clears(exact, got, nullptr);
    return error;
}

double worst(Function f, Judge judge, double low, double high, int count, unsigned seed) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> in(low, high);
    double most = 0;
    for (int i = 0; i < count; ++i) most = std::max(most, ulps(f, judge, in(random)));
    return most;
}

TEST(Binary64, ExponentialsWithinWhatTheirHeaderSays) {
    for (const auto& [low, high] : {std::pair{-1.0, 1.0}, {-40.0, 0.0}, {-700.0, 700.0}, {-1e-9, 1e-9}}) {
        EXPECT_LT(worst(own::exp, mpfr_exp, low, high, 20000, 1), 1.25) << low;
        EXPECT_LT(worst(own::exp2, mpfr_exp2, low, high, 20000, 2), 1.25) << low;
    }
}

// Every k/64 and its neighbours: where the reduction changes sides, and the whole numbers, which are exact.
TEST(Binary64, ExponentialsAtTheSeamsOfTheReduction) {
    for (int k = -64 * 60; k <= 64 * 60; ++k) {
        const double x = k / 64.0;
        for (const double y : {std::nextafter(x, -infinity), x, std::nextafter(x, infinity)}) {
            ASSERT_LT(ulps(own::exp2, mpfr_exp2, y), 1.25) << y;
            ASSERT_LT(ulps(own::exp, mpfr_exp, y), 1.25) << y;
        }
        if (k % 64 == 0) {
            EXPECT_EQ(own::exp2(x), std::ldexp(1.0, k / 64));
        }
    }
    EXPECT_EQ(own::exp(0.0), 1.0);
    EXPECT_EQ(own::exp(-0.0), 1.0);
}

TEST(Binary64, TanhWithinWhatItsHeaderSays) {
    for (const auto& [low, high] :
         {std::pair{-0.2, 0.2}, {0.1, 0.6}, {-2.0, 2.0}, {1.0, 25.0}, {1e-300, 1e-290}, {-1e-9, 1e-9}})
        EXPECT_LT(worst(own::tanh, mpfr_tanh, low, high, 20000, 4), 3.0) << low;
    for (int k = 1; k < 64; ++k) {  // where the reduction changes sides: 2 x = (k + 1/2) ln 2
        const double seam = (k + 0.5) * 0.34657359027997264;
        for (const double x : {std::nextafter(seam, 0.0), seam, std::nextafter(seam, 100.0)})
            ASSERT_LT(ulps(own::tanh, mpfr_tanh, x), 3.0) << x;
    }
    EXPECT_EQ(own::tanh(0.0), 0.0);
    EXPECT_TRUE(std::signbit(own::tanh(-0.0)));
    EXPECT_EQ(own::tanh(infinity), 1.0);
    EXPECT_EQ(own::tanh(-infinity), -1.0);
    EXPECT_EQ(own::tanh(-22.5), -1.0);
    EXPECT_TRUE(std::isnan(own::tanh(std::numeric_limits<double>::quiet_NaN())));
}

TEST(Binary64, LogarithmWithinWhatItsHeaderSays) {
    for (const auto& [low, high] :
         {std::pair{0.5, 2.0}, {1.0, 4096.0}, {1e-300, 1e-290}, {0.999, 1.001}, {1e250, 1e300}})
        EXPECT_LT(worst(own::log, mpfr_log, low, high, 20000, 3), 2.0) << low;
    EXPECT_EQ(own::log(1.0), 0.0);
    EXPECT_LT(ulps(own::log, mpfr_log, 5e-324), 2.0);
    EXPECT_LT(ulps(own::log, mpfr_log, 0x1p-1022), 2.0);
    EXPECT_LT(ulps(own::log, mpfr_log, std::numeric_limits<double>::max()), 2.0);
    for (const double x : {std::nextafter(1.0, 0.0), std::nextafter(1.0, 2.0), std::sqrt(2.0), std::sqrt(0.5)})
        EXPECT_LT(ulps(own::log, mpfr_log, x), 2.0) << x;
}

// Results below the normal numbers are rounded twice: half a unit of the smallest number, and once more.
TEST(Binary64, Ends) {
    EXPECT_EQ(own::exp2(-infinity), 0.0);
    EXPECT_EQ(own::exp(-infinity), 0.0);
    EXPECT_EQ(own::exp2(infinity), infinity);
    EXPECT_EQ(own::exp(infinity), infinity);
    EXPECT_EQ(own::exp2(1024.0), infinity);
    EXPECT_LT(own::exp2(std::nextafter(1024.0, 0.0)), infinity);
    EXPECT_EQ(own::exp2(-1074.0), 0x1p-1074);
    EXPECT_EQ(own::exp2(-1081.0), 0.0);
    EXPECT_LE(ulps(own::exp2, mpfr_exp2, -1060.3), 1.0);
    EXPECT_TRUE(std::isnan(own::exp(std::nan(""))));
    EXPECT_TRUE(std::isnan(own::exp2(std::nan(""))));
    EXPECT_EQ(own::log(0.0), -infinity);
    EXPECT_EQ(own::log(-0.0), -infinity);
    EXPECT_EQ(own::log(infinity), infinity);
    EXPECT_TRUE(std::isnan(own::log(-1.0)));
    EXPECT_TRUE(std::isnan(own::log(std::nan(""))));
}

}  // namespace
}  // namespace faultline
