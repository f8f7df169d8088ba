// SPDX-License-Identifier: Apache-2.0
// Rows 3, 4, 10, 15: padding, deeply negative rows, sinks and ALiBi.
#include <gtest/gtest.h>

#include <faultline/attribution/error_sums.hpp>
#include <faultline/attribution/group_run.hpp>
#include <faultline/generation/family.hpp>

#include "cases.hpp"

namespace faultline::testing {
namespace {

// pytorch/pytorch#196678, huggingface/trl#7181: every score near -120 and a key tile that reaches past the keys. A backward
// that scores the padded keys 0 in place of masking them has P = exp(0 - lse), infinite in fp32 where lse < -88.7, and
// inf * 0 = NaN in dQ. The forward is right: what goes wrong is that the backward reads keys that the forward did not.
std::size_t nonfinite_dq(std::ptrdiff_t n, std::ptrdiff_t padded, double key, std::ptrdiff_t d,
                         const Format& format = bf16) {
    Head head(n, n, d, 5);
    head.causal = false;
    for (Matrix* m : {&head.q[0], &head.k})
        for (double& x : m->values) x = round(0.1 * x, format, Rounding::nearest_even);
    for (std::ptrdiff_t i = 0; i < n; ++i)
        head.q[0](i, 0) = 1, head.k(i, 0) = round(key, format, Rounding::nearest_even);
    const RoundingPlan plan = in_format(preset("fa2-unfused", d), format);
    const GroupForward forward = attention_forward(head.group(), plan);
    Matrix k(padded, d), v(padded, d);
    for (std::ptrdiff_t j = 0; j < n; ++j)
        for (std::ptrdiff_t c = 0; c < d; ++c) k(j, c) = head.k(j, c), v(j, c) = head.v(j, c);
    HeadGroup in = head.group();
    in.k = k.view();
    in.v = v.view();
    const Matrix dq = attention_backward(in, forward, plan).dq[0];
    std::size_t bad = 0;
    for (const double x : dq.values) bad += !std::isfinite(x);
    return bad;
}

TEST(Row3, PaddedKeysScoredZeroAreNaNInEveryElementOfDq) {
    const double key = -120 * std::sqrt(64.0);  // -960: score -120
    EXPECT_EQ(nonfinite_dq(704, 768, key, 64), 704u * 64u) << "the 45,056 of the report";
    EXPECT_EQ(nonfinite_dq(704, 704, key, 64), 0u) << "the same kernel without the padded keys";
    for (const Format& format : {bf16, fp16})
        for (const std::ptrdiff_t d : head_sizes) {
            const double deep = -120 * std::sqrt(static_cast<double>(d));
            EXPECT_EQ(nonfinite_dq(32, 64, deep, d, format), static_cast<std::size_t>(32 * d)) << d;
            EXPECT_EQ(nonfinite_dq(32, 32, deep, d, format), 0u) << d;
        }
    // lse above -88.7: exp(-lse) is finite in fp32 (e^88.7 = 3.3e38), and the zero key makes it no gradient.
    EXPECT_EQ(nonfinite_dq(96, 128, -80 * std::sqrt(64.0), 64), 0u);
}

TEST(Row3, RightlyMaskedRowsAtMinus120AreRight) {
    for (const std::ptrdiff_t d : head_sizes)
        for (const bool causal : {false, true}) {
            Head head(96, 96, d, 6);
            head.causal = causal;
            for (std::ptrdiff_t i = 0; i < 96; ++i) {
                head.q[0](i, 0) = 1;
                head.k(i, 0) = round(-120 * std::sqrt(static_cast<double>(d)), bf16, Rounding::nearest_even);
            }
            const HeadTruth truth = attention_truth(head.problem(), {.correctly_rounded = false}).heads[0];
            const Result r = run(head, preset("fa2-unfused", d));
            for (std::size_t i = 0; i < 96; ++i) {
                const double lse = truth.lse(static_cast<std::ptrdiff_t>(i), 0);
                // d/16 matrix-unit steps that each truncate the score to 24 bits, then the maximum's product and the lse.
                const double steps = static_cast<double>(d) / 16 + 2;
                EXPECT_NEAR(r.forward.heads[0].lse[i], lse, steps * ulp(lse, fp32)) << d;
            }
            EXPECT_LT(relative_error(r.forward.heads[0].o.view(), truth.o), 0x1p-7) << d;
            for (const double x : r.backward.dq[0].values) EXPECT_TRUE(std::isfinite(x));
        }
}

// NVIDIA/cudnn-frontend#743 to #745: rows whose scores lie between -200 and -490. An error of dQ along u, one sign: rank one.
// The plan's own error has no such sign; one that is planted along u is seen as one.
TEST(Row4, ARankOneBiasOnDeepRowsIsSeenAsOne) {
    for (const Format& format : {bf16, fp16})
        for (const std::ptrdiff_t d : {32, 64, 96, 128, 256}) {
            const LayerCapture layer =
                make_inputs(*find_family("deep-negative"),
                            {.heads = 1, .kv_heads = 1, .queries = 64, .keys = 64, .head_dim = d}, 11);
            const attribution::Group group = attribution::groups_of(layer, {}, 0)[0];
            const GroupTruth truth = attention_truth(group.problem, {.correctly_rounded = false});
            attribution::RunOutputs run = attribution::run_plan(group, in_format(preset("fa2", d), format));
            const std::vector<double> mean_key = attribution::mean_key_direction(group);
            const ErrorMeasure own = attribution::errors_of(run[Output::dq], truth, Output::dq, mean_key).measure();
            EXPECT_EQ(own.nonfinite, 0u);
            EXPECT_LT(own.rel_error.to_double(), 0.05) << d;
            Matrix& dq = run.outputs[static_cast<std::size_t>(Output::dq)][0];
            double squares = 0;
            for (const double x : dq.values) squares += x * x;
            const double size = 0.07 * std::sqrt(squares / static_cast<double>(dq.rows));
            for (std::ptrdiff_t i = 15; i < dq.rows; i += 16)
                for (std::ptrdiff_t c = 0; c < d; ++c) dq(i, c) += 4 * size * mean_key[static_cast<std::size_t>(c)];
            const ErrorMeasure planted = attribution::errors_of(run[Output::dq], truth, Output::dq, mean_key).measure();
            EXPECT_GT(planted.mean_key_share, 0.9) << d;
            // Of 64 rows with random signs the coherence has a standard deviation of some 0.16 (sqrt(pi/2/64)).
            EXPECT_LT(std::abs(own.mean_key_sign), 0.5) << d;
            EXPECT_GT(planted.mean_key_sign, 0.6) << d;
        }
}

// jax-ml/jax#40128, ROCm/aiter#3070: the gradient of a sink logit, dsink = -sum_i p_sink,i delta_i, is a sum that nearly
// cancels: |sum|/sum|terms| is 1e-5 to 6e-4 there, and 5e-2 is the tolerance. With delta from bf16 O its error is that of O's
// cast, coherent or not; with delta = sum P dP in fp32 it is small.
// A sink is a key of zeros with value zero whose score is the bias: no schedule needs a field for it.
TEST(Row10, DsinkNeedsDeltaFromPAndDp) {
    struct Shape {
        std::ptrdiff_t window, n, d;
        Format format = bf16;
    };
    // The report's head size with both of its windows, and the others.
    for (const auto& [window, n, d, format] :
         {Shape{32, 192, 128}, Shape{64, 192, 128}, Shape{32, 64, 64}, Shape{32, 64, 96}, Shape{32, 64, 256},
          Shape{32, 64, 64, fp16}, Shape{32, 64, 96, fp16}}) {
        Head head(n, n + 1, d, 12, 7);  // 7 query heads a key head, as 28 on 4
        head.causal = false;
        for (std::ptrdiff_t c = 0; c < d; ++c) head.k(0, c) = head.v(0, c) = 0;
        for (int h = 0; h < 7; ++h) {
            Matrix bias(n, n + 1, -std::numeric_limits<double>::infinity());
            for (std::ptrdiff_t i = 0; i < n; ++i) {
                bias(i, 0) = 0.5;  // the sink's logit
                for (std::ptrdiff_t j = std::max<std::ptrdiff_t>(0, i - window + 1); j <= i; ++j) bias(i, j + 1) = 0;
            }
            head.bias.push_back(std::move(bias));
        }
        // Terms of the size of the report's: v and dO of some 16; dO of the later half of the rows scaled so that the sum of
        // all is 0 but for the rounding of dO to bf16, some 2^-9/sqrt(n d/2) = 2e-5 of the terms.
        for (double& x : head.v.values) x *= 16;
        const TruthOptions with_matrices{.correctly_rounded = false, .keep_matrices = true};
        const GroupTruth unscaled = attention_truth(head.problem(), with_matrices);
        for (std::size_t h = 0; h < 7; ++h) {
            double earlier = 0, later = 0;
            for (std::ptrdiff_t i = 0; i < n; ++i) (i < n / 2 ? earlier : later) += unscaled.heads[h].ds(i, 0);
            for (std::ptrdiff_t i = 0; i < n; ++i)
                for (std::ptrdiff_t c = 0; c < d; ++c)
                    head.dout[h](i, c) = round(head.dout[h](i, c) * (i < n / 2 ? 16 : -16 * earlier / later), format,
                                               Rounding::nearest_even);
        }
        const GroupTruth truth = attention_truth(head.problem(), with_matrices);
        const auto dsink = [&](RoundingPlan plan) {
            Seen ds(Site::ds);
            (void)run(head, plan, &ds);
            std::vector<double> sums(7, 0.0);
            for (const Seen::Tile& tile : ds.tiles)
                if (tile.where.key0 == 0)
                    for (std::ptrdiff_t i = 0; i < tile.value.rows; ++i)
                        sums[static_cast<std::size_t>(tile.where.head)] += tile.value(i, 0);
            return sums;
        };
        RoundingPlan from_o = in_format(preset("fa2", d), format), from_p = from_o;
        from_p.schedule.delta_from = DeltaFrom::p_dp;
        const std::vector<double> with_o = dsink(from_o), with_p = dsink(from_p);
        double o_squared = 0, p_squared = 0, cancellation = 1e300, o_off = 0, p_off = 0;
        for (std::size_t h = 0; h < 7; ++h) {
            double exact = 0, magnitude = 0;
            for (std::ptrdiff_t i = 0; i < n; ++i) {
                exact += truth.heads[h].ds(i, 0);
                magnitude += std::abs(truth.heads[h].ds(i, 0));
            }
            cancellation = std::min(cancellation, magnitude / std::max(std::abs(exact), 1e-300));
            o_off = std::max(o_off, std::abs(with_o[h] - exact));
            p_off = std::max(p_off, std::abs(with_p[h] - exact));
            o_squared += (with_o[h] - exact) * (with_o[h] - exact) / (magnitude * magnitude);
            p_squared += (with_p[h] - exact) * (with_p[h] - exact) / (magnitude * magnitude);
        }
        // Of fewer terms the rounding of dO leaves more: (192 * 128) / (64 * 64) to the power 1/2 is 2.4.
        EXPECT_GT(cancellation, n == 192 ? 1 / 6e-4 : 1 / 6e-4 / 2.4) << window << " " << d;
        constexpr double report_tolerance = 5e-2;
        if (n == 192) {  // of the terms of the report's number of rows
            EXPECT_GT(o_off, report_tolerance) << window;
        }
        EXPECT_LT(p_off, report_tolerance) << window << " " << d;
        // O's cast: three bits more in fp16.
        EXPECT_GT(std::sqrt(o_squared / 7), format == bf16 ? 3e-5 : 3e-5 / 8) << window << " " << d;
        EXPECT_LT(std::sqrt(p_squared / 7), 1e-6) << window << " " << d;
    }
}

// mosaicml/llm-foundry#284, triton-lang/triton#1957, Dao-AILab/flash-attention#337: ALiBi. N = 2048 keys, slope 1/2: the
// bias reaches -1024. Added in bf16 the score is off by up to half an ulp: 1 where |s| >= 256 (ulp 2), 2 from 512 on.
TEST(Row15, AlibiAddedInALowFormat) {
    for (const std::ptrdiff_t d : head_sizes) {
        constexpr std::ptrdiff_t n = 2048;
        Head head(1, n, d, 13);
        head.causal = false;
        Matrix bias(1, n);
        for (std::ptrdiff_t j = 0; j < n; ++j) bias(0, j) = 0.5 * static_cast<double>(j - (n - 1));
        head.bias.push_back(bias);
        for (const Format& format : {bf16, fp16, fp32}) {
            RoundingPlan plan;
            plan.schedule.scale_at = ScaleAt::scores;
            plan.schedule.exp_base = plan.schedule.bwd_exp_base = ExpBase::e;
            plan.set(Site::s_scale, Rule{format});
            Seen seen(Site::s_scale);
            (void)attention_forward(head.group(), plan, &seen);
            double below_256 = 0, above_512 = 0;
            for (const Seen::Tile& tile : seen.tiles)
                for (std::ptrdiff_t j = 0; j < tile.value.cols; ++j) {
                    const double error = std::abs(tile.value(0, j) - tile.exact(0, j));
                    const double size = std::abs(tile.exact(0, j));
                    // One rounding of the scaled score, |q.k| scale < 8, and one of the sum.
                    EXPECT_LE(error, ulp(size, format) / 2 + ulp(8, format)) << size;
                    if (size < 256) below_256 = std::max(below_256, error);
                    if (size >= 512) above_512 = std::max(above_512, error);
                }
            if (format == bf16) {
                EXPECT_GT(above_512, 1.8) << d;  // ulp 4: errors up to 2
                EXPECT_LE(below_256, 0.6) << d;  // ulp 1, and the scaled score's own rounding
            } else if (format == fp16) {
                EXPECT_GT(above_512, 0.22) << d;  // ulp 0.5
                EXPECT_LE(below_256, 0.08) << d;  // ulp 0.125
            } else {
                EXPECT_LT(above_512, 1e-4) << d;
            }
        }
    }
}

}  // namespace
}  // namespace faultline::testing
