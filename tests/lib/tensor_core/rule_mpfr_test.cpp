// SPDX-License-Identifier: Apache-2.0
// The rule written a second time, in MPFR's words (exact products and sums, truncation by mpfr_trunc, output by mpfr_rint),
// against the reference, for every named unit and for units nobody built.
#include <mpfr.h>

#include <cmath>

#include <gtest/gtest.h>

#include <faultline/tensor_core/reference.hpp>

#include "numbers.hpp"

namespace faultline {
namespace {

using testing::bits;
using testing::Numbers;

// Wide enough for any sum of the products of doubles with exponents in [-126, 127] and 53 bits: all below is exact.
constexpr mpfr_prec_t precision = 1200;

struct Real {
    mpfr_t value;
    Real() { mpfr_init2(value, precision); }
    explicit Real(double x) : Real() { mpfr_set_d(value, x, MPFR_RNDN); }
    ~Real() { mpfr_clear(value); }
    Real(const Real&) = delete;
    Real& operator=(const Real&) = delete;
};

int exponent(double x, int min_exponent) {
    if (x == 0) return min_exponent;
    const Real r(x);
    return std::max(static_cast<int>(mpfr_get_exp(r.value)) - 1, min_exponent);
}

double cut_input(double x, const MatrixUnit& u, int min_exponent) {
    if (u.input_fraction_bits == 0 || std::isinf(x) || x == 0) return x;
    if (std::isnan(x)) {  // the fraction as a number in [0, 1), of which input_fraction_bits are read
        const double payload = std::ldexp(static_cast<double>(bits(x) << 12 >> 12), u.input_fraction_bits - 52);
        return std::floor(payload) > 0 ? x : std::copysign(HUGE_VAL, x);
    }
    Real r(x);
    const int up = u.input_fraction_bits - exponent(x, min_exponent);
    mpfr_mul_2si(r.value, r.value, up, MPFR_RNDN);
    mpfr_trunc(r.value, r.value);
    mpfr_mul_2si(r.value, r.value, -up, MPFR_RNDN);
    return mpfr_get_d(r.value, MPFR_RNDN);
}

double fused_add(const MatrixUnit& u, const std::vector<double>& a_in, const std::vector<double>& b_in, double c) {
    std::vector<double> a, b;
    double special = c;  // finite stays finite: operands are below 2^128, so no product overflows binary64
    for (std::size_t i = 0; i < a_in.size(); ++i) {
        a.push_back(cut_input(a_in[i], u, u.a_min_exponent));
        b.push_back(cut_input(b_in[i], u, u.b_min_exponent));
        special += a[i] * b[i];
    }
    if (std::isnan(special)) return std::numeric_limits<double>::quiet_NaN();
    if (std::isinf(special)) return special;

    const bool half = u.output == OutputFormat::f16_rne;
    int largest = c == 0 ? (half ? -21 : -133) : exponent(c, half ? -14 : -126);
    for (std::size_t i = 0; i < a.size(); ++i) {
        const auto zero_exponent = [&](int min_exponent) {
            return u.zero == ZeroOperand::at_minimum ? min_exponent : -126;
        };
        if (u.zero == ZeroOperand::ignored && (a[i] == 0 || b[i] == 0)) continue;
        const int ea = a[i] == 0 ? zero_exponent(u.a_min_exponent) : exponent(a[i], u.a_min_exponent);
        const int eb = b[i] == 0 ? zero_exponent(u.b_min_exponent) : exponent(b[i], u.b_min_exponent);
        largest = std::max(largest, ea + eb);
    }
    Real sum(0.0), term;
    const auto add = [&](double x, double y) {
        const Real left(x), right(y);
        mpfr_mul(term.value, left.value, right.value, MPFR_RNDN);
        mpfr_mul_2si(term.value, term.value, u.fraction_bits - largest, MPFR_RNDN);
        mpfr_trunc(term.value, term.value);
        mpfr_add(sum.value, sum.value, term.value, MPFR_RNDN);
    };
    add(c, 1.0);
    for (std::size_t i = 0; i < a.size(); ++i) add(a[i], b[i]);
    if (mpfr_zero_p(sum.value)) return 0.0;
    mpfr_mul_2si(sum.value, sum.value, largest - u.fraction_bits, MPFR_RNDN);

    const int keep = half ? 10 : u.output == OutputFormat::e8m13_rz ? 13 : 23;
    const int last = std::max(static_cast<int>(mpfr_get_exp(sum.value)) - 1, half ? -14 : -126) - keep;
    mpfr_mul_2si(sum.value, sum.value, -last, MPFR_RNDN);
    mpfr_rint(sum.value, sum.value, half ? MPFR_RNDN : MPFR_RNDZ);
    mpfr_mul_2si(sum.value, sum.value, last, MPFR_RNDN);
    const double r = mpfr_get_d(sum.value, MPFR_RNDN);
    if (std::fabs(r) >= std::ldexp(1.0, half ? 16 : 128)) return std::copysign(HUGE_VAL, r);
    return r + 0.0;
}

void compare(const MatrixUnit& unit, const testing::Shape& shape, Numbers& numbers, int trials) {
    const Accumulation accumulation{Accumulation::Kind::fused, unit};
    for (int trial = 0; trial < trials; ++trial) {
        const int style = trial % Numbers::style_count;
        const int count = numbers.one_in(4) ? numbers.between(1, unit.terms) : unit.terms;
        std::vector<double> a, b;
        for (int i = 0; i < count; ++i) {
            a.push_back(numbers.of_style(shape, style));
            b.push_back(numbers.of_style(shape, numbers.one_in(2) ? style : 0));
        }
        // One trial in three cancels: the second half undoes the first but for the last product.
        if (numbers.one_in(3))
            for (int i = count / 2; i + 1 < count; ++i) {
                a[static_cast<std::size_t>(i)] = -a[static_cast<std::size_t>(i - count / 2)];
                b[static_cast<std::size_t>(i)] = b[static_cast<std::size_t>(i - count / 2)];
            }
        const double c = numbers.accumulator(unit.output, style, a[0] * b[0]);
        const double judge = fused_add(unit, a, b, c);
        const double got = reference::dot(accumulation, a.data(), 1, b.data(), 1, count, c);
        if (std::isnan(judge))
            ASSERT_TRUE(std::isnan(got)) << accumulation;
        else
            ASSERT_EQ(bits(got), bits(judge)) << accumulation << " style " << style << ": " << got << " " << judge;
    }
}

TEST(RuleAgainstMpfr, NamedUnits) {
    Numbers numbers(1);
    for (const NamedAccumulation& entry : accumulations()) {
        if (entry.accumulation.kind != Accumulation::Kind::fused) continue;
        MatrixUnit unit = entry.accumulation.unit;
        compare(unit, testing::operand_shape(entry.name), numbers, 700);
        compare(unit, testing::wide, numbers, 200);
        compare(unit, testing::fp32, numbers, 200);
    }
}

TEST(RuleAgainstMpfr, UnitsNobodyBuilt) {
    Numbers numbers(2);
    for (int trial = 0; trial < 300; ++trial) {
        const MatrixUnit unit{.terms = numbers.between(1, 40),
                              .fraction_bits = numbers.between(1, 40),
                              .output = static_cast<OutputFormat>(numbers.between(0, 2)),
                              .a_min_exponent = numbers.between(-126, 0),
                              .b_min_exponent = numbers.between(-126, 0),
                              .input_fraction_bits = numbers.between(0, 12),
                              .zero = static_cast<ZeroOperand>(numbers.between(0, 2))};
        compare(unit, trial % 2 == 0 ? testing::bf16 : testing::wide, numbers, 60);
    }
}

}  // namespace
}  // namespace faultline
