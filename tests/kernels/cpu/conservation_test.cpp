// SPDX-License-Identifier: Apache-2.0
// Laws that attention obeys in exact arithmetic, on the exact plan: at zero tolerance where binary64 keeps them exactly.
#include <gtest/gtest.h>

#include <limits>

#include "heads.hpp"

namespace faultline::testing {
namespace {

constexpr double u = std::numeric_limits<double>::epsilon() / 2;  // unit roundoff of binary64

RoundingPlan exact_plan() { return plan("exact"); }

// Numerator and denominator add the same p in the same order, so their quotient is 1 and not near 1.
TEST(Conservation, OnesInGiveOnesOut) {
    Head head(40, 40, 16, 1);
    for (double& x : head.v.values) x = 1.0;
    const Result result = run(head, exact_plan());
    for (const double o : result.forward.heads[0].o.values) EXPECT_EQ(o, 1.0);
}

// Every operation on V is odd, and rounding to nearest is odd.
TEST(Conservation, SignFlipOfVFlipsO) {
    Head head(33, 33, 16, 2);
    const Matrix o = run(head, exact_plan()).forward.heads[0].o;
    for (double& x : head.v.values) x = -x;
    const Matrix flipped = run(head, exact_plan()).forward.heads[0].o;
    for (std::size_t i = 0; i < o.values.size(); ++i) EXPECT_EQ(o.values[i], -flipped.values[i]);
}

// Truncation is odd too: a matrix unit that truncates toward zero keeps the law bit for bit.
TEST(Conservation, SignFlipOfVFlipsOUnderFlashAttention) {
    Head head(70, 70, 64, 3);
    const Matrix o = run(head, preset("fa2")).forward.heads[0].o;
    for (double& x : head.v.values) x = -x;
    const Matrix flipped = run(head, preset("fa2")).forward.heads[0].o;
    for (std::size_t i = 0; i < o.values.size(); ++i) EXPECT_EQ(o.values[i], -flipped.values[i]);
}

/// Largest p of every row of the forward, and the row sums of ds.
class RowWatch final : public Instrument {
  public:
    explicit RowWatch(std::ptrdiff_t rows) : p_max(static_cast<std::size_t>(rows), 0.0), ds_sum(p_max), ds_abs(p_max) {}
    [[nodiscard]] bool watches(Site site) const override { return site == Site::exp || site == Site::ds_cast; }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double>) override {
        for (std::ptrdiff_t i = 0; i < value.rows; ++i)
            for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
                const auto row = static_cast<std::size_t>(where.query0 + i);
                if (site == Site::exp) p_max[row] = std::max(p_max[row], value(i, j));
                if (site == Site::ds_cast) {
                    ds_sum[row] += value(i, j);
                    ds_abs[row] += std::abs(value(i, j));
                }
            }
    }
    std::vector<double> p_max, ds_sum, ds_abs;
};

// exp(m - m) = exp(0): the winner is exactly 1, untiled, at any logit size.
TEST(Conservation, WinnerIsExactlyOne) {
    for (const double size : {1.0, 100.0, 1e4}) {
        const Head head(24, 24, 16, 4, 1, size);
        RowWatch watch(24);
        run(head, exact_plan(), &watch);
        for (const double p : watch.p_max) EXPECT_EQ(p, 1.0);
    }
}

// sum_j ds_ij = 0: not exact in binary64. Each ds has a relative error of a few u and delta is a sum of n products, so the
// sum is within (n + 8) u of zero, relative to the sum of magnitudes of p |dp| and p |delta|, at most twice sum |p dp|.
TEST(Conservation, ScoreGradientSumsToZero) {
    constexpr std::ptrdiff_t n = 48;
    const Head head(n, n, 16, 5);
    RowWatch watch(n);
    run(head, exact_plan(), &watch);
    for (std::size_t i = 0; i < watch.ds_sum.size(); ++i) {
        const double dp_bound = 16 * 16.0;  // |dp| <= d max|dout| max|v|, both below 4 for these seeds
        EXPECT_LE(std::abs(watch.ds_sum[i]), 2 * (n + 8) * u * dp_bound);
    }
}

// The mechanism of FlashAttention-3's backward: after the cast to bf16 the sum is not zero.
TEST(Conservation, CastBreaksTheZeroSum) {
    constexpr std::ptrdiff_t n = 48;
    const Head head(n, n, 64, 5);
    RowWatch watch(n);
    run(head, preset("fa2"), &watch);
    double broken = 0;
    for (std::size_t i = 1; i < watch.ds_sum.size(); ++i) broken += std::abs(watch.ds_sum[i]) > 1e-5 * watch.ds_abs[i];
    EXPECT_GT(broken, n / 2.0);
}

// A constant added to a row's scores changes nothing: exactly, where the scores are small integers over a power of two.
TEST(Conservation, ShiftOfTheScoresLeavesTheOutput) {
    Head head(20, 20, 16, 6);
    const Matrix before = run(head, exact_plan()).forward.heads[0].o;
    head.bias.emplace_back(20, 20, 32.0);
    const Matrix after = run(head, exact_plan()).forward.heads[0].o;
    // s + 32 is rounded to binary64 once: 2^-48 absolute for |s + 32| < 64, which exp turns into a relative error.
    const double largest_v = 4.0;
    for (std::size_t i = 0; i < before.values.size(); ++i)
        EXPECT_NEAR(before.values[i], after.values[i], 2 * 0x1p-47 * largest_v);
}

}  // namespace
}  // namespace faultline::testing
