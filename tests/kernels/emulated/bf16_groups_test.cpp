// SPDX-License-Identifier: Apache-2.0
// Groups of eight products of bf16 in integers of 32 bits against the rule of lib/tensor_core, bit for bit.
#include <faultline/emulated/bf16_groups.hpp>

#include <cstdint>
#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include <faultline/tensor_core/fused_add.hpp>

namespace faultline {
namespace {

constexpr MatrixUnit ampere{8, 24, OutputFormat::f32_rz, -126, -126, 0, ZeroOperand::ignored};

float float_of(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
double value_of(std::uint16_t bits) { return static_cast<double>(float_of(std::uint32_t{bits} << 16)); }

/// Exponents of operands and of c, biased, from the first to the last.
struct Range {
    int operands, operand_count, sums, sum_count;
    bool decided;  ///< no sum lies beyond the limits
};

class Bf16Groups : public ::testing::TestWithParam<Range> {};

TEST_P(Bf16Groups, HaveTheRulesBits) {
    const Range range = GetParam();
    std::mt19937_64 random(7);
    const auto any = [&](int first, int count) {
        return static_cast<std::uint32_t>(first) + static_cast<std::uint32_t>(random() % static_cast<unsigned>(count));
    };
    const auto operand = [&] {
        const auto sign = static_cast<std::uint32_t>(random() % 2) << 15;
        if (random() % 16 == 0) return static_cast<std::uint16_t>(sign);
        return static_cast<std::uint16_t>(sign | any(range.operands, range.operand_count) << 7 | any(0, 128));
    };
    constexpr int columns = 4, rows = emulated::groups::rows, terms = emulated::groups::terms;
    int differ = 0, undecided = 0;
    for (int trial = 0; trial < 5000; ++trial) {
        std::uint16_t x[rows][terms], y[terms][columns];
        float c[columns][rows], before[columns][rows];
        for (auto& row : x)
            for (std::uint16_t& v : row) v = operand();
        for (auto& row : y)
            for (std::uint16_t& v : row) v = operand();
        for (auto& column : c)
            for (float& v : column) {
                const auto sign = static_cast<std::uint32_t>(random() % 2) << 31;
                v = random() % 8 == 0 ? 0.0f
                                      : float_of(sign | any(range.sums, range.sum_count) << 23 | any(0, 1 << 23));
            }
        std::memcpy(before, c, sizeof c);
        const std::uint32_t left = emulated::groups::add<columns>(
            c, [&](int e, int i) { return x[e][2 * i] | std::uint32_t{x[e][2 * i + 1]} << 16; },
            [&](int t, int m) { return y[t][2 * m] | std::uint32_t{y[t][2 * m + 1]} << 16; });
        for (int n = 0; n < columns; ++n)
            for (int e = 0; e < rows; ++e) {
                const bool is_left = (left >> (rows * n + e) & 1) != 0;
                undecided += is_left ? 1 : 0;
                const double wanted =
                    is_left ? static_cast<double>(before[n][e])
                            : fused::add(
                                  ampere, [&](int t) { return value_of(x[e][t]); },
                                  [&](int t) { return value_of(y[t][n]); }, terms, static_cast<double>(before[n][e]));
                const auto bits = static_cast<float>(wanted);
                differ += std::memcmp(&bits, &c[n][e], sizeof bits) != 0 ? 1 : 0;
            }
    }
    EXPECT_EQ(differ, 0);
    if (range.decided)
        EXPECT_EQ(undecided, 0);
    else
        EXPECT_GT(undecided, 0);
}

INSTANTIATE_TEST_SUITE_P(Sizes, Bf16Groups,
                         ::testing::Values(Range{124, 5, 120, 16, true},    // near each other
                                           Range{110, 25, 100, 50, true},   // most are cut
                                           Range{90, 57, 90, 60, true},     // most vanish
                                           Range{0, 148, 1, 254, false}));  // subnormals, too, and beyond the limits

TEST(Bf16Groups, TakeOperandsBelowTheirLimit) {
    const std::uint32_t largest = std::uint32_t{127 + 20} << 7 | 0x7F, smallest_beyond = largest + 1;
    for (const std::uint32_t sign : {0u, 0x8000u}) {
        EXPECT_TRUE(emulated::groups::are_operands((largest | sign) << 16 | largest));
        EXPECT_FALSE(emulated::groups::are_operands((smallest_beyond | sign) << 16));
        EXPECT_FALSE(emulated::groups::are_operands(smallest_beyond | sign));
    }
}

}  // namespace
}  // namespace faultline
