// SPDX-License-Identifier: Apache-2.0
// Rows 18, 19, 21: orders of sums, merged parts, accumulator bits.
#include <gtest/gtest.h>

#include <faultline/generation/family.hpp>
#include <faultline/tensor_core/accumulate.hpp>

#include "cases.hpp"

namespace faultline::testing {
namespace {

// Dao-AILab/flash-attention#414, #988, #2244, #384: dQ differs from run to run because its tiles are added by atomics, in any
// order; dK and dV do not. Two orders of the same fp32 adds stand for two runs.
TEST(Row18, TheOrderOfFp32AddsIsTheSpreadOfDq) {
    for (const std::ptrdiff_t d : head_sizes) {
        const Head head(256, 256, d, 14);
        RoundingPlan plan = in_format(preset("fa2", d), d == 96 ? fp16 : bf16);
        plan.schedule.bwd_block_k = 32;
        plan.set(Site::dq_cast, Rule{fp32});  // before the cast, where the spread is
        RoundingPlan other = plan;
        other.schedule.bwd_key_order =
            plan.schedule.bwd_key_order == Order::ascending ? Order::descending : Order::ascending;
        const Result a = run(head, plan), b = run(head, other);
        EXPECT_EQ(a.backward.dk, b.backward.dk) << d;
        EXPECT_EQ(a.backward.dv, b.backward.dv) << d;
        std::size_t differing = 0;
        double row_rms = 0, spread = 0;
        for (std::size_t i = 0; i < a.backward.dq[0].values.size(); ++i) {
            const double x = a.backward.dq[0].values[i], y = b.backward.dq[0].values[i];
            differing += x != y;
            row_rms += x * x, spread = std::max(spread, std::abs(x - y));
        }
        row_rms = std::sqrt(row_rms / static_cast<double>(a.backward.dq[0].values.size()));
        EXPECT_GT(differing, a.backward.dq[0].values.size() / 10) << d;
        // Eight tiles: at most 8 additions, each off by half an ulp of a partial sum, some 16 times the rms at most.
        EXPECT_LT(spread, 8 * 16 * row_rms * 0x1p-24) << d;
        // A plan that fixes the order is the same run twice.
        EXPECT_EQ(run(head, plan).backward.dq[0], a.backward.dq[0]) << d;
    }
}

// zhuzilin/ring-flash-attention#22, #42, Dao-AILab/flash-attention#2723, TransformerEngine#716: N keys in R shards, the
// output of each stored in bf16, merged by lse. The error grows with R; with fp32 parts it does not.
TEST(Row19, MergingPartsInBf16LosesWithTheNumberOfShards) {
    for (const std::ptrdiff_t d : head_sizes) {
        LayerCapture layer =
            make_inputs(*find_family("ring"),
                        {.heads = 1, .kv_heads = 1, .queries = 64, .keys = 256, .head_dim = d, .causal = true}, 15);
        Head head(64, 256, d, 15);
        head.q[0].values = layer.q.values, head.k.values = layer.k.values, head.v.values = layer.v.values;
        head.causal = false;
        const HeadTruth truth = attention_truth(head.problem(), {.correctly_rounded = false}).heads[0];
        double bf16_before = 0, fp32_one = 0;
        for (const int shards : {1, 2, 4, 8}) {
            RoundingPlan plan = preset("fa2-unfused", d);
            plan.schedule.block_k = 32;
            plan.schedule.key_splits = shards;
            plan.set(Site::o_cast, Rule{});  // what is lost before the output is stored
            plan.set(Site::p_cast, Rule{});
            plan.set(Site::merge, Rule{fp32});
            plan.set(Site::partial_o_cast, Rule{fp32});
            const double fp32_error = relative_error(run(head, plan).forward.heads[0].o.view(), truth.o);
            plan.set(Site::partial_o_cast, Rule{fp16});
            const double fp16_error = relative_error(run(head, plan).forward.heads[0].o.view(), truth.o);
            plan.set(Site::partial_o_cast, Rule{bf16});
            const double bf16_error = relative_error(run(head, plan).forward.heads[0].o.view(), truth.o);
            if (shards == 1) {
                fp32_one = fp32_error;
                EXPECT_EQ(bf16_error, fp32_error) << "one shard is not merged";
            } else {
                EXPECT_GT(bf16_error, 100 * fp32_error) << d << " R " << shards;
                EXPECT_GT(bf16_error, 0.9 * bf16_before) << d << " R " << shards;
                // fp16 has three bits more: an eighth of the rounding error.
                EXPECT_GT(fp16_error, bf16_error / 16) << d << " R " << shards;
                EXPECT_LT(fp16_error, bf16_error / 4) << d << " R " << shards;
                EXPECT_LT(fp32_error, 8 * fp32_one + 1e-6) << d << " R " << shards;
            }
            bf16_before = bf16_error;
        }
        // The values turn sign from shard to shard, so that parts are larger than the whole: worse than storing O once.
        EXPECT_GT(bf16_before, 2 * 0x1p-9) << d;
    }
}

double sum_on(const char* unit, const std::vector<std::pair<double, double>>& products) {
    const Accumulation accumulation = find_accumulation(unit).value();
    Matrix a(1, 32), b(32, 1), c(1, 1);
    for (std::size_t i = 0; i < products.size(); ++i)
        a(0, static_cast<std::ptrdiff_t>(i)) = products[i].first,
             b(static_cast<std::ptrdiff_t>(i), 0) = products[i].second;
    multiply_accumulate(accumulation, a.view(), b.view(), c.view());
    return c(0, 0);
}

// deepseek-ai/DeepGEMM#37, #176, DeepSeek-V3#197: how many bits an accumulator keeps. e4m3: 16*16 + 2^-e as 2^-a * 2^-b.
// Hopper's fp8 unit keeps 13 fraction bits of the largest product, 2^8: what lies below 2^-5 vanishes.
TEST(Row21, AccumulatorBitsByTheSmallestTermThatSurvives) {
    for (int e = 1; e <= 12; ++e) {
        const int a = e / 2, b = e - a;  // 2^-a and 2^-b are e4m3 values
        const std::vector<std::pair<double, double>> products{{16, 16}, {std::ldexp(1, -a), std::ldexp(1, -b)}};
        const double exact = 256 + std::ldexp(1, -e);
        EXPECT_EQ(sum_on("hopper-wgmma-e4m3", products), e <= 5 ? exact : 256) << e;
        EXPECT_EQ(sum_on("ada-mma-e4m3", products), e <= 5 ? exact : 256) << e;
        EXPECT_EQ(sum_on("blackwell-tcgen05-e4m3", products), exact) << e;
    }
    // bf16: 1 + 2^-e; 25 fraction bits on Hopper, 24 on Ampere, and then the result's 23: the term must outlive both.
    // A second pair brings the sum of small terms up to where the result shows it: 2^j times the term as 2^j terms.
    for (int e = 20; e <= 28; ++e) {
        std::vector<std::pair<double, double>> products{{1, 1}};
        for (int i = 0; i < 7; ++i) products.emplace_back(std::ldexp(1, -e / 2), std::ldexp(1, -(e - e / 2)));
        const auto expected = [&](int bits) {
            const double kept = e <= bits ? 7 * std::ldexp(1, -e) : 0;     // each term truncated by itself
            return 1 + std::ldexp(std::floor(std::ldexp(kept, 23)), -23);  // the result toward zero
        };
        EXPECT_EQ(sum_on("hopper-mma-bf16", products), expected(25)) << e;
        EXPECT_EQ(sum_on("ampere-mma-bf16", products), expected(24)) << e;
        EXPECT_EQ(sum_on("hopper-mma-fp16", products), expected(25)) << e;
        EXPECT_EQ(sum_on("ampere-mma-fp16", products), expected(24)) << e;
    }
    // A negative small term shows truncation toward zero: 1 - 2^-25 is below 1 and its 23 bits end below 1 too.
    EXPECT_EQ(sum_on("hopper-mma-bf16", {{1, 1}, {-0x1p-12, 0x1p-13}}), 1 - 0x1p-24);
    EXPECT_EQ(sum_on("hopper-mma-bf16", {{1, 1}, {-0x1p-13, 0x1p-13}}), 1.0);  // 2^-26 is not kept
    // The report's own 448 + 7.5 tells nothing: 7.5 is a multiple of 2^-5.
    EXPECT_EQ(sum_on("hopper-wgmma-e4m3", {{448, 1}, {7.5, 1}}), 455.5);
}

}  // namespace
}  // namespace faultline::testing
