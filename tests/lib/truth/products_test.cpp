// SPDX-License-Identifier: Apache-2.0
// Sums of products against MPFR: the proven bound of lemma 1 and the exactness of lemma 2, on FLINT's three generators.
#include <faultline/truth/products.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/truth/aligned.hpp>
#include <faultline/truth/double_double.hpp>
#include <faultline/truth/mpfr_real.hpp>

#include "problems.hpp"

namespace faultline::detail {
namespace {

constexpr int judge_bits = 600;
constexpr std::ptrdiff_t width = 16;

struct Sums {
    AlignedVector a_high, a_low, b;  // [count], [count], [count, width]
    double sigma_power = 0;          // 2^e, at least four times each sum of |products|
};

enum class Kind { independent, exact_cancellation, near_cancellation };

Sums generate(Kind kind, std::ptrdiff_t count, int significand, int exponents, test::Generator& g) {
    Sums s;
    const auto number = [&] {
        return test::keep_bits(std::ldexp(g.normal(), -static_cast<int>(g.uniform() * exponents)), significand);
    };
    const std::ptrdiff_t half = count / 2;
    for (std::ptrdiff_t k = 0; k < count; ++k) {
        const bool repeats = kind != Kind::independent && k >= half && k - half < half;
        s.a_high.push_back(repeats ? s.a_high[static_cast<std::size_t>(k - half)] : number());
        const double low = (g.uniform() - 0.5) * std::ldexp(1.0, std::ilogb(s.a_high.back()) - 52);
        s.a_low.push_back(repeats ? s.a_low[static_cast<std::size_t>(k - half)] : low);
        for (std::ptrdiff_t j = 0; j < width; ++j) {
            double x = number();
            if (repeats) {
                x = -s.b[static_cast<std::size_t>((k - half) * width + j)];
                if (kind == Kind::near_cancellation) x = test::keep_bits(x, 1 + static_cast<int>(g.bits() % 53));
            }
            s.b.push_back(x);
        }
    }
    double largest = 0;
    for (std::ptrdiff_t j = 0; j < width; ++j) {
        double sum = 0;
        for (std::ptrdiff_t k = 0; k < count; ++k)
            sum += std::fabs(s.a_high[static_cast<std::size_t>(k)] * s.b[static_cast<std::size_t>(k * width + j)]);
        largest = std::max(largest, sum);
    }
    s.sigma_power = std::ldexp(1.0, std::ilogb(largest * 1.001) + 3);
    return s;
}

/// Largest error over 2^e; with_low: factors a_high + a_low.
double worst_error(const Sums& s, std::ptrdiff_t count, bool with_low) {
    AlignedVector sigma(width, 1.5 * s.sigma_power), acc(sigma), low(width, 0.0);
    if (with_low)
        accumulate(s.a_high.data(), s.a_low.data(), count, s.b.data(), width, width, acc.data(), low.data());
    else
        accumulate(s.a_high.data(), count, s.b.data(), width, width, acc.data(), low.data());
    finish(sigma.data(), width, acc.data(), low.data(), acc.data(), low.data());
    Real sum(judge_bits), t(judge_bits);
    double worst = 0;
    for (std::ptrdiff_t j = 0; j < width; ++j) {
        const auto at = static_cast<std::size_t>(j);
        EXPECT_EQ(acc[at] + low[at], acc[at]) << "not normalised";
        mpfr_set_zero(sum, 1);
        for (std::ptrdiff_t k = 0; k < count; ++k) {
            mpfr_set_d(t, s.a_high[static_cast<std::size_t>(k)], MPFR_RNDN);
            if (with_low) mpfr_add_d(t, t, s.a_low[static_cast<std::size_t>(k)], MPFR_RNDN);
            mpfr_mul_d(t, t, s.b[static_cast<std::size_t>(k * width + j)], MPFR_RNDN);
            mpfr_add(sum, sum, t, MPFR_RNDN);
        }
        mpfr_sub_d(sum, sum, acc[at], MPFR_RNDN);
        mpfr_sub_d(sum, sum, low[at], MPFR_RNDN);
        mpfr_div_d(sum, sum, s.sigma_power, MPFR_RNDN);
        worst = std::max(worst, std::fabs(mpfr_get_d(sum, MPFR_RNDA)));
    }
    return worst;
}

TEST(Products, ErrorWithinLemmaOne) {
    test::Generator g(61);
    for (const Kind kind : {Kind::independent, Kind::exact_cancellation, Kind::near_cancellation})
        for (const std::ptrdiff_t count : {1, 2, 3, 4, 7, 64, 130, 1000})
            for (const int exponents : {0, 20, 60, 150})
                for (int repeat = 0; repeat < 20; ++repeat) {
                    const Sums s = generate(kind, count, test::double_bits, exponents, g);
                    EXPECT_LE(worst_error(s, count, false), accumulation_error(count)) << count;
                    EXPECT_LE(worst_error(s, count, true), accumulation_error(count)) << count;
                }
}

TEST(Products, ShortSignificandsAreExactAsLemmaTwoSays) {
    test::Generator g(62);
    // Bits of a product of b-bit numbers spread over w binades, the sum of their magnitudes, and the slack of sigma:
    // 2 b + 2 w + 2 log2(count) + 4 <= 106.
    struct Case {
        int significand, exponents;
    };
    for (const Case c : {Case{test::bf16_bits, 30}, Case{test::fp16_bits, 25}, Case{test::fp32_bits, 10}})
        for (const Kind kind : {Kind::independent, Kind::exact_cancellation})
            for (int repeat = 0; repeat < 100; ++repeat) {
                const Sums s = generate(kind, 128, c.significand, c.exponents, g);
                EXPECT_EQ(worst_error(s, 128, false), 0.0);
            }
}

TEST(DoubleDouble, OperationsWithinTheirTheorems) {
    test::Generator g(63);
    Real x(judge_bits), y(judge_bits), r(judge_bits);
    const auto random = [&] {
        const double high = std::ldexp(g.normal(), static_cast<int>(g.uniform() * 60) - 30);
        return fast_two_sum(high, (g.uniform() - 0.5) * std::ldexp(1.0, std::ilogb(high) - 52));
    };
    const auto set = [](Real& to, DoubleDouble a) {
        mpfr_set_d(to, a.high, MPFR_RNDN);
        mpfr_add_d(to, to, a.low, MPFR_RNDN);
    };
    const auto error = [&](DoubleDouble result) {  // relative, of result against r
        if (mpfr_zero_p(static_cast<mpfr_srcptr>(r))) return result.high == 0 ? 0.0 : INFINITY;
        set(x, result);
        mpfr_sub(x, x, r, MPFR_RNDN);
        mpfr_div(x, x, r, MPFR_RNDN);
        return std::fabs(mpfr_get_d(x, MPFR_RNDA));
    };
    for (int n = 0; n < 100000; ++n) {
        const DoubleDouble a = random();
        DoubleDouble b = random();
        if (n % 4 == 1) b = {-a.high, b.low * 0x1p-60};         // cancellation of the high parts
        if (n % 4 == 2) b = {-a.high * (1 + 0x1p-50), -a.low};  // and nearly
        b = fast_two_sum(b.high, b.low);
        set(x, a);
        set(y, b);
        mpfr_add(r, x, y, MPFR_RNDN);
        ASSERT_LE(error(a + b), add_error);
        set(x, a);
        mpfr_mul(r, x, y, MPFR_RNDN);
        ASSERT_LE(error(a * b), mul_error);
        set(x, a);
        mpfr_mul_d(r, x, b.high, MPFR_RNDN);
        ASSERT_LE(error(a * b.high), mul_double_error);
        set(x, a);
        mpfr_div(r, x, y, MPFR_RNDN);
        ASSERT_LE(error(a / b), div_error);
    }
}

}  // namespace
}  // namespace faultline::detail
