// SPDX-License-Identifier: Apache-2.0
// multiply_accumulate against the reference, bit for bit, on shapes that are no multiple of anything.
#include <cfenv>

#include <gtest/gtest.h>

#include <faultline/tensor_core/accumulate.hpp>
#include <faultline/tensor_core/fused_float.hpp>
#include <faultline/tensor_core/reference.hpp>

#include "numbers.hpp"

namespace faultline {
namespace {

using testing::bits;
using testing::Numbers;

constexpr double untouched = -12345.0;

/// A NaN's payload is part of the contract in kind fused alone.
bool same(const Accumulation& accumulation, double x, double y) {
    if (accumulation.kind != Accumulation::Kind::fused && std::isnan(x) && std::isnan(y)) return true;
    return bits(x) == bits(y);
}

void compare(const Accumulation& accumulation, const testing::Shape& shape_a, const testing::Shape& shape_b,
             Numbers& numbers, int style) {
    const int m = numbers.between(1, 9), n = numbers.between(1, 70), k = numbers.between(1, 70);
    const int pad = numbers.between(0, 3);  // strides larger than the rows
    std::vector<double> a(static_cast<std::size_t>(m * (k + pad)), untouched),
        b(static_cast<std::size_t>(k * (n + pad)), untouched);
    std::vector<double> c(static_cast<std::size_t>(m * (n + pad)), untouched);
    const MatrixView<double> va(a.data(), m, k, k + pad), vb(b.data(), k, n, n + pad), vc(c.data(), m, n, n + pad);
    for (int i = 0; i < m; ++i)
        for (int t = 0; t < k; ++t) va(i, t) = numbers.of_style(shape_a, style);
    for (int i = 0; i < m; ++i) {  // zeros that fill whole fused adds, as masked keys and underflowed probabilities do
        if (!numbers.one_in(2)) continue;
        const int first = numbers.between(0, k - 1), last = numbers.between(first, k - 1);
        for (int t = first; t <= last; ++t) va(i, t) = numbers.one_in(2) ? 0.0 : -0.0;
    }
    for (int t = 0; t < k; ++t)
        for (int j = 0; j < n; ++j) vb(t, j) = numbers.of_style(shape_b, numbers.one_in(3) ? 0 : style);
    for (int i = 0; i < m; ++i)
        for (int j = 0; j < n; ++j)
            vc(i, j) = numbers.accumulator(accumulation.unit.output, style, va(i, 0) * vb(0, j));
    std::vector<double> expected = c, by_floats = c;
    reference::multiply_accumulate(accumulation, va, vb, {expected.data(), m, n, n + pad});
    multiply_accumulate(accumulation, va, vb, vc);
    if (accumulation.kind == Accumulation::Kind::fused)  // what a thread of a device computes, element by element
        for (int i = 0; i < m; ++i)
            for (int j = 0; j < n; ++j) {
                double& own = by_floats[static_cast<std::size_t>(i * (n + pad) + j)];
                own = fused::sum_of_products(
                    accumulation.unit, k, own, [&](std::ptrdiff_t t) { return va(i, t); },
                    [&](std::ptrdiff_t t) { return vb(t, j); });
                ASSERT_EQ(bits(own), bits(expected[static_cast<std::size_t>(i * (n + pad) + j)]))
                    << accumulation << " by floats, style " << style << " [" << m << ", " << k << ", " << n << "] at "
                    << i << ", " << j;
            }
    for (std::size_t i = 0; i < c.size(); ++i)
        ASSERT_TRUE(same(accumulation, c[i], expected[i]))
            << accumulation << " style " << style << " [" << m << ", " << k << ", " << n << "] at " << i << ": " << c[i]
            << ", expected " << expected[i];
    ASSERT_EQ(std::fegetround(), FE_TONEAREST);
}

TEST(FastPath, NamedAccumulations) {
    Numbers numbers(11);
    for (const NamedAccumulation& entry : accumulations()) {
        const testing::Shape shape = testing::operand_shape(entry.name);
        for (int trial = 0; trial < 6 * Numbers::style_count; ++trial) {
            compare(entry.accumulation, shape, shape, numbers, trial % Numbers::style_count);
            if (::testing::Test::HasFatalFailure()) return;
        }
    }
}

// Unrounded operands, on one side or on both.
TEST(FastPath, WideOperands) {
    Numbers numbers(12);
    for (const NamedAccumulation& entry : accumulations()) {
        const testing::Shape shape = testing::operand_shape(entry.name);
        for (int trial = 0; trial < 2 * Numbers::style_count; ++trial) {
            compare(entry.accumulation, testing::wide, shape, numbers, trial % Numbers::style_count);
            compare(entry.accumulation, testing::fp32, testing::wide, numbers, trial % Numbers::style_count);
            if (::testing::Test::HasFatalFailure()) return;
        }
    }
}

TEST(FastPath, UnitsNobodyBuilt) {
    Numbers numbers(13);
    for (int trial = 0; trial < 1500; ++trial) {
        const MatrixUnit unit{.terms = numbers.one_in(10) ? 1024 : numbers.between(1, 64),
                              .fraction_bits = numbers.between(1, 40),
                              .output = static_cast<OutputFormat>(numbers.between(0, 2)),
                              .a_min_exponent = numbers.between(-126, 0),
                              .b_min_exponent = numbers.between(-1022, 0),
                              .input_fraction_bits = numbers.between(0, 12),
                              .zero = static_cast<ZeroOperand>(numbers.between(0, 2))};
        const testing::Shape shapes[] = {testing::fp16, testing::bf16, testing::e4m3, testing::wide};
        compare({Accumulation::Kind::fused, unit}, shapes[trial % 4], shapes[numbers.between(0, 3)], numbers,
                trial % Numbers::style_count);
        if (::testing::Test::HasFatalFailure()) return;
    }
}

// Exponents that no low format has, up to the ends of binary64.
TEST(FastPath, ExponentsOfBinary64) {
    Numbers numbers(14);
    const testing::Shape huge{-1022, 1023, 52};
    Accumulation unit = *find_accumulation("hopper-mma-bf16");
    for (int trial = 0; trial < 200; ++trial) {
        unit.unit.a_min_exponent = numbers.one_in(2) ? -126 : -1022;
        compare(unit, huge, trial % 3 == 0 ? testing::bf16 : huge, numbers, 2);
        if (::testing::Test::HasFatalFailure()) return;
    }
}

// Sums as large as they get: sixteen products of just under 4 and c of just under 2 are 66 units of 2^25, past an int32.
// (2 - 2^-7)^2 = 4 - 2^-5 + 2^-14; sixteen of them and 2 - 2^-23: 65.5009765625 - 2^-23, which 23 fraction bits of 2^6
// truncate to a multiple of 2^-17.
TEST(FastPath, LargestSums) {
    for (const double sign : {1.0, -1.0}) {
        const std::vector<double> a(16, sign * (2 - 0x1p-7)), b(16, 2 - 0x1p-7);
        double c = sign * (2 - 0x1p-23);
        multiply_accumulate(*find_accumulation("hopper-mma-bf16"), {a.data(), 1, 16}, {b.data(), 16, 1}, {&c, 1, 1});
        EXPECT_EQ(c, sign * (16 * (4 - 0x1p-5 + 0x1p-14) + 2 - 0x1p-17));
    }
    for (const NamedAccumulation& entry : accumulations()) {
        if (entry.accumulation.kind != Accumulation::Kind::fused) continue;
        const double largest = std::ldexp(2.0, -testing::operand_shape(entry.name).fraction_bits - 1);
        const std::vector<double> a(64, 2 - (testing::operand_shape(entry.name).fraction_bits == 3 ? 0.25 : largest));
        double c = -2 + 0x1p-10, expected = reference::dot(entry.accumulation, a.data(), 1, a.data(), 1, 64, c);
        multiply_accumulate(entry.accumulation, {a.data(), 1, 64}, {a.data(), 64, 1}, {&c, 1, 1});
        EXPECT_EQ(c, expected) << entry.name;
    }
}

// The caller's rounding mode is neither used nor lost.
TEST(FastPath, CallersRoundingModeSurvives) {
    double a = 1.5, b = 2.5, c = 0;
    std::fesetround(FE_UPWARD);
    multiply_accumulate(*find_accumulation("hopper-mma-bf16"), {&a, 1, 1}, {&b, 1, 1}, {&c, 1, 1});
    EXPECT_EQ(std::fegetround(), FE_UPWARD);
    std::fesetround(FE_TONEAREST);
    EXPECT_EQ(c, 3.75);
}

}  // namespace
}  // namespace faultline
