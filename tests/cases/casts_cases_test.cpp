// SPDX-License-Identifier: Apache-2.0
// Rows 7, 9, 11, 12: what a cast to a low format does where the numbers are coherent.
#include <gtest/gtest.h>

#include "cases.hpp"

namespace faultline::testing {
namespace {

// Dao-AILab/flash-attention#2716 and the others: with offset 8 and a maximum that may lag by up to 4, P reaches 2^12 and
// e4m3 ends at 448, while the row sum counts all of it. One key a tile: the first sets the maximum, the second lies `lag`
// above it (log2 units). V = 1 for the second key and 0 for the first, so O is the second key's weight.
double weight_of_second_key(double lag, double threshold, const Format& p_format, std::ptrdiff_t d, double* lse) {
    Head head(1, 2, d, 1);
    head.causal = false;
    for (Matrix* m : {&head.q[0], &head.k, &head.v}) std::fill(m->values.begin(), m->values.end(), 0.0);
    head.q[0](0, 0) = 1;
    head.k(1, 0) = lag / std::numbers::log2e * std::sqrt(static_cast<double>(d));
    for (std::ptrdiff_t c = 0; c < d; ++c) head.v(1, c) = 1;
    RoundingPlan plan;  // nothing is rounded but P
    plan.schedule.block_k = 1;
    plan.schedule.max_policy = MaxPolicy::lazy;
    plan.schedule.max_threshold = threshold;
    plan.schedule.max_offset = 8;
    plan.set(Site::p_cast, Rule{p_format});
    const GroupForward forward = attention_forward(head.group(), plan);
    *lse = forward.heads[0].lse[0];
    return forward.heads[0].o(0, 0);
}

TEST(Row7, ALaggingMaximumClampsTheDominantKey) {
    const Format clamped = with_saturation(e4m3, true);
    for (const std::ptrdiff_t d : head_sizes) {
        double lse = 0;
        for (const double lag : {0.5, 0.8, 1.5, 3.0, 3.999}) {
            const double truth = std::exp2(lag) / (1 + std::exp2(lag));
            const double p = std::exp2(8 + lag);
            const double expected = round(p, clamped, Rounding::nearest_even) / (256 + p);
            EXPECT_NEAR(weight_of_second_key(lag, 4, clamped, d, &lse), expected, 1e-12) << d << " " << lag;
            EXPECT_NEAR(lse, std::log1p(std::exp2(lag)), 1e-12) << "lse counts all of it";
            if (lag > 1.5) {
                EXPECT_LT(weight_of_second_key(lag, 4, clamped, d, &lse), 0.6 * truth);
            }
            // Up to the safe threshold log2(448) - 8 the loss is rounding: half of e4m3's 2^-3.
            const double safe = std::log2(448.0) - 8;
            EXPECT_NEAR(weight_of_second_key(lag, safe, clamped, d, &lse) / truth, 1, 0x1p-4) << d << " " << lag;
        }
    }
    // The figure of the report: at a lag of 3.999 the key keeps 448/4093 = 0.1095 of its weight.
    double lse = 0;
    EXPECT_NEAR(weight_of_second_key(3.999, 4, clamped, 128, &lse) * (256 + std::exp2(11.999)) / std::exp2(11.999),
                0.1095, 5e-5);
    // e5m2 ends at 57344: nothing is clamped, and its rounding is coarser (2^-3), as the report compares them.
    EXPECT_NEAR(weight_of_second_key(3.999, 4, e5m2, 128, &lse), 4096.0 / (256 + std::exp2(11.999)), 1e-12);
}

// Dao-AILab/flash-attention#2721: V = 1, one key at the maximum and the others at p: O = (1 + (n-1) cast(p))/(1 + (n-1) p).
double two_level_output(double p, std::ptrdiff_t n, std::ptrdiff_t d, RoundingPlan plan) {
    Head head(1, n, d, 1);
    head.causal = false;
    for (Matrix* m : {&head.q[0], &head.k}) std::fill(m->values.begin(), m->values.end(), 0.0);
    std::fill(head.v.values.begin(), head.v.values.end(), 1.0);
    head.q[0](0, 0) = 1;
    // The maximum is the last key, which FlashAttention-2 visits first.
    for (std::ptrdiff_t j = 0; j < n - 1; ++j) head.k(j, 0) = std::log(p) * std::sqrt(static_cast<double>(d));
    for (const Site site : {Site::q_cast, Site::k_cast, Site::o_cast})
        plan.set(site, Rule{});  // P's cast is in question
    return run(head, plan).forward.heads[0].o(0, 0);
}

/// The formula in MPFR.
double two_level_expected(double p, double cast, std::ptrdiff_t n) {
    detail::Real above(judge_bits), below(judge_bits);
    mpfr_set_d(above, cast, MPFR_RNDN);
    mpfr_mul_si(above, above, n - 1, MPFR_RNDN);
    mpfr_add_si(above, above, 1, MPFR_RNDN);
    mpfr_set_d(below, p, MPFR_RNDN);
    mpfr_mul_si(below, below, n - 1, MPFR_RNDN);
    mpfr_add_si(below, below, 1, MPFR_RNDN);
    mpfr_div(above, above, below, MPFR_RNDN);
    mpfr_sub_si(above, above, 1, MPFR_RNDN);
    return mpfr_get_d(above, MPFR_RNDN);
}

TEST(Row9, NumeratorAndDenominatorRoundApart) {
    struct Level {
        double p, cast, figure;
    };
    for (const Level& level : {Level{.9981, 1.0, +1.9018e-3}, Level{.9980, .99609375, -1.9082e-3},
                               Level{.7519, .75, -2.5237e-3}, Level{.7520, .75390625, +2.5317e-3}}) {
        EXPECT_EQ(round(level.p, bf16, Rounding::nearest_even), level.cast);
        // The report's figures, to their digits.
        EXPECT_NEAR(two_level_expected(level.p, level.cast, 1024), level.figure, 1e-6);
        for (const std::ptrdiff_t d : head_sizes)
            for (const std::ptrdiff_t n : {256, 1024}) {
                RoundingPlan plan = preset("fa2", d);
                // The matrix unit truncates 25-bit sums 16 terms at a time and the row sum is fp32: relative errors of
                // n/16 2^-24 and of the row's length over four lanes, together under n 2^-25.
                const double tolerance = static_cast<double>(n) * 0x1p-25;
                EXPECT_NEAR(two_level_output(level.p, n, d, plan) - 1, two_level_expected(level.p, level.cast, n),
                            tolerance)
                    << level.p << " d " << d << " n " << n;
                const RoundingPlan half = in_format(plan, fp16);
                const double in_fp16 = round(level.p, fp16, Rounding::nearest_even);
                EXPECT_NEAR(two_level_output(level.p, n, d, half) - 1, two_level_expected(level.p, in_fp16, n),
                            tolerance)
                    << level.p << " fp16, d " << d << " n " << n;
                plan.schedule.row_sum_adds = RowSumAdds::two_sums;
                EXPECT_NEAR(two_level_output(level.p, n, d, plan), 1, tolerance) << "two sums";
            }
    }
}

TEST(Row9, GaussianRowsHaveNoMeanBias) {
    // The report's control: V = 1, logits normal; |mean(O - 1)| <= 1e-5 over rows.
    const std::ptrdiff_t rows = 64, n = 1024;
    Head head(rows, n, 64, 3);
    head.causal = false;
    std::fill(head.v.values.begin(), head.v.values.end(), 1.0);
    RoundingPlan plan = preset("fa2");
    plan.set(Site::o_cast, Rule{});
    const Matrix o = run(head, plan).forward.heads[0].o;
    double mean = 0;
    for (std::ptrdiff_t i = 0; i < rows; ++i) mean += (o(i, 0) - 1) / static_cast<double>(rows);
    EXPECT_LE(std::abs(mean), 1e-5);
}

// The same class, synthetic: delta = rowsum(dO o O) of a coherent O. One visible key, so O = bf16(v): delta is off by
// d dO (bf16(v) - v).
TEST(Row11, CoherentRoundingOfOIsDelta) {
    struct Value {
        double v, figure;  // of d = 64, dO = 0.5
    };
    for (const Value& value :
         {Value{1.0038, -0.1216}, Value{1.0040, 0.1220}, Value{1.00390625, -0.1250}, Value{-2.0117, -0.1256}})
        for (const Format& format : {bf16, fp16})
            for (const std::ptrdiff_t d : head_sizes) {
                Head head(1, 1, d, 1);
                const double v = static_cast<float>(value.v);
                std::fill(head.v.values.begin(), head.v.values.end(), v);
                std::fill(head.dout[0].values.begin(), head.dout[0].values.end(), 0.5);
                RoundingPlan plan = in_format(preset("fa2", d), format);
                plan.set(Site::v_cast, Rule{});
                plan.set(Site::pv_accumulate, Rule{});
                Seen delta(Site::delta);
                (void)run(head, plan, &delta);
                const double error = 0.5 * static_cast<double>(d) * (round(v, format, Rounding::nearest_even) - v);
                EXPECT_NEAR(delta.last() - 0.5 * static_cast<double>(d) * v, error, 1e-12) << v << " " << d;
                if (d == 64 && format == bf16) {
                    EXPECT_NEAR(error, value.figure, 5e-5);
                }
                // rowsum(P o dP) has no O in it.
                plan.schedule.delta_from = DeltaFrom::p_dp;
                plan.set(Site::dp_accumulate, Rule{});
                Seen from_p(Site::delta);
                (void)run(head, plan, &from_p);
                EXPECT_NEAR(from_p.last(), 0.5 * static_cast<double>(d) * v, 1e-6 * static_cast<double>(d));
            }
}

// FlashAttention-4: neighbouring columns of a row use different exp2. Of 128 columns the polynomial takes, in the second and
// third fragment of 32, the last four of every sixteen (the last fragment and the first have none).
TEST(Fa4, SomeColumnsTakeAnotherExp2) {
    Head head(4, 128, 64, 51);
    head.causal = false;
    const RoundingPlan fa4 = preset("fa4", 64);
    RoundingPlan without = fa4;
    without.schedule.exp_poly_every = 0;
    Seen with_polynomial(Site::exp), plain(Site::exp);
    (void)attention_forward(head.group(), fa4, &with_polynomial);
    (void)attention_forward(head.group(), without, &plain);
    int differing = 0;
    for (std::ptrdiff_t i = 0; i < 4; ++i)
        for (std::ptrdiff_t j = 0; j < 128; ++j) {
            const double a = with_polynomial.tiles.at(0).value(i, j), b = plain.tiles.at(0).value(i, j);
            const bool polynomial = j >= 32 && j < 96 && j % 16 >= 12;
            if (!polynomial) {
                EXPECT_EQ(a, b) << j;
            }
            EXPECT_NEAR(a, b, 9e-5 * b) << j;
            differing += a != b;
        }
    EXPECT_GT(differing, 4 * 16 / 2);
}

// linkedin/Liger-Kernel#1329: the gradient of cross entropy of a confident token is p - 1; rounding p to bf16 first leaves
// (bf16(p) - p)/(1 - p) of it. The same cancellation as a saturated row's dp - delta.
TEST(Row12, RoundingBeforeSubtractingLosesTheDifference) {
    struct Confidence {
        double p, error;
    };
    for (const Confidence& c : {Confidence{.9, .016}, Confidence{.99, .172}, Confidence{.999, 1.0}}) {
        const double early = round(c.p, bf16, Rounding::nearest_even) - 1;
        EXPECT_NEAR(std::abs(early - (c.p - 1)) / (1 - c.p), c.error, 6e-4) << c.p;
        // fp16 has eight times as many values below 1: at most an eighth of what half an ulp of bf16 can do.
        EXPECT_LE(std::abs(round(c.p, fp16, Rounding::nearest_even) - c.p), 0x1p-12) << c.p;
        const double late = round(c.p - 1, bf16, Rounding::nearest_even);
        EXPECT_LE(std::abs(late - (c.p - 1)) / (1 - c.p), 0x1p-8) << c.p;
        // The worst that rounding p can do: half an ulp below 1, 2^-9, over 1 - p.
        double worst = 0;
        for (double p = c.p - 0x1p-9; p <= c.p + 0x1p-9; p += 0x1p-16)
            worst = std::max(worst, std::abs(round(p, bf16, Rounding::nearest_even) - p) / (1 - c.p));
        EXPECT_LE(worst, 0x1p-9 / (1 - c.p) * 1.001) << c.p;
    }
}

}  // namespace
}  // namespace faultline::testing
