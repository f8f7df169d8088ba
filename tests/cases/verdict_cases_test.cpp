// SPDX-License-Identifier: Apache-2.0
// Rows 14, 23, 24: "different from eager, is this a bug?", and what a trainer must let a person change.
#include <cstdio>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/attribution/group_run.hpp>
#include <faultline/verdict/report.hpp>

#include "cases.hpp"
#include "paths.hpp"

namespace faultline::testing {
namespace {

HeadArray deviates(std::ptrdiff_t batch, std::ptrdiff_t heads, std::ptrdiff_t n, std::ptrdiff_t d, double size,
                   const Format& format, std::uint64_t seed) {
    const Matrix m = random_matrix(batch * heads * n, d, size, seed, format);
    return {batch, heads, n, d, m.values, format == fp16 ? Dtype::f16 : Dtype::bf16};
}

struct Report {
    const char* name;
    std::ptrdiff_t batch, heads, n;
    double v_size;
    Format format;
    std::ptrdiff_t d = 64;
};

// Dao-AILab/flash-attention#1624, #16, #145, #434, #1071, #1128, #1359, #886: the answer is the error of each against truth,
// and whether the kernel's is within its rounding. Shapes of the reports with fewer heads; v of #1624 has size 10.
TEST(Row23, DifferentFromEagerIsNoBug) {
    for (const Report& report : {Report{"#1624", 1, 1, 225, 10, fp16}, Report{"#16", 2, 2, 10, 1, fp16},
                                 Report{"#1071 bf16", 1, 1, 256, 1, bf16}, Report{"#1071 fp16", 1, 1, 256, 1, fp16},
                                 Report{"#1128", 1, 2, 128, 1, fp16},
                                 // and at the other head sizes
                                 Report{"96", 1, 1, 64, 1, bf16, 96}, Report{"128", 1, 1, 64, 1, fp16, 128},
                                 Report{"256", 1, 1, 64, 1, bf16, 256}}) {
        Capture capture;
        capture.path = report.name;
        LayerCapture& layer = capture.layers.emplace_back();
        layer.name = "report";
        layer.causal = false;
        const auto make = [&](double size, std::uint64_t seed) {
            return deviates(report.batch, report.heads, report.n, report.d, size, report.format, seed);
        };
        layer.q = make(1, 31), layer.k = make(1, 32), layer.v = make(report.v_size, 33), layer.dout = make(1, 34);
        const RoundingPlan flash = in_format(preset("fa2", report.d), report.format);
        const RoundingPlan eager = in_format(preset("standard-bf16", report.d), report.format);
        double apart = 0, error[2] = {0, 0};
        std::vector<Matrix> o[2];
        for (const attribution::Group& group : attribution::groups_of(layer, {}, 0)) {
            const GroupTruth truth = attention_truth(group.problem, {.correctly_rounded = false});
            int which = 0;
            for (const RoundingPlan* plan : {&flash, &eager}) {
                const Matrix m = attention_forward(group.inputs, *plan).heads[0].o;
                error[which] = std::max(error[which], relative_error(m.view(), truth.heads[0].o));
                o[which++].push_back(m);
            }
            for (std::size_t a = 0; a < o[0].back().values.size(); ++a)
                apart = std::max(apart, std::abs(o[0].back().values[a] - o[1].back().values[a]));
        }
        EXPECT_GT(apart, 0) << report.name << ": they do differ";
        EXPECT_LT(error[0], error[1]) << report.name << ": flash is nearer to the truth than eager";
        const double level = std::ldexp(1.0, -report.format.precision);  // an ulp of 1, over 2
        EXPECT_LT(error[0], level) << report.name;

        ObservedKernel kernel;
        kernel.name = "flash";
        for (const Output output : all_outputs) {
            HeadArray all{report.batch, report.heads, report.n, report.d, {}, layer.q.dtype};
            for (const attribution::Group& group : attribution::groups_of(layer, {}, 0)) {
                const Matrix m = attribution::run_plan(group, flash)[output][0];
                all.values.insert(all.values.end(), m.values.begin(), m.values.end());
            }
            kernel.outputs[static_cast<std::size_t>(output)] = std::move(all);
        }
        layer.observed.push_back(std::move(kernel));
        CheckOptions options;
        options.runs = 16;
        const Check found = check(capture, flash, options);
        EXPECT_EQ(found.verdict(), Verdict::within_rounding) << table(found, true);
    }
}

std::string output_of(const std::string& command) {
    std::string out;
    FILE* pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) return out;
    char buffer[4096];
    for (std::size_t n = 0; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) out.append(buffer, n);
    pclose(pipe);
    return out;
}

// karpathy/nanoGPT#524, #554 and the others: a run that explodes at 30k to 100k iterations, cured by turning flash off, by
// fp16, by AdamW's epsilon, by the seed. Not to be reproduced here; what has to be there is each of the knobs.
TEST(Row14, TheTrainerHasTheFiveKnobs) {
    const std::string help = output_of(test::program() + " train --help");
    for (const char* knob : {"--attention", "--precision", "--eps", "--seed"})
        EXPECT_THAT(help, ::testing::HasSubstr(knob));
    // The softmax is the attention plan's: any preset or file.
    EXPECT_THAT(help, ::testing::HasSubstr("PLAN|FILE.toml"));
}

// The class of row 24 (training_cases_test.cpp) that attention has: a forward and a backward that do not compute the same p. K scaled in bf16 in the
// backward alone (FastVideo#1730) makes the recomputed scores disagree with lse.
TEST(Row24, AForwardAndABackwardThatDisagreeOnPAreFarOff) {
    for (const Format& format : {bf16, fp16})
        for (const std::ptrdiff_t d : head_sizes) {
            Head head(64, 64, d, 41, 1, 20.0);
            const HeadTruth truth = attention_truth(head.problem(), {.correctly_rounded = false}).heads[0];
            const RoundingPlan plan = in_format(preset("fa2", d), format);
            const GroupForward forward = attention_forward(head.group(), plan);
            const double agreeing =
                relative_error(attention_backward(head.group(), forward, plan).dq[0].view(), truth.dq);
            // K scale in the format, and the scale 1 after it: the same function in exact arithmetic.
            Matrix scaled = head.k;
            for (double& x : scaled.values) x = round(x * head.scale, format, Rounding::nearest_even) / head.scale;
            HeadGroup in = head.group();
            in.k = scaled.view();
            RoundingPlan float_keys = plan;
            float_keys.set(Site::k_cast, Rule{});
            const double disagreeing =
                relative_error(attention_backward(in, forward, float_keys).dq[0].view(), truth.dq);
            if (d == 64 || d == 256) {
                EXPECT_NEAR(disagreeing, agreeing, 1e-3 * agreeing);  // 1/8 and 1/16 round nothing
                continue;
            }
            // Three quarters of the squared error and more are the disagreement's.
            EXPECT_GT(disagreeing, (format == bf16 ? 3 : 2) * agreeing) << d;
        }
}

}  // namespace
}  // namespace faultline::testing
