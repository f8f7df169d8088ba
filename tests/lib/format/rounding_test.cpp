// SPDX-License-Identifier: Apache-2.0
// round() against MPFR: exhaustive for formats of 16 bits or fewer, at every number, every midpoint and the neighbours of
// both; sampled for tf32 and fp32.
#include "judge.hpp"

#include <faultline/random/random_stream.hpp>

#include <gtest/gtest.h>
#include <cmath>
#include <limits>

namespace faultline {
namespace {

using testing::Case;
using testing::Judgement;
using testing::same;

/// Calls visit(x) for x at every stride-th number of the format, at the midpoint to the next (also to the one that would
/// follow the largest), and at the float and double neighbours of that midpoint. Positive x only.
template <class Visit>
void for_each_critical(const Case& c, std::uint64_t stride, Visit&& visit) {
    const std::uint64_t last = encode(c.max, c.format);
    const double largest_step = c.max - decode(last - 1, c.format);
    for (std::uint64_t code = 0; code <= last; code += stride) {
        const double low = decode(code, c.format);
        const double high = code == last ? c.max + largest_step : decode(code + 1, c.format);
        const double middle = low / 2 + high / 2;
        const auto middle_float = static_cast<float>(middle);
        visit(low);
        visit(middle);
        visit(std::nextafter(middle, 0.0));
        visit(std::nextafter(middle, 2 * high));
        visit(static_cast<double>(std::nextafter(middle_float, 0.0f)));
        visit(static_cast<double>(std::nextafter(middle_float, std::numeric_limits<float>::max())));
    }
}

void expect_rounding(double x, const Case& c, std::uint64_t random_bits) {
    const Judgement judgement(x, c);
    for (const Rounding mode : all_roundings()) {
        const double expected = judgement.rounded(mode, random_bits);
        const double actual = round(x, c.format, mode, random_bits);
        ASSERT_TRUE(same(actual, expected)) << c.name << " " << name(mode) << " of " << std::hexfloat << x << ": got "
                                            << actual << ", MPFR says " << expected << ", random bits " << random_bits;
    }
}

class EveryFormat : public ::testing::TestWithParam<Case> {};

TEST_P(EveryFormat, AgreesWithMpfrAtEveryNumberAndMidpoint) {
    const Case& c = GetParam();
    const RandomStream stream(1);
    // 16 bits and fewer: every code. tf32: one in 67, fp32: one in about 800,000; odd strides meet all trailing bits.
    const std::uint64_t stride = c.bits <= 16 ? 1 : c.bits == 19 ? 67 : 801'007;
    std::uint64_t counter = 0;
    for_each_critical(c, stride, [&](double x) {
        expect_rounding(x, c, stream.bits(counter++));
        expect_rounding(-x, c, stream.bits(counter++));
    });
}

TEST_P(EveryFormat, AgreesWithMpfrOnRandomDoubles) {
    const Case& c = GetParam();
    const RandomStream stream(2);
    constexpr std::uint64_t samples = 20'000;
    for (std::uint64_t i = 0; i < samples; ++i) {
        // Any bits at all, and bits with an exponent inside the format's range, so that rounding happens.
        expect_rounding(std::bit_cast<double>(stream.bits(3 * i)), c, stream.bits(3 * i + 1));
        const double low = std::log2(c.min) - 3, high = std::log2(c.max) + 1;
        const double magnitude = std::exp2(low + (high - low) * stream.uniform(3 * i + 2));
        expect_rounding(i % 2 == 0 ? magnitude : -magnitude, c, stream.bits(3 * i + 1));
    }
}

TEST_P(EveryFormat, AgreesWithMpfrAtTheEndsOfBinary64) {
    using limits = std::numeric_limits<double>;
    for (const double x : {0.0, limits::denorm_min(), limits::min(), std::nextafter(limits::min(), 0.0), limits::max(),
                           limits::infinity(), limits::quiet_NaN(), 1.0}) {
        for (const std::uint64_t random : {std::uint64_t{0}, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
            expect_rounding(x, GetParam(), random);
            expect_rounding(-x, GetParam(), random);
        }
    }
}

// The judge's choice among neighbours, against what MPFR does by itself with a bounded exponent range.
TEST_P(EveryFormat, JudgeAgreesWithMpfrsOwnRounding) {
    const Case& c = GetParam();
    if (!std::isinf(c.infinite) || !c.format.subnormals) GTEST_SKIP() << "MPFR has no format of this kind";
    for_each_critical(
        c,
        c.bits <= 16   ? 3
        : c.bits == 19 ? 67
                       : 801'007,
        [&](double x) {
            for (const Rounding mode :
                 {Rounding::nearest_even, Rounding::toward_zero, Rounding::upward, Rounding::downward}) {
                ASSERT_TRUE(same(Judgement(x, c).rounded(mode, 0), testing::judged_by_mpfr_alone(x, c, mode)))
                    << c.name << " " << x;
                ASSERT_TRUE(same(Judgement(-x, c).rounded(mode, 0), testing::judged_by_mpfr_alone(-x, c, mode)))
                    << c.name << " " << -x;
            }
        });
}

TEST_P(EveryFormat, RoundingTwiceIsRoundingOnce) {
    const Case& c = GetParam();
    for_each_critical(
        c,
        c.bits <= 16   ? 1
        : c.bits == 19 ? 67
                       : 801'007,
        [&](double x) {
            for (const Rounding mode : all_roundings()) {
                const double once = round(x, c.format, mode, ~std::uint64_t{0});
                ASSERT_TRUE(same(round(once, c.format, mode, ~std::uint64_t{0}), once) || std::isinf(once)) << x;
            }
        });
}

// Round-to-odd into two more bits makes the second rounding innocent (Boldo and Melquiond, 2008).
TEST_P(EveryFormat, RoundToOddPreventsDoubleRounding) {
    const Case& c = GetParam();
    Format wider = c.format;
    if (!wider.subnormals || wider.nans == NanKind::single_code) GTEST_SKIP() << "the wider format has other ends";
    wider.precision += 2;
    for_each_critical(c,
                      c.bits <= 16   ? 1
                      : c.bits == 19 ? 67
                                     : 801'007,
                      [&](double x) {
                          if (x > c.max) return;
                          ASSERT_TRUE(same(round(round(x, wider, Rounding::to_odd), c.format), round(x, c.format)))
                              << c.name << " " << x;
                      });
}

INSTANTIATE_TEST_SUITE_P(Formats, EveryFormat, ::testing::ValuesIn(testing::cases()), testing::label);

TEST(Exact, IsTheIdentityOnEveryBinary64) {
    const RandomStream stream(4);
    for (std::uint64_t i = 0; i < 10'000; ++i) {
        const std::uint64_t bits = stream.bits(i);
        for (const Rounding mode : all_roundings()) {
            ASSERT_EQ(std::bit_cast<std::uint64_t>(round(std::bit_cast<double>(bits), exact, mode, bits)), bits);
        }
    }
    const std::uint64_t payload = 0xFFF0'0000'0000'0123u;  // a signalling NaN with a payload
    EXPECT_EQ(std::bit_cast<std::uint64_t>(round(std::bit_cast<double>(payload), exact)), payload);
    EXPECT_TRUE(is_exact(exact));
    EXPECT_FALSE(is_exact(binary64));
}

TEST(Binary64, IsTheIdentityOnNumbers) {
    const RandomStream stream(5);
    for (std::uint64_t i = 0; i < 10'000; ++i) {
        const auto x = std::bit_cast<double>(stream.bits(i));
        for (const Rounding mode : all_roundings()) ASSERT_TRUE(same(round(x, binary64, mode, stream.bits(i)), x));
    }
    EXPECT_EQ(round(0x1p-1074, binary64), 0x1p-1074);
    EXPECT_EQ(round(0x1.fffffffffffffp1023, binary64, Rounding::upward), 0x1.fffffffffffffp1023);
}

TEST(Fp32, IsTheConversionOfTheMachine) {
    const RandomStream stream(6);
    for (std::uint64_t i = 0; i < 1'000'000; ++i) {
        const double x = std::ldexp(stream.uniform(2 * i) - 0.5, static_cast<int>(stream.bits(2 * i + 1) % 300) - 170);
        ASSERT_TRUE(same(round(x, fp32), static_cast<double>(static_cast<float>(x)))) << std::hexfloat << x;
    }
}

}  // namespace
}  // namespace faultline
