// SPDX-License-Identifier: Apache-2.0
// exp and log1p in double-double against MPFR, their accuracy budgets beside the sweeps.
#include <faultline/truth/elementary.hpp>

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/truth/mpfr_real.hpp>

#include "problems.hpp"

namespace faultline::detail {
namespace {

constexpr int judge_bits = 400;

void set(Real& x, DoubleDouble a) {
    mpfr_set_d(x, a.high, MPFR_RNDN);
    mpfr_add_d(x, x, a.low, MPFR_RNDN);
}

/// Largest relative error of exp over the arguments.
double worst_exp(std::vector<double> high, std::vector<double> low) {
    const ExponentRange range;
    while (high.size() % 8 != 0) {
        high.push_back(0);
        low.push_back(0);
    }
    std::vector<double> h(high.size()), l(high.size()), e(high.size());
    exp(high.data(), low.data(), static_cast<std::ptrdiff_t>(high.size()), h.data(), l.data(), e.data());
    Real x(judge_bits), y(judge_bits);
    double worst = 0;
    for (std::size_t j = 0; j < high.size(); ++j) {
        EXPECT_GE(h[j], 0.99);
        EXPECT_LE(h[j], 2.02);
        set(x, {high[j], low[j]});
        mpfr_exp(x, x, MPFR_RNDN);
        set(y, {h[j], l[j]});
        mpfr_mul_2si(y, y, static_cast<long>(e[j]), MPFR_RNDN);
        mpfr_sub(y, y, x, MPFR_RNDN);
        mpfr_div(y, y, x, MPFR_RNDN);
        worst = std::max(worst, std::fabs(mpfr_get_d(y, MPFR_RNDN)));
    }
    return worst;
}

struct ExpSweep {
    double low, high;
    double budget;  // relative error allowed: the proven one
};

TEST(Elementary, ExpWithinItsProvenError) {
    test::Generator g(11);
    for (const ExpSweep& sweep :
         {ExpSweep{-0.01, 0x1p-10, exp_error}, ExpSweep{-1, 0, exp_error}, ExpSweep{-50, 0, exp_error},
          ExpSweep{-1e4, 0, exp_error}, ExpSweep{-1e8, 0, exp_error}, ExpSweep{-0x1p40, 0, exp_error}}) {
        std::vector<double> high, low;
        for (int n = 0; n < 20000; ++n) {
            high.push_back(sweep.low + (sweep.high - sweep.low) * g.uniform());
            low.push_back((g.uniform() - 0.5) * std::ldexp(1.0, std::ilogb(high.back()) - 52));
        }
        const double worst = worst_exp(high, low);
        EXPECT_LE(worst, sweep.budget) << "[" << sweep.low << ", " << sweep.high << "]";
        RecordProperty("worst_" + std::to_string(sweep.low), std::to_string(std::log2(worst)));
    }
}

TEST(Elementary, ExpAtTheSeamsOfItsTable) {
    // halfway between multiples of ln 2 / 64, where the rounding to the nearest multiple may go either way
    const double step = std::log(2.0) / 64;
    std::vector<double> high, low;
    for (int n = -4000; n <= 0; ++n)
        for (int side = -3; side <= 3; ++side) {
            high.push_back((n + 0.5) * step - step * (1 + side * 0x1p-52));
            low.push_back(0);
        }
    for (int e = -1074; e <= -10; ++e) {
        high.push_back(-std::ldexp(1.0, e));
        low.push_back(0);
    }
    EXPECT_LE(worst_exp(high, low), exp_error);
}

TEST(Elementary, ExpOfMaskedAndOfZero) {
    alignas(64) double x[8] = {0, -0.0, -INFINITY, -0x1p41, -3.4e38, 0, 0, 0};
    alignas(64) double zero[8] = {};
    alignas(64) double h[8], l[8], e[8];
    exp(x, zero, 8, h, l, e);
    for (int j : {0, 1}) {
        EXPECT_EQ(h[j], 1.0);
        EXPECT_EQ(l[j], 0.0);
        EXPECT_EQ(e[j], 0.0);
    }
    for (int j : {2, 3, 4}) {
        EXPECT_EQ(h[j], 0.0);
        EXPECT_EQ(e[j], no_exponent);
    }
}

TEST(Elementary, Log1pWithinItsProvenError) {
    test::Generator g(12);
    Real x(judge_bits), y(judge_bits);
    for (int n = 0; n < 40000; ++n) {
        const int exponent = -320 + static_cast<int>(g.uniform() * 360);
        DoubleDouble t = fast_two_sum(std::ldexp(1 + g.uniform(), exponent), 0);
        t.low = (g.uniform() - 0.5) * std::ldexp(1.0, exponent - 52);
        const DoubleDouble r = log1p(t);
        set(x, t);
        mpfr_log1p(x, x, MPFR_RNDN);
        set(y, r);
        mpfr_sub(y, y, x, MPFR_RNDN);
        if (t.high <= log1p_small) mpfr_div(y, y, x, MPFR_RNDN);
        ASSERT_LE(std::fabs(mpfr_get_d(y, MPFR_RNDN)), log1p_error) << t.high;
    }
    EXPECT_EQ(log1p({0, 0}).high, 0.0);
}

}  // namespace
}  // namespace faultline::detail
