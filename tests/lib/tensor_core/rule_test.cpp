// SPDX-License-Identifier: Apache-2.0
// The fused add on cases worked by hand. Each goes through the fast path and through the reference.
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/tensor_core/accumulate.hpp>
#include <faultline/tensor_core/reference.hpp>

#include "numbers.hpp"

namespace faultline {
namespace {

using testing::bits;
constexpr double infinity = std::numeric_limits<double>::infinity();
const double nan = std::numeric_limits<double>::quiet_NaN();

struct Product {
    double a, b;
};

double dot(const Accumulation& accumulation, const std::vector<Product>& products, double c) {
    std::vector<double> a, b;
    for (const Product& p : products) {
        a.push_back(p.a);
        b.push_back(p.b);
    }
    const auto k = static_cast<std::ptrdiff_t>(a.size());
    const double plain = reference::dot(accumulation, a.data(), 1, b.data(), 1, k, c);
    multiply_accumulate(accumulation, {a.data(), 1, k}, {b.data(), k, 1}, {&c, 1, 1});
    EXPECT_EQ(bits(c), bits(plain)) << accumulation;
    return c;
}

double dot(std::string_view unit, const std::vector<Product>& products, double c = 0.0) {
    return dot(find_accumulation(unit).value(), products, c);
}

double two_to(int e) { return std::ldexp(1.0, e); }

// e4m3, 16 * 16 = 2^8 beside one product 2^-e. Largest exponent 8; F = 13 keeps multiples of 2^(8-13) = 2^-5, so 2^-e
// stays for e <= 5 and vanishes after. The output's 13 fraction bits reach 2^-5 too. (DeepGEMM issue 37)
TEST(HopperFp8, TermsBelowThirteenBitsVanish) {
    for (int e = 1; e <= 16; ++e) {
        const double small = e <= 5 ? two_to(-e) : 0.0;
        const int half = e / 2;  // e4m3 reaches down to 2^-9
        EXPECT_EQ(dot("hopper-wgmma-e4m3", {{16, 16}, {two_to(-half), two_to(-(e - half))}}), 256 + small) << e;
    }
}

// The same on Blackwell: F = 25 keeps multiples of 2^-17, and fp32's 23 fraction bits of 2^(8-23) = 2^-15.
TEST(BlackwellFp8, TermsOfThirteenBitsAreKept) {
    for (int e = 1; e <= 16; ++e) {
        const double small = e <= 15 ? two_to(-e) : 0.0;
        const int half = e / 2;  // e4m3 reaches down to 2^-9
        EXPECT_EQ(dot("blackwell-tcgen05-e4m3", {{16, 16}, {two_to(-half), two_to(-(e - half))}}), 256 + small) << e;
    }
}

// 1 - 1 + 2^-e in one fused add: largest exponent 0, so 2^-e is kept while e <= F, whatever the output's width.
void expect_last_kept(std::string_view unit, int last) {
    for (int e = 1; e <= 40; ++e) {
        const double expected = e <= last ? two_to(-e) : 0.0;
        EXPECT_EQ(dot(unit, {{1, 1}, {-1, 1}, {two_to(-e), 1}}), expected) << unit << ' ' << e;
        EXPECT_EQ(dot(unit, {{1, 1}, {two_to(-e), 1}}, -1.0), expected) << unit << ' ' << e;
        EXPECT_EQ(dot(unit, {{1, 1}, {-1, 1}}, two_to(-e)), expected) << unit << ' ' << e;
    }
}
TEST(FractionBits, VoltaKeeps23) {
    // fp16 has no 2^-25: the small term as the product of two.
    for (int e = 2; e <= 28; ++e)
        EXPECT_EQ(dot("volta-mma-fp16", {{1, 1}, {-1, 1}, {two_to(-e / 2), two_to(-(e - e / 2))}}),
                  e <= 23 ? two_to(-e) : 0)
            << e;
}
TEST(FractionBits, AmpereKeeps24) { expect_last_kept("ampere-mma-bf16", 24); }
TEST(FractionBits, HopperKeeps25) { expect_last_kept("hopper-mma-bf16", 25); }
TEST(FractionBits, HopperWgmmaKeeps25) { expect_last_kept("hopper-wgmma-bf16", 25); }

// Ampere's k = 16 is two fused adds of 8: 1 and -1 in different halves do not meet before the first half's result is
// written to fp32. First half: 1 + 2^-24 -> 1 (23 fraction bits); then 1 - 1 = 0. Hopper adds all 16 at once: 2^-24.
TEST(Split, AmpereSplitsKInHalves) {
    std::vector<Product> products(16, {0, 0});
    products[0] = {1, 1};
    products[7] = {two_to(-24), 1};
    products[8] = {-1, 1};
    EXPECT_EQ(dot("ampere-mma-bf16", products), 0.0);
    EXPECT_EQ(dot("hopper-mma-bf16", products), two_to(-24));
}

// Truncation is toward zero, of each term by itself. F = 25: 1 - 2^-26: the small term is cut to 0, so 1 and not 1 - 2^-24,
// which rounding down would give; -1 + 2^-26 gives -1 likewise.
TEST(Truncation, NegativeTermsAreCutTowardZero) {
    EXPECT_EQ(dot("hopper-mma-bf16", {{1, 1}, {-two_to(-26), 1}}), 1.0);
    EXPECT_EQ(dot("hopper-mma-bf16", {{-1, 1}, {two_to(-26), 1}}), -1.0);
    // Sixteen of them would make 2^-22 in exact arithmetic, an ulp-sized loss: all vanish.
    std::vector<Product> products(16, {-two_to(-26), 1});
    EXPECT_EQ(dot("hopper-mma-bf16", products, 1.0), 1.0);
    // 1 - 2^-25 is kept by the adder and cut by the output: 1 - 2^-25 lies between 1 - 2^-24 and 1, toward zero is the
    // former.
    EXPECT_EQ(dot("hopper-mma-bf16", {{1, 1}, {-two_to(-25), 1}}), 1 - two_to(-24));
}

// The product's significand is not renormalised: 1.5 * 1.5 = 2.25 has exponent 0, not 1. With F = 25, 2^-25 beside it is
// kept, as it would not be at exponent 1 (unit 2^-24).
TEST(Alignment, ProductsAreNotRenormalised) {
    EXPECT_EQ(dot("hopper-mma-bf16", {{1.5, 1.5}, {-1.5, 1.5}, {two_to(-25), 1}}), two_to(-25));
    // A single factor 2.25 has exponent 1: lost.
    EXPECT_EQ(dot("hopper-mma-bf16", {{2.25, 1}, {-2.25, 1}, {two_to(-25), 1}}), 0.0);
}

// A subnormal e4m3 operand 2^-9 stands at 2^-6 with significand 1/8: times 2^6 it has exponent 0 (value 2^-3, which a
// normalised product would put at exponent -3). F = 13, unit 2^-13: 2^-14 + 2^-14 beside it are cut to 0; at exponent -3
// the unit would be 2^-16 and they would be kept.
TEST(Alignment, SubnormalsStandAtTheSmallestNormalExponent) {
    const double tiny = two_to(-9);
    EXPECT_EQ(dot("hopper-wgmma-e4m3", {{tiny, 64}, {-tiny, 64}, {two_to(-7), two_to(-7)}}), 0.0);
    EXPECT_EQ(dot("hopper-wgmma-e4m3", {{two_to(-6), 8}, {-two_to(-6), 8}, {two_to(-7), two_to(-7)}}), two_to(-14));
}

// A zero takes no part in the largest exponent: 0 * 2^100 beside 2^-30 leaves 2^-30.
TEST(Alignment, ZeroProductsDoNotRaiseTheExponent) {
    EXPECT_EQ(dot("hopper-mma-bf16", {{0, two_to(100)}, {two_to(-30), 1}}), two_to(-30));
    Accumulation blind = *find_accumulation("hopper-mma-fp16");
    blind.unit.zero = ZeroOperand::at_minimum;  // 0 * 2^15 at exponent -14 + 15 = 1: unit 2^-24
    EXPECT_EQ(dot(blind, {{0, two_to(15)}, {two_to(-12), two_to(-13)}}, 0), 0.0);
    EXPECT_EQ(dot("hopper-mma-fp16", {{0, two_to(15)}, {two_to(-12), two_to(-13)}}), two_to(-25));
}

// Not monotone: a larger accumulator raises the largest exponent and with it the unit, and terms vanish.
// c = 2 - 2^-23 (exponent 0, unit 2^-25): the sixteen terms of 2^-25 make 2^-21, the sum is 2 + 2^-21 - 2^-23, which fp32
// truncates to 2 + 2^-22. c = 2 (exponent 1, unit 2^-24): every term is cut to 0, the result is 2.
TEST(Alignment, ALargerAccumulatorCanGiveASmallerResult) {
    const std::vector<Product> products(16, {two_to(-25), 1});
    EXPECT_EQ(dot("hopper-mma-bf16", products, 2 - two_to(-23)), 2 + two_to(-22));
    EXPECT_EQ(dot("hopper-mma-bf16", products, 2), 2.0);
}

// fp16 output: nearest even. 1 + 2^-11 is a tie, to even 1; 1 + 2^-10 + 2^-11 ties up to 1 + 2^-9; 65504 + 16 = 65520 is
// the tie with 65536 and overflows; 65504 + 15 does not.
TEST(HalfOutput, RoundsToNearestEven) {
    const auto unit = "hopper-mma-fp16-f16acc";
    EXPECT_EQ(dot(unit, {{1, 1}, {two_to(-11), 1}}), 1.0);
    EXPECT_EQ(dot(unit, {{1, 1}, {two_to(-10), 1}, {two_to(-11), 1}}), 1 + two_to(-9));
    EXPECT_EQ(dot(unit, {{1, 1}, {two_to(-11), 1}, {two_to(-12), two_to(-12)}}), 1 + two_to(-10));
    EXPECT_EQ(dot(unit, {{65504, 1}, {16, 1}}), infinity);
    EXPECT_EQ(dot(unit, {{-65504, 1}, {-15, 1}}), -65504.0);
    EXPECT_EQ(dot(unit, {{two_to(-14), two_to(-11)}}), 0.0);                                      // tie at 2^-25
    EXPECT_EQ(dot(unit, {{two_to(-14), two_to(-11)}, {two_to(-14), two_to(-14)}}), two_to(-24));  // above it
}

// e8m13 keeps 13 fraction bits of what C held, even with nothing added (SageAttention2, section 3.3).
TEST(E8m13Output, CutsTheAccumulator) {
    EXPECT_EQ(dot("hopper-wgmma-e4m3", {{0, 0}}, 1 + two_to(-13) + two_to(-14)), 1 + two_to(-13));
    EXPECT_EQ(dot("hopper-wgmma-e4m3", {{0, 0}}, -(1 + two_to(-14))), -1.0);
}

// tf32 reads an fp32 register and drops 13 bits toward zero.
TEST(Tf32, InputsAreTruncated) {
    EXPECT_EQ(dot("hopper-mma-tf32", {{1 + two_to(-10) + two_to(-11), 1}}), 1 + two_to(-10));
    EXPECT_EQ(dot("hopper-mma-tf32", {{-(1 + two_to(-11)), -1}}), 1.0);
    EXPECT_EQ(dot("hopper-mma-tf32", {{two_to(-137), 1}}), 0.0);  // below the last subnormal, 2^-136
}

TEST(Specials, AsTheUnitGivesThem) {
    const std::uint64_t canonical = 0x7FFFFFFFE0000000u;  // 0x7FFFFFFF in fp32
    for (const char* unit : {"hopper-mma-bf16", "hopper-mma-fp16-f16acc", "ampere-mma-tf32"}) {
        EXPECT_EQ(bits(dot(unit, {{nan, 0}})), canonical);
        EXPECT_EQ(bits(dot(unit, {{1, 1}}, -nan)), canonical);
        EXPECT_EQ(bits(dot(unit, {{infinity, 0}})), canonical);
        EXPECT_EQ(bits(dot(unit, {{infinity, 1}, {1, -infinity}})), canonical);
        EXPECT_EQ(bits(dot(unit, {{infinity, 1}}, -infinity)), canonical);
        EXPECT_EQ(dot(unit, {{infinity, -2}, {1, 1}}), -infinity);
        EXPECT_EQ(dot(unit, {{1, 1}}, infinity), infinity);
        EXPECT_EQ(bits(dot(unit, {{-0.0, 1}}, -0.0)), bits(0.0));
    }
    const float back = static_cast<float>(dot("hopper-mma-bf16", {{nan, 1}}));
    std::uint32_t word;
    std::memcpy(&word, &back, sizeof word);
    EXPECT_EQ(word, 0x7FFFFFFFu);
}

// Past fp32's largest number the result is infinite, also in the middle of k; two products of 2^127 that cancel are not.
TEST(Range, OverflowAndUnderflow) {
    const double big = two_to(127);
    EXPECT_EQ(dot("hopper-mma-bf16", {{big, 1}, {big, 1}}), infinity);
    EXPECT_EQ(dot("hopper-mma-bf16", {{big, 2}, {-big, 2}, {1, 1}}), 0.0);
    std::vector<Product> products(17, {0, 0});
    products[0] = products[1] = {big, 1};
    products[16] = {-big, 1};
    EXPECT_EQ(dot("hopper-mma-bf16", products), infinity);
    EXPECT_EQ(dot("hopper-mma-bf16", {{two_to(-100), two_to(-49)}}), two_to(-149));
    EXPECT_EQ(dot("hopper-mma-bf16", {{two_to(-100), two_to(-50)}}), 0.0);
    EXPECT_EQ(dot("hopper-mma-bf16", {{two_to(-100), 1.75 * two_to(-49)}}), two_to(-149));
}

// Facts for every unit: the result changes sign with its terms, does not depend on their order within one fused add, and
// with terms of one sign never exceeds the exact sum and falls short by less than one unit per term and one of the output.
TEST(Facts, SignOrderAndOneSidedError) {
    testing::Numbers numbers(5);
    for (const NamedAccumulation& entry : accumulations()) {
        if (entry.accumulation.kind != Accumulation::Kind::fused) continue;
        const MatrixUnit& unit = entry.accumulation.unit;
        const testing::Shape shape = testing::operand_shape(entry.name);
        for (int trial = 0; trial < 300; ++trial) {
            std::vector<Product> products, flipped, reversed, positive;
            for (int t = 0; t < unit.terms; ++t) {
                const Product p{numbers.normal(shape, -8, 2), numbers.normal(shape, -8, 2)};
                products.push_back(p);
                flipped.push_back({-p.a, p.b});
                reversed.insert(reversed.begin(), p);
                positive.push_back({std::fabs(p.a), std::fabs(p.b)});
            }
            const double c = trial % 3 == 0 ? 0 : numbers.normal(testing::fp16, -8, 4);
            EXPECT_EQ(dot(entry.accumulation, flipped, -c), -dot(entry.accumulation, products, c));
            EXPECT_EQ(dot(entry.accumulation, reversed, c), dot(entry.accumulation, products, c));
            if (unit.output == OutputFormat::f16_rne) continue;

            double exact = std::fabs(c);  // at most 22 + 20 + 6 bits: exact in binary64
            int largest = c == 0 ? -126 : std::ilogb(c);
            for (const Product& p : positive) {
                const auto cut = [&](double x) {
                    return unit.input_fraction_bits == 0
                               ? x
                               : std::ldexp(std::trunc(std::ldexp(x, 10 - std::ilogb(x))), std::ilogb(x) - 10);
                };
                exact += cut(p.a) * cut(p.b);
                largest = std::max(largest, std::ilogb(p.a) + std::ilogb(p.b));
            }
            const double result = dot(entry.accumulation, positive, std::fabs(c));
            const double ulp = two_to(std::ilogb(exact) - (unit.output == OutputFormat::e8m13_rz ? 13 : 23));
            EXPECT_LE(result, exact) << entry.name;
            EXPECT_GT(result, exact - (unit.terms + 1) * two_to(largest - unit.fraction_bits) - ulp) << entry.name;
        }
    }
}

}  // namespace
}  // namespace faultline
