// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding: its probabilities exactly, and the random numbers that round_bulk feeds it.
#include <faultline/format/bulk.hpp>
#include <faultline/format/names.hpp>

#include <gtest/gtest.h>
#include <array>
#include <cmath>
#include <set>
#include <vector>

namespace faultline {
namespace {

constexpr std::uint64_t all_bits = ~std::uint64_t{0};

// As in tests/lib/random: deterministic streams, so this is the chance of bad luck when the test was written.
constexpr double sigmas = 5;

// StochasticRounding.jl#62, #74: a representable number, a power of two among them, returns itself for every random bits.
TEST(Stochastic, RepresentableNumbersReturnThemselves) {
    for (const Format f : {fp32, bf16, fp16, e5m2, e4m3, e2m1}) {
        for (int k = f.emin - (f.precision - 1); k <= f.emax; ++k) {
            const double x = std::ldexp(1, k);
            EXPECT_EQ(round(x, f, Rounding::stochastic, all_bits), x) << name(f) << " 2^" << k;
            EXPECT_EQ(round(-x, f, Rounding::stochastic, 0), -x) << name(f) << " 2^" << k;
        }
    }
}

TEST(Stochastic, HalfTheSmallestNumberGivesBothZeroAndIt) {
    for (const Format f : {bf16, fp16, e5m2, e4m3, e3m2, e2m3, e2m1}) {
        const double x = min_subnormal(f) / 2;
        EXPECT_EQ(round(x, f, Rounding::stochastic, 0), 0);
        EXPECT_EQ(round(x, f, Rounding::stochastic, all_bits), min_subnormal(f));
        EXPECT_EQ(round(x, f, Rounding::stochastic, (std::uint64_t{1} << 63) - 1), 0) << "the last of the lower half";
        EXPECT_EQ(round(x, f, Rounding::stochastic, std::uint64_t{1} << 63), min_subnormal(f))
            << "the first of the upper";
        std::set<float> seen;
        std::vector<float> values(256, static_cast<float>(x));
        round_bulk(std::span(values), f, Rounding::stochastic, RandomStream(1));
        seen.insert(values.begin(), values.end());
        EXPECT_EQ(seen, (std::set<float>{0.0f, static_cast<float>(min_subnormal(f))})) << name(f);
    }
}

// All 2^16 values of the upper bits: exactly the discarded 16-bit integer of them round away.
TEST(Stochastic, ProbabilityIsTheDiscardedFractionExactly) {
    for (const std::uint32_t discarded : {1u, 0x1234u, 0x8000u, 0xFFFFu}) {
        const auto x = static_cast<double>(std::bit_cast<float>(0x3FC00000u | discarded));
        std::uint32_t away = 0;
        for (std::uint64_t r = 0; r < 65536; ++r) away += round(x, bf16, Rounding::stochastic, r << 48) > 1.5 ? 1 : 0;
        EXPECT_EQ(away, discarded);
    }
    // 2^-66 of a quantum: not seen by 64 bits, whatever they are. 2^-64: by exactly one value of them.
    EXPECT_EQ(round(0x1p-9 * 0x1p-66, e4m3, Rounding::stochastic, all_bits), 0);
    EXPECT_EQ(round(0x1p-9 * 0x1p-64, e4m3, Rounding::stochastic, all_bits), 0x1p-9);
    EXPECT_EQ(round(0x1p-9 * 0x1p-64, e4m3, Rounding::stochastic, all_bits - 1), 0);
}

TEST(Stochastic, OverflowIsAsLikelyAsTheFractionSays) {
    EXPECT_EQ(round(65504 + 16, fp16, Rounding::stochastic, (std::uint64_t{1} << 63) - 1), 65504);
    EXPECT_TRUE(std::isinf(round(65504 + 16, fp16, Rounding::stochastic, std::uint64_t{1} << 63)));
    EXPECT_EQ(round(463, e4m3, Rounding::stochastic, all_bits), 448);
}

class StochasticBits : public ::testing::Test {
  protected:
    static constexpr std::size_t draws = std::size_t{1} << 20;
    static const std::vector<std::uint32_t>& words() {
        static const std::vector<std::uint32_t> values = [] {
            std::vector<std::uint32_t> result(draws);
            const RandomStream stream(20, 26);
            for (std::size_t i = 0; i < draws; ++i) {
                result[i] = static_cast<std::uint32_t>(stochastic_bits(stream, i) >> 32);
            }
            return result;
        }();
        return values;
    }
};

TEST_F(StochasticBits, OnlyTheUpperHalfIsUsed) {
    for (std::uint64_t i = 0; i < 1000; ++i) EXPECT_EQ(stochastic_bits(RandomStream(1), i) & 0xFFFFFFFFu, 0u);
}

TEST_F(StochasticBits, MeanVarianceAndSerialCorrelation) {
    constexpr double n = draws;
    double sum = 0, squares = 0;
    for (const std::uint32_t w : words()) {
        const double centred = (w + 0.5) * 0x1p-32 - 0.5;
        sum += centred;
        squares += centred * centred;
    }
    EXPECT_NEAR(sum / n, 0, sigmas * std::sqrt(1 / 12.0 / n));
    EXPECT_NEAR(squares / n, 1 / 12.0, sigmas * std::sqrt(1 / 180.0 / n));
    // Lags within a vector, across words, across the halves of one word (64) and across groups (128).
    for (const std::size_t lag : {1u, 2u, 15u, 16u, 17u, 32u, 48u, 64u, 127u, 128u, 256u, 1024u}) {
        double products = 0;
        for (std::size_t i = lag; i < draws; ++i) {
            products += ((words()[i] + 0.5) * 0x1p-32 - 0.5) * ((words()[i - lag] + 0.5) * 0x1p-32 - 0.5);
        }
        EXPECT_NEAR(products / static_cast<double>(draws - lag), 0, sigmas / 12 / std::sqrt(n)) << "lag " << lag;
    }
}

TEST_F(StochasticBits, EveryBitIsFairAndIndependentOfEveryOther) {
    constexpr double n = draws;
    std::array<std::array<int, 32>, 32> equal{};
    std::array<int, 32> set{};
    for (const std::uint32_t w : words()) {
        for (unsigned i = 0; i < 32; ++i) {
            set[i] += (w >> i) & 1;
            for (unsigned j = 0; j < i; ++j) equal[i][j] += ((w >> i) ^ (w >> j) ^ 1) & 1;
        }
    }
    for (unsigned i = 0; i < 32; ++i) {
        EXPECT_NEAR(set[i], n / 2, sigmas * std::sqrt(n / 4)) << "bit " << i;
        for (unsigned j = 0; j < i; ++j) EXPECT_NEAR(equal[i][j], n / 2, sigmas * std::sqrt(n / 4)) << i << " " << j;
    }
}

// Chi-square over the upper byte and over pairs (this byte's upper nibble, the next element's): 255 degrees of freedom,
// mean 255, standard deviation sqrt(510).
TEST_F(StochasticBits, ChiSquareOfBytesAndPairs) {
    for (const std::size_t lag : {0u, 1u, 16u, 64u, 128u}) {
        std::vector<double> counts(256, 0);
        for (std::size_t i = lag; i < draws; ++i) {
            const std::uint32_t here = words()[i];
            const std::uint32_t cell = lag == 0 ? here >> 24 : (here >> 28) * 16 + (words()[i - lag] >> 28);
            ++counts[cell];
        }
        const double expected = static_cast<double>(draws - lag) / 256;
        double chi_square = 0;
        for (const double count : counts) chi_square += (count - expected) * (count - expected) / expected;
        EXPECT_NEAR(chi_square, 255, sigmas * std::sqrt(510.0)) << "lag " << lag;
    }
}

// The sum of many rounding errors grows like the square root of their number: no bias.
TEST_F(StochasticBits, BulkRoundingIsUnbiased) {
    for (const Format f : {bf16, e4m3}) {
        const double x = 1.0 + 0.3 * ulp(1, f);
        std::vector<float> values(draws, static_cast<float>(x));
        const auto exact_value = static_cast<double>(values[0]);
        round_bulk(std::span(values), f, Rounding::stochastic, RandomStream(9, 1));
        double sum = 0;
        for (const float v : values) sum += static_cast<double>(v) - exact_value;
        const double deviation = ulp(1, f) * std::sqrt(0.3 * 0.7 / draws);
        EXPECT_NEAR(sum / draws, 0, sigmas * deviation) << name(f);
    }
}

}  // namespace
}  // namespace faultline
