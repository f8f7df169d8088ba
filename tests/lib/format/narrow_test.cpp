// SPDX-License-Identifier: Apache-2.0
// Values are made from sign, exponent and significand, by ldexp; NaNs from their bits.
#include <faultline/format/narrow.hpp>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace faultline {
namespace {

/// The number whose bf16 these bits are; NaN and infinities have none.
double value_of_bf16(std::uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 7 & 0xFFu), significand = static_cast<int>(bits & 0x7Fu);
    const double size = exponent == 0 ? std::ldexp(significand, -133) : std::ldexp(128 + significand, exponent - 134);
    return bits >> 15 != 0 ? -size : size;
}
bool same(const std::vector<double>& a, const std::vector<double>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

TEST(Narrow, EveryNumberOfBf16) {
    std::vector<double> values;
    std::vector<std::uint16_t> wanted;
    for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
        if ((bits >> 7 & 0xFFu) == 0xFFu) continue;
        values.push_back(value_of_bf16(bits));
        wanted.push_back(static_cast<std::uint16_t>(bits));
    }
    std::vector<std::uint16_t> found(values.size());
    ASSERT_TRUE(narrow_to_bf16(values.data(), values.size(), found.data()));
    EXPECT_EQ(found, wanted);
    std::vector<float> floats(values.size());
    ASSERT_TRUE(narrow_to_fp32(values.data(), values.size(), floats.data()));
    std::vector<double> back(values.size());
    widen(floats.data(), floats.size(), back.data());
    EXPECT_TRUE(same(back, values));
}

/// Infinities and quiet NaNs of either sign with each payload of bf16. Signalling NaNs, which a conversion makes quiet, are no
/// numbers of bf16 or of floats here, nor are payloads beyond theirs.
TEST(Narrow, InfinitiesAndNaNsOfBf16) {
    for (const std::uint64_t sign : {0u, 1u})
        for (std::uint64_t significand = 0; significand < 128; ++significand) {
            const std::uint64_t wide = sign << 63 | 0x7FF0000000000000u | significand << 45;
            const bool held = significand == 0 || significand >= 64;
            const std::vector<double> value{std::bit_cast<double>(wide)};
            std::uint16_t bits = 0;
            ASSERT_EQ(narrow_to_bf16(value.data(), 1, &bits), held) << significand;
            float as_float = 0;
            ASSERT_EQ(narrow_to_fp32(value.data(), 1, &as_float), held) << significand;
            if (!held) continue;
            EXPECT_EQ(bits, sign << 15 | 0x7F80u | significand);
            std::vector<double> back(1);
            widen(&as_float, 1, back.data());
            EXPECT_TRUE(same(back, value)) << significand;
            // One bit more than bf16 has, and one more than a float has.
            const double of_float = std::bit_cast<double>(wide | std::uint64_t{1} << 44);
            const double of_double = std::bit_cast<double>(wide | std::uint64_t{1} << 28);
            if (significand == 0) continue;
            EXPECT_FALSE(narrow_to_bf16(&of_float, 1, &bits));
            EXPECT_TRUE(narrow_to_fp32(&of_float, 1, &as_float));
            EXPECT_EQ(std::bit_cast<std::uint32_t>(as_float), sign << 31 | 0x7F800000u | significand << 16 | 0x8000u);
            EXPECT_FALSE(narrow_to_bf16(&of_double, 1, &bits));
            EXPECT_FALSE(narrow_to_fp32(&of_double, 1, &as_float));
        }
}

TEST(Narrow, EveryExponentOfAFloat) {
    std::vector<double> values;
    for (int exponent = -149; exponent < 128; ++exponent)
        for (const double sign : {1.0, -1.0}) {
            values.push_back(std::ldexp(sign, exponent));
            if (exponent > -126) values.push_back(std::ldexp(sign * 0xABCDEFp-23, exponent));
        }
    values.push_back(0.0);
    values.push_back(-0.0);
    values.push_back(INFINITY);
    values.push_back(-INFINITY);
    values.push_back(std::numeric_limits<double>::quiet_NaN());
    std::vector<float> floats(values.size());
    ASSERT_TRUE(narrow_to_fp32(values.data(), values.size(), floats.data()));
    std::vector<double> back(values.size());
    widen(floats.data(), floats.size(), back.data());
    EXPECT_TRUE(same(back, values));
}

/// One value that is no such number, wherever it stands among 5000 that are.
TEST(Narrow, SaysWhereItLosesABit) {
    const std::vector<double> no_float = {1 + 0x1p-24,     0x1p128,  -0x1p-150,
                                          0x1.000001p-126, 0x1p1023, std::bit_cast<double>(0x7FF8000000000001u)};
    const std::vector<double> no_bf16 = {1 + 0x1p-8, -0x1.01p100, 0x1p-134, 0x1.fffp127};
    for (const std::size_t at : {std::size_t{0}, std::size_t{2047}, std::size_t{2048}, std::size_t{4999}}) {
        std::vector<std::uint16_t> shorts(5000);
        std::vector<float> floats(5000);
        for (const double x : no_float) {
            std::vector<double> values(5000, -1.5);
            values[at] = x;
            EXPECT_FALSE(narrow_to_fp32(values.data(), values.size(), floats.data())) << x << " at " << at;
            EXPECT_FALSE(narrow_to_bf16(values.data(), values.size(), shorts.data())) << x << " at " << at;
        }
        for (const double x : no_bf16) {
            std::vector<double> values(5000, -1.5);
            values[at] = x;
            EXPECT_TRUE(narrow_to_fp32(values.data(), values.size(), floats.data())) << x << " at " << at;
            EXPECT_FALSE(narrow_to_bf16(values.data(), values.size(), shorts.data())) << x << " at " << at;
        }
    }
}

}  // namespace
}  // namespace faultline
