// SPDX-License-Identifier: Apache-2.0
// Conservation laws, saturation and output errors of a head, against worked values, differences and the certified truth.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include <faultline/plan/presets.hpp>
#include <faultline/probes/conservation.hpp>
#include <faultline/probes/output_error.hpp>
#include <faultline/probes/plan_conservation.hpp>
#include <faultline/probes/saturation.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();
// A sum of n_k <= 32 terms in binary64 over the sum of their magnitudes.
constexpr double sum_rounding = 32 * 0x1p-52;

Matrix gaussian(std::ptrdiff_t rows, std::ptrdiff_t cols, std::uint64_t seed, double size = 1) {
    const RandomStream stream(seed);
    Matrix m(rows, cols);
    for (std::size_t i = 0; i < m.values.size(); ++i) m.values[i] = round(size * stream.normal(i), bf16);
    return m;
}

struct Head {
    Matrix q, k, v, dout;
    HeadInputs in;
    Head(std::ptrdiff_t n, std::ptrdiff_t d, double size)
        : q(gaussian(n, d, 1, size)), k(gaussian(n, d, 2)), v(gaussian(n, d, 3)), dout(gaussian(n, d, 4)) {
        in = {q.view(), k.view(), v.view(), dout.view(), {}, 1 / std::sqrt(static_cast<double>(d)), true, 0, {}};
    }
};

TEST(Conservation, HoldsInBinary64) {
    const Head head(24, 8, 3);
    const ScoreGradient g = score_gradient(head.in);
    const Conservation c = conservation(g);
    for (std::size_t i = 0; i < 24; ++i) {
        EXPECT_NEAR(c.p_sum[i], 1, sum_rounding);
        EXPECT_LE(std::abs(c.gradient_sum[i]), sum_rounding * c.gradient_abs[i]) << i;
    }
    EXPECT_TRUE(c.before_softcap.empty());
    const std::vector<double> delta = delta_of_scores(g);
    for (std::size_t i = 0; i < 24; ++i) EXPECT_NEAR(delta[i], g.delta[i], 1e-13);
}

// A row whose winner has all but 1e-13 of the weight: its gradient is some 1e-13, below the rounding of delta itself. The
// certified truth judges.
TEST(Conservation, SmallGradientsOfSaturatedRowsAreKept) {
    const Head head(24, 8, 30);
    const ScoreGradient g = score_gradient(head.in);
    TruthProblem problem;
    problem.q = {head.q.view()};
    problem.dout = {head.dout.view()};
    problem.k = head.k.view();
    problem.v = head.v.view();
    problem.causal = true;
    const GroupTruth truth = attention_truth(problem, {.keep_matrices = true});
    // s, up to some 100 and a sum of 8 products, is off by 100 8 2^-53 < 2^-43 at most, and so is p, relative; dp as a sum of 8
    // by 2^-50 of its terms. A key's error is that of p (|dp| + |dp_w|); the winner's, whose dp - dp_w is 0, that of the others.
    constexpr double relative = 0x1p-42;
    double smallest = infinity;
    for (std::ptrdiff_t i = 0; i < 24; ++i) {
        const HeadTruth& exactly = truth.heads[0];
        std::ptrdiff_t winner = 0;
        for (std::ptrdiff_t j = 1; j <= i; ++j)
            if (g.p(i, j) > g.p(i, winner)) winner = j;
        double others = 0, top = 0;
        const auto size = [&](std::ptrdiff_t j) {
            return exactly.p(i, j) * (std::abs(exactly.dp(i, j)) + std::abs(exactly.dp(i, winner)));
        };
        for (std::ptrdiff_t j = 0; j <= i; ++j) others += j == winner ? 0 : size(j);
        for (std::ptrdiff_t j = 0; j <= i; ++j) {
            EXPECT_NEAR(g.ds(i, j), exactly.ds(i, j), relative * (j == winner ? others : size(j))) << i << " " << j;
            top = std::max(top, std::abs(exactly.ds(i, j)));
        }
        if (i > 0) smallest = std::min(smallest, top);
    }
    EXPECT_LT(smallest, 1e-10);  // there was such a row
}

// r_i = delta_true - delta_given where p sums to 1.
TEST(Conservation, AWrongDeltaShowsAsTheSum) {
    const Head head(16, 8, 2);
    const ScoreGradient plain = score_gradient(head.in);
    std::vector<double> biased = plain.delta;
    for (double& d : biased) d += 0.25;
    const Conservation c = conservation(score_gradient(head.in, {}, biased));
    for (const double r : c.gradient_sum) EXPECT_NEAR(r, -0.25, 1e-13);
    EXPECT_NEAR(running_sum(c.gradient_sum).back(), -0.25 * 16, 1e-12);
    // lse off by log 2: every p halved.
    std::vector<double> lse = plain.lse;
    for (double& l : lse) l += std::log(2);
    for (const double p : conservation(score_gradient(head.in, lse)).p_sum) EXPECT_NEAR(p, 0.5, 1e-13);
}

TEST(Conservation, TheSinkColumnBelongsToTheSum) {
    Head head(16, 8, 2);
    head.in.sink = 1.5;
    const ScoreGradient g = score_gradient(head.in);
    const Conservation c = conservation(g);
    double keys_alone = 0;
    for (std::size_t i = 0; i < 16; ++i) {
        EXPECT_NEAR(c.p_sum[i], 1, sum_rounding);
        EXPECT_LE(std::abs(c.gradient_sum[i]), sum_rounding * c.gradient_abs[i]);
        double keys = 0;
        for (std::ptrdiff_t j = 0; j < 16; ++j) keys += g.ds(static_cast<std::ptrdiff_t>(i), j);
        keys_alone = std::max(keys_alone, std::abs(keys));
        EXPECT_GT(g.p_sink[i], 0);
    }
    EXPECT_GT(keys_alone, 1e-3);  // without the sink it is no law
}

// The law holds at the capped scores and not before the cap; the gradient before it is that of a difference quotient.
TEST(Conservation, SoftcapHasItsRightTensor) {
    Head head(6, 4, 20);
    head.in.softcap = 5;
    const ScoreGradient g = score_gradient(head.in);
    const Conservation c = conservation(g, head.in.softcap);
    double before = 0;
    for (std::size_t i = 0; i < 6; ++i) {
        EXPECT_LE(std::abs(c.gradient_sum[i]), 4 * sum_rounding * c.gradient_abs[i]);
        before = std::max(before, std::abs(c.before_softcap[i]));
        for (std::ptrdiff_t j = 0; j < 6; ++j) EXPECT_LE(g.s(static_cast<std::ptrdiff_t>(i), j), 5);
    }
    EXPECT_GT(before, 1e-3);
    // d loss / d(all scores before the cap of the last row, moved together), central difference.
    const auto loss = [&](double by) {
        double sum = 0, out = 0;
        for (std::ptrdiff_t j = 0; j < 6; ++j) {
            double z = 0, dp = 0;
            for (std::ptrdiff_t d = 0; d < 4; ++d) {
                z += head.q(5, d) * head.k(j, d) * head.in.scale;
                dp += head.dout(5, d) * head.v(j, d);
            }
            const double e = std::exp(5 * std::tanh((z + by) / 5));
            sum += e;
            out += e * dp;
        }
        return out / sum;
    };
    constexpr double h = 1e-5;
    EXPECT_NEAR(c.before_softcap[5], (loss(h) - loss(-h)) / (2 * h), 1e-8);
}

TEST(Conservation, MasksAndDegenerateHeads) {
    Head head(4, 4, 1);
    Matrix bias(4, 4);
    for (std::ptrdiff_t j = 0; j < 4; ++j) bias(2, j) = -infinity;  // a row that sees nothing
    head.in.bias = bias.view();
    const ScoreGradient g = score_gradient(head.in);
    const Conservation c = conservation(g, 0);
    EXPECT_EQ(c.p_sum[2], 0);
    EXPECT_EQ(c.gradient_sum[2], 0);
    EXPECT_EQ(saturation(g)[2].p_max, 0);

    Head one(1, 4, 1);  // one row, one key
    const Conservation single = conservation(score_gradient(one.in));
    EXPECT_EQ(single.p_sum[0], 1);
    EXPECT_EQ(single.gradient_sum[0], 0);

    HeadInputs empty;
    EXPECT_TRUE(conservation(score_gradient(empty)).p_sum.empty());
    EXPECT_TRUE(running_sum({}).empty());

    Head bad(4, 4, 1);
    bad.q(1, 0) = nan_value;
    const Conservation holes = conservation(score_gradient(bad.in));
    EXPECT_TRUE(std::isnan(holes.p_sum[1]) && std::isnan(holes.gradient_sum[1]));
    EXPECT_NEAR(holes.p_sum[0], 1, sum_rounding);
    EXPECT_NEAR(holes.p_sum[3], 1, sum_rounding);
}

// Of one key r is |x|/|x|; 3 of 4 and 0 of nothing count.
TEST(Conservation, RelativeSumsAreOfRowsWithTwoKeys) {
    const std::vector<double> sum{1e-9, 3, 0}, magnitude{1e-9, 4, 0}, keys{1, 2, 3};
    std::vector<double> relative;
    for (std::size_t i = 0; i < 3; ++i) relative.push_back(relative_row_sum(sum[i], magnitude[i]));
    EXPECT_EQ(relative, (std::vector<double>{1, 0.75, 0}));
    EXPECT_EQ(relative_row_sum_rms(relative, keys), 0.75 / std::sqrt(2.0));
    EXPECT_TRUE(std::isnan(relative_row_sum_rms({relative.data(), 1}, keys)));
    relative[2] = nan_value;
    EXPECT_TRUE(std::isnan(relative_row_sum_rms(relative, keys)));
}

// The slope of the cap is that of the score before the bias: adding a constant to a row's bias changes nothing.
TEST(Conservation, TheSlopeOfTheCapKnowsNoBias) {
    Head head(6, 4, 20);
    head.in.softcap = 5;
    const Conservation plain = conservation(score_gradient(head.in), 5);
    Matrix bias(6, 6, 2);
    bias(4, 1) = -infinity;
    head.in.bias = bias.view();
    const Conservation shifted = conservation(score_gradient(head.in), 5, head.in.bias);
    for (const std::size_t i : {0U, 1U, 2U, 3U, 5U})
        EXPECT_NEAR(shifted.before_softcap[i], plain.before_softcap[i], 1e-13);
    EXPECT_TRUE(std::isfinite(shifted.before_softcap[4]));
}

// Keys of scores 0 and log 3 beside a sink of 45: p = (1, 3) / (4 + e^45), 1 - p_sink has no digit of them.
TEST(Saturation, AHeavySinkLeavesTheKeysTheirDigits) {
    const std::vector<double> scores{0, std::log(3.0)};
    const RowSaturation r = row_saturation(scores, repeated_within, 45.0);
    const double sum = 4 + std::exp(45.0), p0 = 1 / sum, p1 = 3 / sum;
    EXPECT_EQ(r.keys, 2);
    EXPECT_NEAR(r.p_max, p1, 1e-14 * p1);
    const double entropy = -p0 * std::log(p0) - p1 * std::log(p1);
    EXPECT_NEAR(r.entropy, entropy, 1e-14 * entropy);
    EXPECT_EQ(row_saturation(scores, repeated_within, -infinity).p_max, row_saturation(scores).p_max);
}

TEST(Saturation, WorkedRows) {
    const std::vector<double> uniform(8, 3.0);
    const RowSaturation flat = row_saturation(uniform);
    EXPECT_EQ(flat.max_logit, 3);
    EXPECT_EQ(flat.p_max, 1.0 / 8);
    EXPECT_NEAR(flat.entropy, std::log(8), 1e-15);
    EXPECT_EQ(flat.repeated, 8);
    const std::vector<double> peaked{10, 10 - 5e-4, 10 - 1.9e-3, 10 - 2.1e-3, 2, -infinity};
    const RowSaturation row = row_saturation(peaked, 1e-3);
    EXPECT_EQ(row.repeated, 1);
    EXPECT_EQ(row.near, 2);
    EXPECT_EQ(row.rounded_to_one, 3);  // exp(-1.9e-3) = 0.99810 > 1 - 2^-9 = 0.99805 > exp(-2.1e-3)
    EXPECT_FALSE(row.saturated());
    const std::vector<double> two{0, -std::log(3)};  // p = 3/4, 1/4
    EXPECT_NEAR(row_saturation(two).p_max, 0.75, 1e-15);
    EXPECT_NEAR(row_saturation(two).entropy, -0.75 * std::log(0.75) - 0.25 * std::log(0.25), 1e-15);
    const std::vector<double> one{-4}, sharp{0, -7}, masked{-infinity, -infinity}, bad{1, nan_value};
    EXPECT_EQ(row_saturation(one).p_max, 1);
    EXPECT_EQ(row_saturation(one).entropy, 0);
    EXPECT_FALSE(row_saturation(one).chooses());
    EXPECT_TRUE(row_saturation(two).chooses());
    EXPECT_TRUE(row_saturation(sharp).saturated());  // exp(-7) = 9e-4 < 2^-9
    EXPECT_EQ(row_saturation(masked).p_max, 0);
    EXPECT_EQ(row_saturation({}).p_max, 0);
    EXPECT_TRUE(std::isnan(row_saturation(bad).p_max) && std::isnan(row_saturation(bad).max_logit));
}

TEST(Saturation, KeysAboutTheirMean) {
    Matrix k(2, 2);
    k(0, 0) = 5, k(1, 0) = 3, k(0, 1) = 1, k(1, 1) = -1;  // mean (4, 0), spread sqrt(1 + 1)
    EXPECT_EQ(key_moments(k.view()).mean_norm, 4);
    EXPECT_NEAR(key_moments(k.view()).spread, std::sqrt(2), 1e-15);
    EXPECT_NEAR(key_mean_over_spread(k.view()), 4 / std::sqrt(2), 1e-15);
    const Matrix same(3, 2, 7.0), none(0, 2);
    EXPECT_EQ(key_mean_over_spread(same.view()), infinity);
    EXPECT_TRUE(std::isnan(key_mean_over_spread(none.view())));
}

// q = k = 133120 at d = 64 (pytorch issue 121558): s = 1.134139e12, the fused exponent is off by +7916.
TEST(Saturation, TheWinnersExponent) {
    EXPECT_NEAR(winner_exponent(64.0 * 133120 * 133120, 0.125, true), 7916, 0.5);
    EXPECT_EQ(winner_exponent(64.0 * 133120 * 133120, 0.125, false), 0);
    // A power of two times c is exact: nothing is left.
    EXPECT_EQ(winner_exponent(1024, 0.125, true), 0);
    // At most half an ulp of the product.
    for (double m = 1.7; m < 1e12; m *= 3.1)
        EXPECT_LE(std::abs(winner_exponent(m, 0.125, true)), 0.5 * ulp(m * 0.125 * 1.4427, fp32)) << m;
}

TEST(OutputError, SignedUlpsByFeature) {
    Matrix truth(2, 3), value(2, 3);
    // Column 0: one ulp up in both rows (bf16: 2^-7 at 1 and at the column's rms of 1.6, 2^-6 at 2). Column 1: up and down. Column 2: a row left out.
    truth(0, 0) = 1, value(0, 0) = 1 + 0x1p-7, truth(1, 0) = 2, value(1, 0) = 2 + 0x1p-6;
    truth(0, 1) = 1, value(0, 1) = 1 + 0x1p-7, truth(1, 1) = 1, value(1, 1) = 1 - 0x1p-7;
    truth(0, 2) = 1, value(0, 2) = nan_value, truth(1, 2) = -4, value(1, 2) = -4 - 0x1p-4;
    const std::vector<FeatureError> f = ulp_error_by_feature(value.view(), truth.view(), bf16);
    EXPECT_EQ(f[0].mean_ulp, 1);
    EXPECT_EQ(f[1].mean_ulp, 0);
    EXPECT_EQ(f[1].rms_ulp, 1);
    EXPECT_EQ(f[1].t, 0);
    EXPECT_EQ(f[2].mean_ulp, -2);
    EXPECT_EQ(f[2].count, 1);
    EXPECT_TRUE(std::isnan(f[2].t) && std::isnan(f[0].t));  // one row; no scatter
    // An element near 0 is measured by its column: 2^-7 off at a truth of 0 among threes is half an ulp of theirs.
    Matrix cancelled(4, 1, 3.0), stored(4, 1, 3.0);
    cancelled(0, 0) = 0, stored(0, 0) = 0x1p-7;
    EXPECT_EQ(ulp_error_by_feature(stored.view(), cancelled.view(), bf16)[0].mean_ulp, 0.5 / 4);
    const Matrix none(0, 2);
    EXPECT_TRUE(std::isnan(ulp_error_by_feature(none.view(), none.view(), bf16)[0].mean_ulp));
}

// The worked example of arXiv 2510.04212, section 3.3: -2.40625 and a small tail, then -2.296875: the tie's tail rounds it away.
TEST(OutputError, TheTieWithATail) {
    const std::vector<double> pbar{1, 0x1p-10, 0.9999}, v{-2.40625, -0.875, -2.296875};
    const RunningOutput r = running_output(pbar, v, bf16, bf16);
    EXPECT_EQ(r.sum[0], -2.40625);
    EXPECT_EQ(r.error[0], 0);
    EXPECT_EQ(r.sum[2], -2.40625 - 0.875 * 0x1p-10 - 2.296875);
    EXPECT_EQ(r.error[2], -4.71875 - r.sum[2]);
    EXPECT_EQ(r.event, (std::vector<int>{1, 0, 1}));
    EXPECT_TRUE(running_output({}, {}, bf16, bf16).sum.empty());
}

// --- on a plan's kernel ----------------------------------------------------------------------------------------------

HeadGroup group_of(const Head& head) {
    HeadGroup g;
    g.q = {head.q.view()};
    g.dout = {head.dout.view()};
    g.k = head.k.view();
    g.v = head.v.view();
    g.scale = head.in.scale;
    return g;
}

TEST(PlanConservation, TheExactPlanKeepsTheLaws) {
    const Head head(24, 8, 2);
    const HeadGroup group = group_of(head);
    const RoundingPlan exact;
    const PlanRows rows = plan_conservation(group, exact).at(0);
    const ScoreGradient g = score_gradient(head.in);
    constexpr double binary64 = 1e-12;  // p by exp2 of an argument below 2^6: 2^-52 2^6, and sums of 24
    for (std::size_t i = 0; i < 24; ++i) {
        EXPECT_NEAR(rows.p_sum[i], 1, binary64);
        EXPECT_NEAR(rows.gradient.sum[i], 0, binary64 * (1 + rows.gradient.magnitude[i]));
        EXPECT_NEAR(rows.delta[i], g.delta[i], binary64);
        EXPECT_NEAR(rows.delta_p_dp[i], g.delta[i], binary64);
    }
    const Invariance same = plan_invariance(group, exact);
    for (const double x : {same.shift_o, same.shift_dq, same.permutation_o, same.permutation_dq, same.ones_largest})
        EXPECT_LE(x, binary64);
}

// fa2 rounds: r_i is delta's error of a bf16 O and the casts; the laws are broken at the level of bf16 and not beyond it.
TEST(PlanConservation, ALowPrecisionPlanBreaksThemByItsRounding) {
    const Head head(24, 8, 2);
    const HeadGroup group = group_of(head);
    const RoundingPlan fa2 = for_head_dim(plan("fa2"), 8);
    const PlanRows rows = plan_conservation(group, fa2).at(0);
    double worst = 0;
    for (std::size_t i = 1; i < 24; ++i)
        worst = std::max(worst, std::abs(rows.gradient.sum[i]) / rows.gradient.magnitude[i]);
    EXPECT_GT(worst, 0x1p-12);
    for (std::size_t i = 0; i < 24; ++i) EXPECT_NEAR(rows.p_sum[i], 1, 0x1p-16);  // lse and p are fp32
    // Keys of two tiles and more: the order of the tiles changes with the keys'.
    const Head longer(200, 8, 2);
    const Invariance moved = plan_invariance(group_of(longer), fa2);
    EXPECT_GT(moved.permutation_dq, 0);
    EXPECT_GT(moved.permutation_o, 0);
    // Each element may round to its other neighbour: one ulp, 2^-7 relative at most.
    EXPECT_LE(moved.permutation_o, 0x1p-7);
    EXPECT_LE(moved.shift_o, 0x1p-7);
    EXPECT_GE(moved.ones_largest, std::abs(moved.ones_mean));
    EXPECT_LE(moved.ones_largest, 0x1p-7);
}

// Plans that save p, cast it before ds, scale ds before or after the cast: the watch reads each in the same unit.
TEST(PlanConservation, EveryPresetIsReadInTheSameUnit) {
    const Head head(24, 8, 1);
    const HeadGroup group = group_of(head);
    const ScoreGradient g = score_gradient(head.in);
    for (const RoundingPlan& preset : presets()) {
        const RoundingPlan settled = for_head_dim(preset, 8);
        const PlanRows rows = plan_conservation(group, settled).at(0);
        // Some eight roundings of the plan's coarsest format, one after the other.
        int precision = 44;  // of the exact plan: binary64 after exponentials and sums of 24 terms
        for (const Site site : settled.rounding_sites())
            if (!is_exact(settled[site].format)) precision = std::min(precision, settled[site].format.precision);
        const double level = std::exp2(3 - precision);
        for (std::size_t i = 0; i < 24; ++i) {
            EXPECT_NEAR(rows.p_sum[i], 1, level) << preset.name << " " << i;
            EXPECT_NEAR(rows.delta_p_dp[i], g.delta[i], level * (1 + std::abs(g.delta[i]))) << preset.name << " " << i;
            EXPECT_NEAR(rows.delta[i], g.delta[i], level * (1 + std::abs(g.delta[i]))) << preset.name << " " << i;
            double magnitude = 0;
            for (std::ptrdiff_t j = 0; j < 24; ++j) magnitude += std::abs(g.ds(static_cast<std::ptrdiff_t>(i), j));
            EXPECT_NEAR(rows.gradient.magnitude[i], magnitude, level * (magnitude + 1)) << preset.name << " " << i;
        }
    }
}

}  // namespace
}  // namespace faultline
