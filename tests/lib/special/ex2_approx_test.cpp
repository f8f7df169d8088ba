// SPDX-License-Identifier: Apache-2.0
#include <faultline/special/ex2_approx.hpp>

#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "measured.hpp"

namespace faultline {
namespace {

using namespace special_test;

constexpr float infinity = std::numeric_limits<float>::infinity();

struct Range {
    const char* name;
    std::uint32_t base;
    std::uint64_t checksum;  // 0: the single results were not kept
    Histogram histogram;
};

const Range& range(int i) {
    static const Range ranges[]{
        {"[1, 2)", 0x3f800000u, 0x090eb25452189a1aull, {{-1, 3093}, {0, 5125875}, {1, 3259640}}},
        {"(-1, -0.5]", 0xbf000000u, 0x12b2e2d722355811ull, {{-2, 58}, {-1, 2339646}, {0, 5831372}, {1, 217532}}},
        {"(-0.5, -0.25]", 0xbe800000u, 0x17190c1a16426c52ull, {{-2, 7626}, {-1, 2588512}, {0, 5390018}, {1, 402452}}},
        {"(-8, -4]", 0xc0800000u, 0, {{-2, 95044}, {-1, 5011992}, {0, 3281496}, {1, 76}}},
        {"(-2^-7, -2^-8]", 0xbb800000u, 0, {{-2, 6580}, {-1, 3007743}, {0, 4905907}, {1, 468378}}}};
    return ranges[i];
}

class Measured : public testing::TestWithParam<int> {};

TEST_P(Measured, Ex2IsTheCardsBitForBit) {
    const Range& r = range(GetParam());
    const std::vector<std::uint32_t> bits = results(ex2_approx, r.base);
    if (r.checksum != 0) {
        EXPECT_EQ(checksum(bits), r.checksum) << r.name;
    }
    EXPECT_EQ(histogram(differences(Function::exp2, bits, r.base)), r.histogram) << r.name;
}

INSTANTIATE_TEST_SUITE_P(Ranges, Measured, testing::Range(0, 5));

TEST(Ex2Approx, ValuesOfTheCard) {
    const struct {
        std::uint32_t x, y;
    } cases[]{{0x3f800000u, 0x40000000u}, {0x3f800001u, 0x40000001u}, {0x3f803039u, 0x40002172u},
              {0x3fc00000u, 0x403504f3u}, {0x3fffffffu, 0x407fffffu}, {0xbf000000u, 0x3f3504f2u},
              {0xbf000001u, 0x3f3504f2u}, {0xbf003039u, 0x3f34ed52u}, {0xbf400000u, 0x3f1837f0u},
              {0xbf7fffffu, 0x3f000000u}, {0xbe800000u, 0x3f5744fcu}, {0xbec00000u, 0x3f456729u}};
    for (const auto& c : cases) EXPECT_EQ(bits_of(ex2_approx(from_bits(c.x))), c.y) << std::hex << c.x;
}

// Over [1, 2) the card's results never fall, and rise this often.
TEST(Ex2Approx, RisesAsOftenAsTheCard) {
    const std::vector<std::uint32_t> bits = results(ex2_approx, 0x3f800000u);
    std::uint32_t rises = 0;
    for (std::size_t i = 1; i < bits.size(); ++i) {
        ASSERT_GE(bits[i], bits[i - 1]) << i;
        rises += bits[i] > bits[i - 1] ? 1 : 0;
    }
    EXPECT_EQ(rises, 7665501u);
}

// The four whole numbers of (-8, -4] are what makes its histogram; the others follow the same rule.
TEST(Ex2Approx, WholeNumbersAreExact) {
    for (int k = -126; k <= 127; ++k) EXPECT_EQ(ex2_approx(static_cast<float>(k)), std::ldexp(1.0f, k)) << k;
}

TEST(Ex2Approx, EndsOfTheRange) {
    EXPECT_EQ(ex2_approx(128.0f), infinity);
    EXPECT_EQ(ex2_approx(infinity), infinity);
    // The fraction is that of 2 - 2^-17, whose result on the card is 0x407fffa8.
    EXPECT_EQ(bits_of(ex2_approx(std::nextafter(128.0f, 0.0f))), 0x7f7fffa8u);
    EXPECT_EQ(bits_of(ex2_approx(-infinity)), 0u);
    EXPECT_EQ(bits_of(ex2_approx(-std::numeric_limits<float>::max())), 0u);
    EXPECT_EQ(bits_of(ex2_approx(std::nanf(""))), 0x7fffffffu);
    EXPECT_EQ(bits_of(ex2_approx(-std::nanf("1"))), 0x7fffffffu);
    for (const float tiny : {0.0f, 1e-45f, 1e-38f, 1e-10f, 0x1p-24f}) {
        EXPECT_EQ(ex2_approx(tiny), 1.0f) << tiny;
        EXPECT_EQ(ex2_approx(-tiny), 1.0f) << tiny;
    }
}

// Below -126 the unit alone flushes; the square of the half's result, rounded to nearest even, does not.
TEST(Ex2Approx, SubnormalResults) {
    EXPECT_EQ(ex2_approx_ftz(-126.0f), 0x1p-126f);
    EXPECT_EQ(bits_of(ex2_approx_ftz(std::nextafter(-126.0f, -infinity))), 0u);
    EXPECT_EQ(bits_of(ex2_approx_ftz(-127.0f)), 0u);
    EXPECT_EQ(ex2_approx(-128.0f), 0x1p-128f);
    EXPECT_EQ(ex2_approx(-148.0f), 0x1p-148f);
    EXPECT_EQ(ex2_approx(-149.0f), 0x1p-149f);    // (2^-74.5 and a bit)^2
    EXPECT_EQ(bits_of(ex2_approx(-150.0f)), 0u);  // (2^-75)^2 is midway between 0 and 2^-149
    EXPECT_EQ(bits_of(ex2_approx_ftz(-1e30f)), 0u);
}

TEST(Ex2Approx, Exp2fAndExpfAreBuiltOnIt) {
    std::mt19937 random(1);
    for (int i = 0; i < 100000; ++i) {
        const float x = from_bits(static_cast<std::uint32_t>(random()));
        ASSERT_EQ(bits_of(exp2f_cuda(x)), bits_of(ex2_approx(x)));
    }
    EXPECT_EQ(expf_fast_cuda(0.0f), 1.0f);
    EXPECT_EQ(bits_of(expf_fast_cuda(1.0f)), bits_of(ex2_approx(0x1.715476p+0f)));
}

// CUDA's guide ("Mathematical Functions") gives exp2f 2 ulp over its full range, meaning the difference from the
// correctly rounded result. This reaches what was not measured: large and tiny x of both signs.
TEST(Ex2Approx, WithinCudasBound) {
    constexpr int documented_ulps = 2;
    std::mt19937 random(2);
    std::uniform_real_distribution<float> uniform(-126.0f, 128.0f);
    int worst = 0;
    for (int i = 0; i < 1000000; ++i) {
        const float x = i % 2 == 0 ? uniform(random) : std::ldexp(uniform(random), -static_cast<int>(random() % 40));
        const std::int64_t y = bits_of(ex2_approx(x));
        const std::int64_t right = bits_of(correctly_rounded(Function::exp2, x));
        worst = std::max(worst, static_cast<int>(std::abs(y - right)));
        ASSERT_LE(worst, documented_ulps) << x;
    }
    EXPECT_EQ(worst, documented_ulps);  // the histograms have differences of 2
}

}  // namespace
}  // namespace faultline
