// SPDX-License-Identifier: Apache-2.0
#include <faultline/special/lg2_approx.hpp>

#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "measured.hpp"

namespace faultline {
namespace {

using namespace special_test;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr std::uint32_t one = 0x3f800000u;

// Differences of more than 127 ulp were recorded as 127; from this distance from 1 there are none.
constexpr std::uint32_t first_exact = 91328;

TEST(Lg2Approx, OneToTwoIsTheCardsBitForBit) {
    EXPECT_EQ(checksum(results(lg2_approx, one, first_exact)), 0x27a8fcd661d2ad4aull);
    const std::vector<std::int8_t> d = differences(Function::log2, results(lg2_approx, one), one);
    EXPECT_EQ(checksum(d), 0x163987bc4000c671ull);
    EXPECT_EQ(histogram(d, 4), (Histogram{{-4, 42172},
                                          {-3, 4172},
                                          {-2, 11035},
                                          {-1, 414634},
                                          {0, 2878730},
                                          {1, 2556795},
                                          {2, 731237},
                                          {3, 489966},
                                          {4, 1259867}}));
    EXPECT_EQ(histogram(d)[127], 15833u);
}

TEST(Lg2Approx, FourToEightHasTheCardsHistogram) {
    constexpr std::uint32_t four = 0x40800000u;
    EXPECT_EQ(histogram(differences(Function::log2, results(lg2_approx, four), four)),
              (Histogram{{-1, 2080902}, {0, 6293024}, {1, 14682}}));
}

TEST(Lg2Approx, ValuesOfTheCard) {
    const struct {
        std::uint32_t x, y;
    } cases[]{{0x3f800000u, 0},
              {0x3f8164c0u, 0x3c7ff3a0u},
              {0x3f820000u, 0x3cb73cd1u},
              {0x3fc00000u, 0x3f15c01bu},
              {0x3fffffffu, 0x3f7fffffu}};
    for (const auto& c : cases) EXPECT_EQ(bits_of(lg2_approx(from_bits(c.x))), c.y) << std::hex << c.x;
}

// By hand, for what was not measured: the first segment's sum at fraction 0 is 4 * 2^12 + 0x3345 = 29509, cut to 36
// fraction bits 7377. For x = 2^-k the total is 7377 - k 2^36, its complement k 2^36 - 7378. Truncation to 24 bits goes
// by steps of 2^12 for k = 1, which leaves two less than 1, and of 2^13 and 2^14 for k = 2 and 3, which leave one less.
TEST(Lg2Approx, NegativeSumsByHand) {
    EXPECT_EQ(bits_of(lg2_approx(0.5f)), 0xbf7ffffeu);
    EXPECT_EQ(bits_of(lg2_approx(0.25f)), 0xbfffffffu);
    EXPECT_EQ(bits_of(lg2_approx(0.125f)), 0xc03fffffu);
    // Next to 1, fraction 1: the sum rises by c1 = 0xb8a8 to 76781, 19195 in 2^-36, 0x4afb = 1.00101011111011b * 2^14.
    EXPECT_EQ(lg2_approx(std::nextafter(1.0f, 2.0f)), 19195 * 0x1p-36f);
    // On the other side u = 131071, whose cut square is 32759 (exact: 32767.5): the last segment's sum is
    // (0x3f469c1 << 12) + 0x5d0f u - 2 * 0xba * 32759 + 0x3345 = 2^38 - 3254, cut 2^36 - 814; less 2^36, the complement
    // is 813.
    EXPECT_EQ(lg2_approx(std::nextafter(1.0f, 0.0f)), -813 * 0x1p-36f);
}

// On both sides of 1, and across it.
TEST(Lg2Approx, NeverFalls) {
    float before = lg2_approx(0.5f);
    for (std::uint32_t x = bits_of(0.5f); x < bits_of(2.0f); ++x) {
        const float now = lg2_approx(from_bits(x));
        ASSERT_GE(now, before) << std::hex << x;
        before = now;
    }
}

TEST(Lg2Approx, EndsOfTheRange) {
    EXPECT_EQ(lg2_approx(infinity), infinity);
    EXPECT_EQ(lg2_approx(0.0f), -infinity);
    EXPECT_EQ(lg2_approx(-0.0f), -infinity);
    EXPECT_EQ(bits_of(lg2_approx(-infinity)), 0x7fffffffu);
    EXPECT_EQ(bits_of(lg2_approx(-1.0f)), 0x7fffffffu);
    EXPECT_EQ(bits_of(lg2_approx(-1e-45f)), 0x7fffffffu);  // scaled before it reaches the unit
    EXPECT_EQ(lg2_approx_ftz(-1e-45f), -infinity);         // flushed by the unit
    EXPECT_EQ(bits_of(lg2_approx(std::nanf(""))), 0x7fffffffu);
    EXPECT_EQ(bits_of(lg2_approx(-std::nanf("1"))), 0x7fffffffu);
    EXPECT_EQ(lg2_approx_ftz(0x1p-127f), -infinity);
    EXPECT_EQ(lg2_approx(1e-45f), lg2_approx_ftz(0x1p-125f) - 24.0f);
    for (int k = 1; k <= 127; ++k) EXPECT_EQ(lg2_approx(std::ldexp(1.0f, k)), static_cast<float>(k)) << k;
}

// CUDA's guide ("Mathematical Functions", intrinsics) gives __log2f an absolute error of 2^-22 over [0.5, 2] and 2 ulp
// elsewhere, meaning the difference from the correctly rounded result.
TEST(Lg2Approx, WithinCudasBound) {
    constexpr double documented_absolute = 0x1p-22;
    constexpr int documented_ulps = 2;
    for (std::uint32_t x = bits_of(0.5f); x < bits_of(2.0f); ++x) {
        const double error =
            static_cast<double>(lg2_approx(from_bits(x))) - std::log2(static_cast<double>(from_bits(x)));
        ASSERT_LE(std::abs(error), documented_absolute) << std::hex << x;
    }
    std::mt19937 random(1);
    for (int i = 0; i < 1000000; ++i) {
        const float x = from_bits(static_cast<std::uint32_t>(random()) % 0x7f800000u);
        if (x < 0x1p-126f || (x >= 0.5f && x <= 2.0f)) continue;
        const std::int64_t right = bits_of(correctly_rounded(Function::log2, x));
        ASSERT_LE(std::abs(static_cast<std::int64_t>(bits_of(lg2_approx(x))) - right), documented_ulps) << x;
    }
}

TEST(Lg2Approx, LogfIsBuiltOnIt) {
    constexpr float ln2 = 0x1.62e43p-1f;
    EXPECT_EQ(bits_of(logf_fast_cuda(1.0f)), 0u);
    EXPECT_EQ(logf_fast_cuda(2.0f), ln2);
    EXPECT_EQ(bits_of(logf_fast_cuda(1.5f)), bits_of(from_bits(0x3f15c01bu) * ln2));
    EXPECT_EQ(logf_fast_cuda(0.0f), -infinity);
}

}  // namespace
}  // namespace faultline
