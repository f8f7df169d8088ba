// SPDX-License-Identifier: Apache-2.0
// Public fault reports as numbers: each input is exact in bf16, each expectation is worked out in the comment.
#include <gtest/gtest.h>

#include <limits>

#include "heads.hpp"

namespace faultline::testing {
namespace {

/// One query, one key, every element x.
Head equal_head(double x, std::ptrdiff_t d = 64) {
    Head head(1, 1, d, 1);
    for (double& e : head.q[0].values) e = x;
    head.k.values = head.q[0].values;
    head.v.values = head.q[0].values;
    return head;
}

class Probability final : public Instrument {
  public:
    explicit Probability(Site site) : site_(site) {}
    [[nodiscard]] bool watches(Site site) const override { return site == site_; }
    void at(Site, const TileAt&, MatrixView<double> value, MatrixView<const double>) override { last = value(0, 0); }
    double last = std::numeric_limits<double>::quiet_NaN();

  private:
    Site site_;
};

// pytorch/pytorch#121558: q = k = 133120 = 2^17 + 2^11. s = 64 q^2 = 1.134e12, x = s scale log2(e) = 2.045e11 whose float
// ulp is 2^14; the fma keeps the product exact and subtracts the rounded one, which leaves +7916: exp2 overflows.
TEST(FaultReports, FusedExponentOverflowsForLargeEqualInputs) {
    Probability p(Site::exp);
    const Result fused = run(equal_head(133120), preset("fa2"), &p);
    EXPECT_TRUE(std::isinf(p.last));
    EXPECT_TRUE(std::isnan(fused.forward.heads[0].o(0, 0)));
    const Result unfused = run(equal_head(133120), preset("fa2-unfused"), &p);
    EXPECT_EQ(p.last, 1.0);
    EXPECT_EQ(unfused.forward.heads[0].o(0, 0), 133120.0);
}

// The residual x - fl(x) as a function of x, exp2 of it is the winner's probability. Judged here in exact integer
// arithmetic: s is an integer, c = fl(0.125 log2(e)) has 24 bits, so s c fits a long double exactly.
double winner_by_hand(double q) {
    const long double s = 64.0L * q * q;
    const long double c = static_cast<float>(0.125 * std::numbers::log2e);
    const long double product = s * c;  // at most 24 + 24 significant bits: exact in the 64 of a long double
    return static_cast<float>(std::exp2(static_cast<double>(product - static_cast<float>(product))));
}

TEST(FaultReports, WinnerOfEqualInputsDriftsFromOneWithTheLogit) {
    Probability p(Site::exp);
    RoundingPlan fa2 = preset("fa2");
    fa2.schedule.functions = Functions::correctly_rounded;  // the residual is in question, not ex2.approx
    for (const double q : {1.0, 16.0, 100.0, 300.0, 1000.0, 2000.0}) {
        const double in_bf16 = round(q, bf16, Rounding::nearest_even);
        run(equal_head(in_bf16), fa2, &p);
        EXPECT_EQ(p.last, winner_by_hand(in_bf16)) << q;
    }
    // The figures of the report's class: q = k = 300 gives 0.984916.
    run(equal_head(300), preset("fa2"), &p);
    EXPECT_NEAR(p.last, 0.984916, 5e-7);
}

// Subtract-then-scale makes the winner's exponent exactly 0 whatever the logit.
TEST(FaultReports, SubtractThenScaleKeepsTheWinnerAtOne) {
    Probability p(Site::exp);
    RoundingPlan repaired = preset("fa2");
    repaired.schedule.argument = ArgumentForm::subtract_then_scale;
    for (const double q : {300.0, 1000.0, 133120.0}) {
        run(equal_head(round(q, bf16, Rounding::nearest_even)), repaired, &p);
        EXPECT_EQ(p.last, 1.0) << q;
    }
}

// gabrieldemarmiesse/torch-mojo-backend#398: |p_max - 1| <= ln2 2^(k-24) for 2^k <= |x| < 2^(k+1), an envelope that grows
// with the binade of the scaled logit x and is invisible to inputs of unit size. One more float ulp for exp2's rounding.
TEST(FaultReports, EnvelopeOfTheWinnerGrowsByBinade) {
    Probability p(Site::exp);
    double largest = 0;
    for (int k = 4; k <= 14; ++k) {
        const double q =
            round(std::sqrt(std::ldexp(1.3, k) / 64 / 0.125 / std::numbers::log2e), bf16, Rounding::nearest_even);
        run(equal_head(q), preset("fa2"), &p);
        const double x = 64 * q * q * 0.125 * std::numbers::log2e;
        const int binade = std::ilogb(x);
        EXPECT_LE(std::abs(p.last - 1), std::numbers::ln2 * std::ldexp(1.0, binade - 24) + 0x1p-24) << k;
        largest = std::max(largest, std::abs(p.last - 1));
    }
    EXPECT_GT(largest, 1e-4);
}

/// One row: one key at the maximum, the others at probability p relative to it, V = 1. The maximum is the last key, which
/// FlashAttention-2 visits first: a tile whose own maximum is p would hold P = 1 and be rescaled in fp32.
double two_level_output(double p, const RoundingPlan& plan) {
    constexpr std::ptrdiff_t n = 1024;
    Head head(1, n, 64, 1);
    head.causal = false;
    // s_j = scale q.k_j; with q = (8, 0, …) and k_j = (ln p, 0, …) the scaled score is ln p. Not exact in bf16: the test is
    // of the cast of P, so the plan's input casts are left out below.
    for (double& e : head.q[0].values) e = 0;
    for (double& e : head.k.values) e = 0;
    for (double& e : head.v.values) e = 1;
    head.q[0](0, 0) = 8;
    for (std::ptrdiff_t j = 0; j < n - 1; ++j) head.k(j, 0) = static_cast<float>(std::log(p));
    RoundingPlan with_float_inputs = plan;
    for (const Site site : {Site::q_cast, Site::k_cast, Site::o_cast}) with_float_inputs.set(site, Rule{});
    return run(head, with_float_inputs).forward.heads[0].o(0, 0);
}

// Dao-AILab/flash-attention#2721: the numerator sums bf16(P), the denominator P. With V = 1 the output is their ratio
// (1 + 1023 bf16(p)) / (1 + 1023 p): p = .9981 -> 1, .9980 -> .99609375, .7519 -> .75, .7520 -> .75390625.
TEST(FaultReports, NumeratorAndDenominatorRoundApart) {
    RoundingPlan fa2 = preset("fa2");
    for (const auto& [p, rounded] : {std::pair{.9981, 1.0}, {.9980, .99609375}, {.7519, .75}, {.7520, .75390625}}) {
        const double expected = (1 + 1023 * rounded) / (1 + 1023 * p) - 1;
        // fp32 sums of 1024 terms, truncated: a relative error of at most 1024 2^-24 = 6e-5, much less here.
        EXPECT_NEAR(two_level_output(p, fa2) - 1, expected, 6.2e-5) << p;
        EXPECT_GT(std::abs(two_level_output(p, fa2) - 1), 1.8e-3) << p;
    }
    // Adding the rounded P to the row sum as well closes it.
    fa2.schedule.row_sum_adds = RowSumAdds::two_sums;
    for (const double p : {.9981, .9980, .7519, .7520}) EXPECT_NEAR(two_level_output(p, fa2) - 1, 0, 6.2e-5) << p;
}

// delta = rowsum(dO o O) with a coherent rounding of O: d = 64, dO = .5, one visible key, so O = bf16(v).
TEST(FaultReports, CoherentRoundingOfTheOutputBecomesDelta) {
    struct Row {
        double v, error;
    };
    // bf16 neighbours near 1 are 2^-7 apart above it: 1.0038 -> 1, 1.0040 -> 1.0078125, the tie 1.00390625 -> 1 (even),
    // -2.0117 -> -2.015625. Error = 64 * .5 * (bf16(v) - v).
    for (const Row& row :
         {Row{1.0038, -0.1216}, Row{1.0040, 0.1220}, Row{1.00390625, -0.1250}, Row{-2.0117, -0.1256}}) {
        Head head(1, 1, 64, 1);
        const double v = static_cast<float>(row.v);
        for (double& e : head.v.values) e = v;
        for (double& e : head.dout[0].values) e = 0.5;
        Probability delta(Site::delta);
        RoundingPlan fa2 = preset("fa2");
        fa2.set(Site::v_cast, Rule{});  // v is a float here: the cast of O is the one in question
        fa2.set(Site::pv_accumulate, Rule{});
        run(head, fa2, &delta);
        EXPECT_EQ(delta.last, 32 * round(v, bf16, Rounding::nearest_even));
        EXPECT_NEAR(delta.last - 32 * v, row.error, 5e-5);
    }
}

// Fully masked rows: O = 0, lse = +inf as FlashAttention-2 stores it, gradients 0, no NaN.
TEST(FaultReports, FullyMaskedRowsAreZero) {
    Head head(8, 4, 64, 9);  // bottom-right causal mask: the first four queries see no key
    const Result r = run(head, preset("fa2"));
    for (std::ptrdiff_t i = 0; i < 4; ++i) {
        EXPECT_EQ(r.forward.heads[0].lse[static_cast<std::size_t>(i)], std::numeric_limits<double>::infinity());
        for (std::ptrdiff_t c = 0; c < 64; ++c) {
            EXPECT_EQ(r.forward.heads[0].o(i, c), 0.0);
            EXPECT_EQ(r.backward.dq[0](i, c), 0.0);
        }
    }
    for (const double x : r.backward.dk.values) EXPECT_TRUE(std::isfinite(x));
}

}  // namespace
}  // namespace faultline::testing
