// SPDX-License-Identifier: Apache-2.0
// The last row: traps of format conversion (microsoft/microxcaling#4, QPyTorch#23, #24, gfloat#51, openlibm#357,
// StochasticRounding.jl#74, #62). tests/lib/format sweeps the formats; here are the reports.
#include <gtest/gtest.h>

#include <faultline/format/block.hpp>
#include <faultline/format/bulk.hpp>

#include "cases.hpp"

namespace faultline::testing {
namespace {

// microsoft/microxcaling#4: 957 beside a block maximum of 960. The block's scale is 2^(floor(log2 960) - 8) = 2, 957/2 = 478.5
// lies beyond e4m3's 448 and saturates: 896. tests/lib/format/block_test.cpp has the other formats and ways of scaling.
TEST(Conversions, MxSaturatesBelowTheMaximumOfItsBlock) {
    std::vector<float> block{957, 960};
    round_blocks(block, block.size(), *find_block_format("mxfp8_e4m3"));
    EXPECT_EQ(block, (std::vector<float>{896, 896}));
}

TEST(Conversions, Fp16TieGoesToEven) { EXPECT_EQ(round(1.00048828125, fp16, Rounding::nearest_even), 1.0); }

TEST(Conversions, TowardZeroKeepsTheOrder) {
    // 6.62e35 <= 6.65e35 must stay so, and neither may grow.
    const double small = 6.620178494631905e35, large = 6.6461399789245764e35;
    EXPECT_LE(round(small, bf16, Rounding::toward_zero), round(large, bf16, Rounding::toward_zero));
    EXPECT_LE(round(large, bf16, Rounding::toward_zero), large);
    EXPECT_GT(round(large, bf16, Rounding::toward_zero), large * (1 - 0x1p-7));
}

TEST(Conversions, FmafRoundsOnce) {
    const float got = std::fma(0.9474001f, 4.639901e-7f, -0.24325085f);
    detail::Real exact(judge_bits);
    mpfr_set_d(exact, static_cast<double>(0.9474001f), MPFR_RNDN);
    mpfr_mul_d(exact, exact, static_cast<double>(4.639901e-7f), MPFR_RNDN);
    mpfr_add_d(exact, exact, static_cast<double>(-0.24325085f), MPFR_RNDN);
    EXPECT_EQ(static_cast<double>(got), rounded_mpfr(exact, 24));
    EXPECT_EQ(got, -0x1.f22d46p-3f);
}

TEST(Conversions, StochasticRoundingKeepsPowersOfTwoAndReachesBothSides) {
    for (const Format& format : {bf16, fp16, e5m2}) {
        const double least = std::ldexp(1.0, format.emin - format.precision + 1);
        int zero = 0, up = 0;
        for (std::uint64_t n = 0; n < 200; ++n) {
            const RandomStream stream(21, n);
            std::vector<double> x{1.0, 0.25, 8.0, least / 2};
            round_bulk(std::span(x), format, Rounding::stochastic, stream, 0);
            EXPECT_EQ(x[0], 1.0);
            EXPECT_EQ(x[1], 0.25);
            EXPECT_EQ(x[2], 8.0);
            EXPECT_TRUE(x[3] == 0 || x[3] == least) << x[3];
            zero += x[3] == 0, up += x[3] == least;
        }
        // Fair coins: 200 draws, five standard deviations of 7.1.
        EXPECT_NEAR(zero, 100, 36);
        EXPECT_NEAR(up, 100, 36);
    }
}

}  // namespace
}  // namespace faultline::testing
