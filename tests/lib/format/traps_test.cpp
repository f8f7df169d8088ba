// SPDX-License-Identifier: Apache-2.0
// Single values that went wrong somewhere: in a paper, or in another library's issue tracker.
#include <faultline/format/names.hpp>

#include <gtest/gtest.h>
#include <cmath>

namespace faultline {
namespace {

// arXiv 2510.04212, section 3.3: two bf16 addends of one sign carry, which leaves a tie; a tiny tail of the same sign in
// the fp32 accumulator turns the tie into "above one half", always away from zero.
TEST(Bf16, TieWithTailRoundsAwayFromZero) {
    EXPECT_EQ(-2.40625 + -2.296875, -4.703125);
    EXPECT_EQ(round(-4.703125, bf16), -4.6875);
    EXPECT_EQ(round(-4.703990459442139, bf16), -4.71875);
    EXPECT_EQ(round<bf16>(-4.703125f), -4.6875f);
    EXPECT_EQ(round<bf16>(-4.703990459442139f), -4.71875f);
}

// QPyTorch#24: toward zero from just below 2^119 must not land on 2^119.
TEST(Bf16, TowardZeroNeverGrows) {
    const double below = 6.6461399789245764e35;
    ASSERT_LT(below, 0x1p119);
    EXPECT_EQ(round(below, bf16, Rounding::toward_zero), 6.620178494631905e35);
    EXPECT_EQ(round(below, bf16, Rounding::toward_zero), 0x1.fep118);
    EXPECT_EQ(round(below, bf16), 0x1p119);
}

// QPyTorch#23: 1 + 2^-11 is the tie between 1 and 1 + 2^-10; the even one is 1.
TEST(Fp16, TieGoesToEven) {
    EXPECT_EQ(round(1.00048828125, fp16), 1.0);
    EXPECT_EQ(round(1.00048828125, fp16, Rounding::nearest_away), 1.0009765625);
    EXPECT_EQ(round(std::nextafter(1.00048828125, 2.0), fp16), 1.0009765625);
}

// openlibm#357: a fused multiply-add of floats made of a double sum rounds twice. The sum rounded to odd does not.
TEST(Fp32, FusedMultiplyAddThroughRoundToOdd) {
    const float a = 0.9474001f, b = 4.639901e-7f, c = -0.24325085f;
    EXPECT_EQ(std::fma(a, b, c), -0x1.f22d46p-3f);
    const double product = static_cast<double>(a) * static_cast<double>(b);  // exact: 48 bits
    const double addend = static_cast<double>(c);
    const double sum = product + addend;
    const double back = sum - product;  // two-sum: sum + error is the exact value
    const double error = (product - (sum - back)) + (addend - back);
    ASSERT_NE(error, 0);
    double odd = sum;
    if ((std::bit_cast<std::uint64_t>(sum) & 1) == 0) odd = std::nextafter(sum, error > 0 ? 1.0 : -1.0);
    EXPECT_EQ(round(odd, fp32), -0x1.f22d46p-3);
    EXPECT_EQ(round(sum, fp32), -0x1.f22d44p-3) << "the double rounding that the trap is about";
}

// OCP OFP8 and CPFloat's range: 465 is beyond the midpoint 464 of 448 and the 480 that is not there.
TEST(E4m3, EndsAt448) {
    EXPECT_EQ(round(464, e4m3), 448);
    EXPECT_EQ(round(465, e4m3), 448);
    EXPECT_EQ(round(464, with_saturation(e4m3, false)), 448) << "the tie goes to the even significand, which is finite";
    EXPECT_TRUE(std::isnan(round(465, with_saturation(e4m3, false))));
    EXPECT_EQ(round(1e30, with_saturation(e4m3, false), Rounding::toward_zero), 448);
}

TEST(Fp6AndFp4, NanBecomesPositiveMaximum) {
    EXPECT_EQ(round(-std::nan(""), e3m2), 28);
    EXPECT_EQ(round(std::nan(""), e2m3), 7.5);
    EXPECT_EQ(round(-std::nan(""), e2m1), 6);
    EXPECT_EQ(round<e2m1>(-std::nanf("")), 6);
    EXPECT_EQ(round(-HUGE_VAL, e2m1), -6);
}

TEST(Formats, AreConstantExpressionsAndTemplateArguments) {
    static_assert(round(-4.703990459442139, bf16) == -4.71875);
    static_assert(round<e4m3>(957.0f) == 448.0f);
    static_assert(round<fp16, Rounding::upward>(1e-20f) == 0x1p-24f);
    static_assert(decode(encode(0.3, e2m3), e2m3) == 0.25);
    static_assert(max_finite(e4m3) == 448);
}

}  // namespace
}  // namespace faultline
