// SPDX-License-Identifier: Apache-2.0
// Faults that one multiplication in fp32 makes: which they are, and that it does.
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/injectors/apply.hpp>
#include <faultline/injectors/fault.hpp>
#include <faultline/tensor_kernel/scaling.hpp>

namespace faultline::tensor_kernel {
namespace {

bool scales(const std::string& word, Format format = fp32) {
    return is_scaling(alteration_of(parse_fault(word), {}, format));
}

TEST(Scaling, IsOfFaultsThatAFactorMakes) {
    for (const char* word : {"ds:multiplicative:0.125:hold=nearest", "ds:multiplicative:-0.75:hold=exact",
                             "ds:flip@2:0.5:shape=value:hold=nearest", "ds:random_step:0.25:shape=value:hold=nearest",
                             "ds:multiplicative:0.10000002384185791:hold=nearest", "ds:multiplicative:0:hold=nearest",
                             "ds:multiplicative:1ulp:hold=nearest"})
        EXPECT_TRUE(scales(word)) << word;
    for (const char* word : {"ds:multiplicative:0.125",             // stochastic
                             "ds:multiplicative:0.1:hold=nearest",  // 1.1 is not of fp32
                             "ds:multiplicative:1:hold=nearest",    // 1 - 1 has no sign
                             "ds:multiplicative:0.125:hold=nearest:format=bf16",
                             "ds:random:0.125:shape=value:hold=nearest", "ds:operand:0.125:shape=value:hold=nearest",
                             "ds:fixed:0.125:hold=nearest", "ds:per_column:0.125:shape=value:hold=nearest"})
        EXPECT_FALSE(scales(word)) << word;
    EXPECT_TRUE(scales("dp_accumulate:multiplicative:0.125:hold=nearest", exact));
}

bool scales_bf16(const std::string& word) { return is_scaling_of_bf16(alteration_of(parse_fault(word), {}, bf16)); }

TEST(Scaling, OfBf16IsByFactorsOfSixteenBits) {
    for (const char* word : {"p_cast:multiplicative:0.125:hold=nearest", "p_cast:multiplicative:-0.75:hold=nearest",
                             "p_cast:flip@2:0.02001953125:shape=value:hold=nearest",   // 656 / 2^15
                             "p_cast:multiplicative:0.999969482421875:hold=nearest"})  // 1 - 2^-15, and 2 - 2^-15
        EXPECT_TRUE(scales_bf16(word)) << word;
    for (const char* word : {"p_cast:multiplicative:0.125", "p_cast:multiplicative:0.02:hold=nearest",
                             "p_cast:multiplicative:0.0000152587890625:hold=nearest",  // 2^-16
                             "p_cast:multiplicative:0.125:hold=nearest:format=e4m3",
                             "p_cast:random:0.125:shape=value:hold=nearest", "p_cast:fixed:0.125:hold=nearest"})
        EXPECT_FALSE(scales_bf16(word)) << word;
}

/// Every number of bf16 that a probability can be, against fp32's multiplication and the cast.
TEST(Scaling, ChangesBf16AsTheFaultDoes) {
    for (const double magnitude : {0.125, -0.75, 0x1p-15, -0x1p-15, 656 * 0x1p-15, -1 + 0x1p-15, 1 - 0x1p-15}) {
        Fault fault = parse_fault("p_cast:multiplicative:0.125:hold=nearest");
        fault.magnitude = magnitude;
        ASSERT_TRUE(is_scaling_of_bf16(alteration_of(fault, {}, bf16))) << magnitude;
        const auto factor = static_cast<float>(1 + magnitude);
        std::vector<float> values, scaled;
        for (std::uint32_t upper = 0; upper <= 0x3F80U; ++upper) {  // 0 to 1
            const std::uint32_t bits = upper << 16;
            float x = 0;
            std::memcpy(&x, &bits, sizeof x);
            values.push_back(x);
            scaled.push_back(static_cast<float>(round(x * factor, bf16, Rounding::nearest_even)));
        }
        (void)apply_fault(fault, {}, bf16,
                          MatrixView<float>(values.data(), 1, static_cast<std::ptrdiff_t>(values.size())));
        EXPECT_EQ(std::memcmp(values.data(), scaled.data(), values.size() * sizeof(float)), 0) << magnitude;
    }
}

/// Every third significand, in binades from the subnormal to the largest, against fp32's own multiplication.
TEST(Scaling, ChangesAsTheFaultDoes) {
    for (const double magnitude : {0.125, -0.75, 0x1p-23, -0x1p-23, 0.10000002384185791, -1 + 0x1p-23}) {
        Fault fault = parse_fault("ds:multiplicative:0.125:hold=nearest");
        fault.magnitude = magnitude;
        ASSERT_TRUE(is_scaling(alteration_of(fault, {}, fp32))) << magnitude;
        const auto factor = static_cast<float>(1 + magnitude);
        for (const std::uint32_t exponent : {0U, 1U, 2U, 100U, 127U, 253U}) {
            std::vector<float> values, scaled;
            for (std::uint32_t significand = exponent == 0 ? 1 : 0; significand < 1U << 23; significand += 3) {
                const std::uint32_t bits = exponent << 23 | significand | (significand & 1U) << 31;
                float x = 0;
                std::memcpy(&x, &bits, sizeof x);
                values.push_back(x);
                scaled.push_back(x * factor);
            }
            const auto count = static_cast<std::ptrdiff_t>(values.size());
            (void)apply_fault(fault, {}, fp32, MatrixView<float>(values.data(), 1, count));
            EXPECT_EQ(std::memcmp(values.data(), scaled.data(), values.size() * sizeof(float)), 0)
                << magnitude << ", exponent " << exponent;
        }
    }
}

}  // namespace
}  // namespace faultline::tensor_kernel
