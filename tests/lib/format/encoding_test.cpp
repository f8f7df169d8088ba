// SPDX-License-Identifier: Apache-2.0
// Every code of every format of at most 16 bits, and the special codes of all, against literals from the standards.
#include "judge.hpp"

#include <faultline/random/random_stream.hpp>

#include <gtest/gtest.h>
#include <cmath>
#include <limits>

namespace faultline {
namespace {

using testing::Case;
using testing::same;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// The value of a code by the definition that IEEE 754 and OCP share: (-1)^s 2^(E-bias) 1.f, or 2^(1-bias) 0.f for E = 0.
double by_definition(std::uint64_t code, const Case& c) {
    const int trailing = c.precision - 1;
    const int field = static_cast<int>((code >> trailing) & ((1u << (c.bits - c.precision)) - 1));
    const double fraction = std::ldexp(static_cast<double>(code & ((1u << trailing) - 1)), -trailing);
    const double sign = (code >> (c.bits - 1)) & 1 ? -1 : 1;
    const double magnitude = field == 0 ? (c.format.subnormals ? std::ldexp(fraction, c.emin) : 0.0)
                                        : std::ldexp(1 + fraction, c.emin + field - 1);
    if (magnitude <= c.max) return sign * magnitude;
    if (c.format.nans == NanKind::ieee && fraction == 0) return sign * inf;
    return nan;
}

class EveryCode : public ::testing::TestWithParam<Case> {};

TEST_P(EveryCode, DecodesByDefinitionAndEncodesBack) {
    const Case& c = GetParam();
    for (std::uint64_t code = 0; code < (std::uint64_t{1} << c.bits); ++code) {
        const double value = decode(code, c.format);
        ASSERT_TRUE(same(value, by_definition(code, c))) << c.name << " code " << code << " gave " << value;
        if (std::isnan(value) || (std::isinf(value) && c.format.saturates)) continue;
        const bool flushed = value == 0 && (code & ((std::uint64_t{1} << (c.bits - 1)) - 1)) != 0;
        if (!flushed) {
            ASSERT_EQ(encode(value, c.format), code) << c.name << " " << value;
        }
        for (const Rounding mode : all_roundings()) {
            ASSERT_TRUE(same(round(value, c.format, mode, ~std::uint64_t{0}), value)) << c.name << " " << value;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Formats, EveryCode, ::testing::ValuesIn(testing::narrow_cases()), testing::label);

TEST(Encoding, RangesAreThoseOfTheStandards) {
    for (const Case& c : testing::cases()) {
        EXPECT_EQ(max_finite(c.format), c.max) << c.name;
        EXPECT_EQ(min_subnormal(c.format), c.min) << c.name;
        EXPECT_EQ(min_normal(c.format), std::ldexp(1, c.emin)) << c.name;
        EXPECT_EQ(code_bits(c.format), c.bits) << c.name;
        EXPECT_EQ(unit_roundoff(c.format), std::ldexp(1, -c.precision)) << c.name;
    }
    EXPECT_EQ(max_finite(binary64), std::numeric_limits<double>::max());
    EXPECT_EQ(min_subnormal(binary64), std::numeric_limits<double>::denorm_min());
    EXPECT_EQ(code_bits(binary64), 64);
    EXPECT_EQ(code_bits(exact), 64);
}

TEST(Encoding, SpecialCodes) {
    EXPECT_EQ(encode(inf, fp16), 0x7C00u);
    EXPECT_EQ(encode(-inf, bf16), 0xFF80u);
    EXPECT_EQ(encode(nan, bf16), 0x7FC0u);
    EXPECT_EQ(encode(nan, fp16), 0x7E00u);
    EXPECT_EQ(encode(nan, e4m3), 0x7Fu);
    EXPECT_EQ(encode(nan, e5m2), 0x7Eu);
    EXPECT_EQ(encode(nan, e2m1), 0x7u) << "no NaN: the largest number, positive (PTX cvt.satfinite)";
    EXPECT_EQ(encode(-nan, e3m2), 0x1Fu);
    EXPECT_EQ(encode(448, e4m3), 0x7Eu);
    EXPECT_EQ(encode(-inf, e4m3), 0xFEu);
    EXPECT_EQ(encode(inf, with_saturation(e5m2, false)), 0x7Cu);
    EXPECT_EQ(encode(-0.0, e2m1), 0x8u);
    EXPECT_EQ(encode(1, tf32), 127u << 10);
    for (const std::uint64_t code : {0x7F81u, 0x7FC0u, 0xFFFFu}) EXPECT_TRUE(std::isnan(decode(code, bf16)));
}

TEST(Encoding, Fp32CodesAreTheMachinesOwn) {
    const RandomStream stream(8);
    for (std::uint64_t i = 0; i < 1'000'000; ++i) {
        const auto code = static_cast<std::uint32_t>(stream.bits(i));
        const auto value = std::bit_cast<float>(code);
        if (std::isnan(value)) continue;
        ASSERT_TRUE(same(decode(code, fp32), static_cast<double>(value)));
        ASSERT_EQ(encode(static_cast<double>(value), fp32), code);
        ASSERT_EQ(encode(std::bit_cast<double>(stream.bits(i)), binary64), stream.bits(i));
    }
}

TEST(Encoding, ValuesThatAreNotOfTheFormatAreRoundedFirst) {
    EXPECT_EQ(decode(encode(1.1, bf16), bf16), 1.1015625);
    EXPECT_EQ(decode(encode(1e9, e4m3), e4m3), 448);
}

TEST(Ulp, IsTheSpacingOfTheFormat) {
    for (const Case& c : testing::narrow_cases()) {
        const std::uint64_t last = encode(c.max, c.format);
        for (std::uint64_t code = 0; code < last; ++code) {
            const double low = decode(code, c.format);
            const double spacing = decode(code + 1, c.format) - low;
            if (spacing == 0) continue;  // flushed codes of a format without subnormals
            if (!c.format.subnormals && low == 0) continue;
            ASSERT_EQ(ulp(low, c.format), spacing) << c.name << " " << low;
            ASSERT_EQ(ulp(-(low + spacing / 4), c.format), spacing) << c.name << " " << low;
        }
        EXPECT_EQ(ulp(0, c.format), c.min);
        EXPECT_EQ(ulp(1e300, c.format), ulp(c.max, c.format)) << "beyond the range: the top binade's";
    }
    EXPECT_EQ(ulp(1, bf16), 0x1p-7);
    EXPECT_EQ(ulp(1.5, fp32), 0x1p-23);
    EXPECT_EQ(ulp(448, e4m3), 32);
    EXPECT_EQ(ulp(1e-310, binary64), 0x1p-1074);
    EXPECT_TRUE(std::isnan(ulp(inf, bf16)));
    EXPECT_TRUE(std::isnan(ulp(nan, bf16)));
}

}  // namespace
}  // namespace faultline
