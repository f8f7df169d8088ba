// SPDX-License-Identifier: Apache-2.0
// Block-scaled formats against values worked by hand from OCP MX 1.0 and arXiv 2509.25149.
#include <faultline/format/block.hpp>

#include <gtest/gtest.h>
#include <cmath>
#include <limits>

namespace faultline {
namespace {

std::vector<float> rounded(std::vector<float> values, BlockFormat f) {
    round_blocks(values, values.size(), f);
    return values;
}

// microxcaling#4. Block maximum 960: floor(log2 960) = 9.
//   e4m3: scale 2^(9-8) = 2, 957/2 = 478.5 saturates at 448 -> 896, and 960 -> 896 too.
//   e5m2: scale 2^(9-15), 957*64 = 61248, spacing 8192: 57344 -> 896 (as it happens the largest).
//   e3m2: scale 2^(9-4) = 32, 29.9 saturates at 28 -> 896.
//   e2m3: scale 2^(9-2) = 128, 7.477 -> 7.5 -> 960. e2m1: 7.477 saturates at 6 -> 768.
TEST(Mx, BlockMaximum960) {
    EXPECT_EQ(rounded({957, 960}, mxfp8_e4m3), (std::vector<float>{896, 896}));
    EXPECT_EQ(rounded({957, 960}, mxfp8_e5m2), (std::vector<float>{896, 896}));
    EXPECT_EQ(rounded({957, 960}, mxfp6_e3m2), (std::vector<float>{896, 896}));
    EXPECT_EQ(rounded({957, 960}, mxfp6_e2m3), (std::vector<float>{960, 960}));
    EXPECT_EQ(rounded({957, 960}, mxfp4), (std::vector<float>{768, 768}));
    // Round-up, e4m3: 960/448 > 2, so scale 4; 957/4 = 239.25, spacing 16 -> 240 -> 960.
    EXPECT_EQ(rounded({957, 960}, with_rule(mxfp8_e4m3, ScaleRule::round_up)), (std::vector<float>{960, 960}));
}

TEST(Mx, ScaleExponents) {
    EXPECT_EQ(e8m0_scale(1, e4m3, ScaleRule::floor), 127 - 8);
    EXPECT_EQ(e8m0_scale(1.999, e2m1, ScaleRule::floor), 127 - 2);
    EXPECT_EQ(e8m0_scale(448, e4m3, ScaleRule::round_up), 127);
    EXPECT_EQ(e8m0_scale(std::nextafter(448.0, 1e9), e4m3, ScaleRule::round_up), 128);
    EXPECT_EQ(e8m0_scale(0, e4m3, ScaleRule::floor), 0);
    EXPECT_EQ(e8m0_scale(1e-45, e4m3, ScaleRule::floor), 0) << "clamped at 2^-127";
    EXPECT_EQ(e8m0_scale(0x1.fffffep127, e2m1, ScaleRule::round_up), 127 + 126);
    EXPECT_EQ(e8m0_scale(std::numeric_limits<double>::infinity(), e4m3, ScaleRule::floor), 255);
    EXPECT_EQ(e8m0_scale(std::nan(""), e4m3, ScaleRule::floor), 255);
    EXPECT_EQ(decode_e8m0(127), 1);
    EXPECT_EQ(decode_e8m0(0), 0x1p-127);
    EXPECT_EQ(decode_e8m0(254), 0x1p127);
    EXPECT_TRUE(std::isnan(decode_e8m0(255)));
}

TEST(Mx, BlocksDoNotCrossRows) {
    // Two rows of 40: blocks of 32 and 8. The large value in the first row's tail does not touch the second row.
    std::vector<float> values(80, 1);
    values[39] = 1024;
    const QuantisedRows rows = quantise(values, 40, mxfp4);
    ASSERT_EQ(rows.scales.size(), 4u);
    EXPECT_EQ(rows.scales[0], 127 - 2);
    EXPECT_EQ(rows.scales[1], 127 + 10 - 2);
    EXPECT_EQ(rows.scales[2], 127 - 2);
    EXPECT_EQ(rows.scales[3], 127 - 2);
    const std::vector<float> back = dequantise(rows);
    EXPECT_EQ(back[0], 1);
    EXPECT_EQ(back[38], 0) << "1/256 of the scale";
    EXPECT_EQ(back[39], 1024);
    EXPECT_EQ(back[40], 1);
}

TEST(Mx, SpecialBlocks) {
    const float inf = std::numeric_limits<float>::infinity();
    for (const auto& [label, f] : all_block_formats()) {
        const std::vector<float> zeros = rounded({0.0f, -0.0f, 0.0f}, f);
        EXPECT_EQ(zeros, (std::vector<float>{0, 0, 0})) << label;
        EXPECT_TRUE(std::signbit(zeros[1])) << label;
        std::vector<float> two_blocks(static_cast<std::size_t>(2 * f.block_size), 1.0f);
        for (const float bad : {inf, -inf, std::nanf("")}) {
            two_blocks[3] = bad;
            const std::vector<float> out = rounded(two_blocks, f);
            for (std::size_t i = 0; i < out.size(); ++i) {
                EXPECT_EQ(std::isnan(out[i]), i < static_cast<std::size_t>(f.block_size)) << label << " " << i;
            }
            EXPECT_EQ(out.back(), 1) << label;
        }
    }
}

TEST(Mx, SmallestBlocksClampTheScale) {
    // amax = 2^-149: the scale cannot go below 2^-127, the element is 2^-22 of it, below e4m3's 2^-9: zero.
    EXPECT_EQ(rounded({0x1p-149f}, mxfp8_e4m3), (std::vector<float>{0}));
    EXPECT_EQ(rounded({0x1p-136f}, mxfp8_e4m3), (std::vector<float>{0x1p-136f})) << "2^-9 * 2^-127";
    EXPECT_EQ(rounded({0x1.fffffep127f}, mxfp8_e4m3), (std::vector<float>{0x1.cp127f})) << "448 * 2^119";
}

/// Multiples of a power of two that every element format holds come back unchanged (not in nvfp4, whose scale of the
/// tensor, amax/2688, is no power of two).
TEST(Mx, RepresentableValuesReturn) {
    for (const auto& [label, f] : all_block_formats()) {
        if (f.scale != ScaleKind::e8m0) continue;
        for (int k = -100; k <= 100; k += 25) {
            std::vector<float> values;
            for (const float v : {0.5f, 1.0f, -1.5f, 2.0f, 3.0f, -4.0f, 6.0f, 0.0f}) {
                values.push_back(std::ldexp(v, k));
            }
            EXPECT_EQ(rounded(values, f), values) << label << " 2^" << k;
        }
    }
}

TEST(Mx, RoundUpNeverSaturatesAndIsTheSmallestSuchScale) {
    const RandomStream stream(3);
    for (const Format element : {e5m2, e4m3, e3m2, e2m3, e2m1}) {
        for (std::uint64_t i = 0; i < 10'000; ++i) {
            const double amax = std::exp2(200 * stream.uniform(i) - 100);
            const double scale = decode_e8m0(e8m0_scale(amax, element, ScaleRule::round_up));
            ASSERT_LE(amax / scale, max_finite(element)) << amax;
            ASSERT_GT(amax / (scale / 2), max_finite(element)) << amax;
        }
    }
}

// arXiv 2509.25149: tensor scale amax/(448*6); block scale e4m3(amax_block / 6 / tensor scale); element e2m1.
TEST(Nvfp4, WorkedByHand) {
    std::vector<float> values(32, 0);
    values[0] = 2688;  // 448 * 6: tensor scale 1, block scale 448
    values[1] = 224;   // 224/448 = 0.5
    values[2] = -672;  // -1.5
    values[3] = 100;   // 0.2232 -> 0
    values[16] = 7;    // second block: 7/6 = 1.1667, e4m3 spacing 1/8 -> 1.125; 7/1.125 = 6.22 -> 6 -> 6.75
    values[17] = 2;    // 2/1.125 = 1.78 -> 2 -> 2.25
    const QuantisedRows rows = quantise(values, 32, nvfp4);
    EXPECT_EQ(rows.tensor_scale, 1);
    ASSERT_EQ(rows.scales.size(), 2u);
    EXPECT_EQ(decode(rows.scales[0], e4m3), 448);
    EXPECT_EQ(decode(rows.scales[1], e4m3), 1.125);
    const std::vector<float> back = dequantise(rows);
    EXPECT_EQ(back[0], 2688);
    EXPECT_EQ(back[1], 224);
    EXPECT_EQ(back[2], -672);
    EXPECT_EQ(back[3], 0);
    EXPECT_EQ(back[16], 6.75f);
    EXPECT_EQ(back[17], 2.25f);
}

TEST(Nvfp4, BlockTooSmallForItsScaleBecomesZeros) {
    std::vector<float> values(32, 1);
    for (std::size_t i = 16; i < 32; ++i) values[i] = -1e-8f;  // scale below half of e4m3's 2^-9
    const std::vector<float> back = rounded(values, nvfp4);
    EXPECT_EQ(back[0], 1);
    for (std::size_t i = 16; i < 32; ++i) {
        EXPECT_EQ(back[i], 0);
        EXPECT_TRUE(std::signbit(back[i]));
    }
}

TEST(BlockFormats, NamesReadBack) {
    EXPECT_EQ(all_block_formats().size(), 6u);
    for (const auto& [label, f] : all_block_formats()) EXPECT_EQ(find_block_format(label), f);
    EXPECT_FALSE(find_block_format("mxfp5"));
}

TEST(BlockFormats, StochasticElementsHaveTheRightMean) {
    // One block of 6 (which sets the scale 1 of mxfp4) and values 1.2 between 1 and 1.5.
    constexpr std::size_t blocks = 4096;
    std::vector<float> values(32 * blocks, 1.2f);
    for (std::size_t b = 0; b < blocks; ++b) values[32 * b] = 6;
    round_blocks(values, 32, mxfp4, Rounding::stochastic, RandomStream(5));
    double sum = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (i % 32 != 0) sum += static_cast<double>(values[i]);
    }
    constexpr double n = 31.0 * blocks;
    constexpr double sigmas = 5;  // deterministic stream, see tests/lib/random
    EXPECT_NEAR(sum / n, static_cast<double>(1.2f), sigmas * 0.5 * std::sqrt(0.4 * 0.6 / n));
}

TEST(BlockFormats, RefuseRaggedRows) {
    std::vector<float> values(10);
    EXPECT_THROW((void)quantise(values, 3, mxfp4), std::invalid_argument);
    EXPECT_THROW((void)quantise(values, 0, mxfp4), std::invalid_argument);
}

}  // namespace
}  // namespace faultline
