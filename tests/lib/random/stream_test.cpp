// SPDX-License-Identifier: Apache-2.0
#include <faultline/random/random_stream.hpp>

#include <gtest/gtest.h>
#include <mpfr.h>
#include <cmath>
#include <set>
#include <vector>

namespace faultline {
namespace {

constexpr int draws = 1 << 20;

// All statistical limits below are this many standard deviations of the statistic under the hypothesis. The streams are
// deterministic, so a test passes always or never; 5 leaves one chance in 3.5 million that a sound generator was unlucky.
constexpr double sigmas = 5;

TEST(RandomStream, NamesThatDifferInAnythingGiveOtherKeys) {
    std::set<std::uint64_t> keys;
    std::size_t names = 0;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        keys.insert(RandomStream(seed).key);
        ++names;
        for (int step = -8; step < 64; ++step) {
            keys.insert(RandomStream(seed, step).key);
            ++names;
            for (int head = 0; head < 32; ++head) {
                keys.insert(RandomStream(seed, step, head).key);
                keys.insert(RandomStream(seed, step, head, 0).key);
                keys.insert(RandomStream(seed, step).child(static_cast<std::uint64_t>(head)).key);
                names += 3;
            }
        }
    }
    EXPECT_EQ(keys.size(), names);
}

TEST(RandomStream, ANameMayBeAbsorbedInParts) {
    static_assert(RandomStream(7, 1).with(2, 2, 3) == RandomStream(7, 1, 2, 3));
    for (int step = -2; step < 2; ++step) {
        EXPECT_EQ(RandomStream(9).with(1, step, 4), RandomStream(9, step, 4));
        EXPECT_EQ(RandomStream(9, step, 4).with(3), RandomStream(9, step, 4));
    }
}

// A change of one bit in an id flips every bit of the key with probability 1/2.
TEST(RandomStream, EveryIdBitReachesEveryKeyBit) {
    constexpr int trials = 4096;
    for (int changed = 0; changed < 64; changed += 7) {
        std::vector<int> flips(64, 0);
        for (int t = 0; t < trials; ++t) {
            const auto id = static_cast<std::uint64_t>(t);
            const std::uint64_t difference =
                RandomStream(1, id, 5).key ^ RandomStream(1, id ^ (std::uint64_t{1} << changed), 5).key;
            for (int bit = 0; bit < 64; ++bit) flips[static_cast<std::size_t>(bit)] += (difference >> bit) & 1;
        }
        for (const int count : flips) EXPECT_NEAR(count, trials / 2, sigmas * std::sqrt(trials / 4.0));
    }
}

TEST(RandomStream, NumbersDependOnKeyAndCounterAlone) {
    constexpr RandomStream stream(7, 1, 2);
    static_assert(stream.bits(5) == RandomStream(7, 1, 2).bits(5));
    EXPECT_NE(stream.bits(0), stream.bits(1));
    EXPECT_NE(stream.bits(1), stream.bits(std::uint64_t{1} << 40 | 1));
}

TEST(RandomStream, UniformHasTheMomentsAndNoSerialCorrelation) {
    const RandomStream stream(3, 14);
    double sum = 0, squares = 0, products = 0, previous = stream.uniform(0) - 0.5;
    std::vector<int> bit_counts(53, 0);
    for (int i = 1; i <= draws; ++i) {
        const double u = stream.uniform(static_cast<std::uint64_t>(i));
        ASSERT_GE(u, 0);
        ASSERT_LT(u, 1);
        const auto integer = static_cast<std::uint64_t>(u * 0x1p53);
        for (int bit = 0; bit < 53; ++bit) bit_counts[static_cast<std::size_t>(bit)] += (integer >> bit) & 1;
        const double centred = u - 0.5;
        sum += centred;
        squares += centred * centred;
        products += centred * previous;
        previous = centred;
    }
    constexpr double n = draws;
    EXPECT_NEAR(sum / n, 0, sigmas * std::sqrt(1 / 12.0 / n));
    EXPECT_NEAR(squares / n, 1 / 12.0, sigmas * std::sqrt(1 / 180.0 / n));  // var((u-1/2)^2) = 1/80 - 1/144
    EXPECT_NEAR(products / n, 0, sigmas / 12.0 / std::sqrt(n));
    for (const int count : bit_counts) EXPECT_NEAR(count, n / 2, sigmas * std::sqrt(n / 4));
}

TEST(RandomStream, NormalHasTheMomentsOfTheNormalDistribution) {
    const RandomStream stream(2, 71);
    double sum = 0, squares = 0, cubes = 0, fourths = 0;
    for (int i = 0; i < draws; ++i) {
        const double z = stream.normal(static_cast<std::uint64_t>(i));
        sum += z;
        squares += z * z;
        cubes += z * z * z;
        fourths += z * z * z * z;
    }
    constexpr double n = draws;  // variances of z, z^2, z^3, z^4: 1, 2, 15, 96
    EXPECT_NEAR(sum / n, 0, sigmas / std::sqrt(n));
    EXPECT_NEAR(squares / n, 1, sigmas * std::sqrt(2 / n));
    EXPECT_NEAR(cubes / n, 0, sigmas * std::sqrt(15 / n));
    EXPECT_NEAR(fourths / n, 3, sigmas * std::sqrt(96 / n));
}

// Relative error of the quantile: the approximation's own 1e-16 (AS 241), and some 20 rounded operations of a ratio of
// polynomials with terms of one sign, 2^-53 each, in the numerator and in the denominator.
constexpr double quantile_tolerance = 1e-16 + 2 * 20 * 0x1p-53;

// z is right when P(Z <= z) = erfc(-z/sqrt 2)/2 is p to within density(z) |z| tolerance.
void expect_quantile(double p) {
    const double z = normal_quantile(p);
    mpfr_t value;
    mpfr_init2(value, 200);
    mpfr_sqrt_ui(value, 2, MPFR_RNDN);
    mpfr_d_div(value, -z, value, MPFR_RNDN);
    mpfr_erfc(value, value, MPFR_RNDN);
    mpfr_div_ui(value, value, 2, MPFR_RNDN);
    mpfr_sub_d(value, value, p, MPFR_RNDN);
    const double density = std::exp(-z * z / 2) / std::sqrt(2 * std::acos(-1.0));
    EXPECT_LE(std::fabs(mpfr_get_d(value, MPFR_RNDN)), density * std::fabs(z) * quantile_tolerance) << "p = " << p;
    mpfr_clear(value);
}

TEST(NormalQuantile, InvertsTheDistributionFunction) {
    for (int i = 1; i < 1000; ++i) expect_quantile(i / 1000.0);
    for (int k = 2; k <= 52; ++k) {
        expect_quantile(std::ldexp(1, -k));
        expect_quantile(1 - std::ldexp(1, -k));
        expect_quantile(std::ldexp(0.7, -k));
    }
    EXPECT_EQ(normal_quantile(0.5), 0);
}

}  // namespace
}  // namespace faultline
