// SPDX-License-Identifier: Apache-2.0
// The steps that ThunderKittens has and others have not: lse in the accumulator of the backward's scores, a fused argument of
// the rescale, eight partial sums by column. Against the kernel written a second time, as plain loops over floats, and a value
// worked out by hand. And the preset against what the kernel returned on a card.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include <faultline/base/error.hpp>
#include <faultline/tensor/safetensors.hpp>
#include <faultline/tensor_core/accumulate.hpp>

#include "heads.hpp"
#include "log.hpp"
#include "paths.hpp"

namespace faultline::testing {
namespace {

constexpr int d = 24, n = 44, rows_of_a_tile = 12, keys_of_a_tile = 16, bwd_rows = 8, bwd_keys = 16;

/// The preset with its tiles small, every product a chain of fma over ascending k, and exp2 and log2 correctly rounded: what
/// plain loops over floats can repeat.
RoundingPlan plain_plan() {
    RoundingPlan plan = preset("thunderkittens", d);
    Schedule& s = plan.schedule;
    s.block_q = rows_of_a_tile;
    s.block_k = keys_of_a_tile;
    s.bwd_block_q = bwd_rows;
    s.bwd_block_k = bwd_keys;
    s.functions = Functions::correctly_rounded;
    for (const SiteInfo& site : sites()) {
        Rule rule = plan[site.site];
        if (rule.accumulation.kind != Accumulation::Kind::fused) continue;
        rule.accumulation = *find_accumulation("fp32-fma");
        plan.set(site.site, rule);
    }
    return plan;
}

float at(const Matrix& m, int i, int j) { return static_cast<float>(m(i, j)); }
float to_bf16(float x) { return static_cast<float>(round(x, bf16, Rounding::nearest_even)); }
// Rounded from binary64: a float's exp2 and log2 lie at a midpoint of floats closer than binary64 tells in no case here.
float exp2_of(float x) { return static_cast<float>(std::exp2(static_cast<double>(x))); }
float log2_of(float x) { return static_cast<float>(std::log2(static_cast<double>(x))); }

/// Eight sums by index mod 8, joined as the threads of a quad do: within a thread, with the thread two on, with the next.
template <class Add>
float by_eights(int count, Add add) {
    float part[8] = {};
    for (int j = 0; j < count; ++j) part[j % 8] = add(part[j % 8], j);
    float thread[4];
    for (int t = 0; t < 4; ++t) thread[t] = part[2 * t] + part[2 * t + 1];
    return (thread[0] + thread[2]) + (thread[1] + thread[3]);
}

struct Outputs {
    Matrix o{n, d}, dq{n, d}, dk{n, d}, dv{n, d};
    std::vector<float> lse = std::vector<float>(n);
};

/// One causal head: the comments name lines of mha_h100.cu.
Outputs plain_loops(const Head& head) {
    const Matrix &q = head.q[0], &dout = head.dout[0], &k = head.k, &v = head.v;
    const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(d)));
    const float c = static_cast<float>(static_cast<double>(scale) * 1.4426950408889634074);
    const float root = static_cast<float>(std::sqrt(static_cast<double>(d))), ln2 = 0.69314718056f;
    Outputs out;
    std::vector<float> stored(n), delta(n);
    for (int i = 0; i < n; ++i) {
        const int last = std::min(n, (i / rows_of_a_tile + 1) * rows_of_a_tile);  // of its rows' tile
        float top = -INFINITY, sum = 0, top_scaled = 0;
        std::vector<float> o(d, 0.0f);
        for (int key0 = 0; key0 < last; key0 += keys_of_a_tile) {
            const int keys = std::min(keys_of_a_tile, n - key0);
            std::vector<float> s(static_cast<std::size_t>(keys));
            const float before = top;
            for (int j = 0; j < keys; ++j) {
                float x = 0;
                for (int e = 0; e < d; ++e) x = std::fma(at(q, i, e), at(k, key0 + j, e), x);
                s[static_cast<std::size_t>(j)] = key0 + j > i ? -INFINITY : x;
                top = std::max(top, s[static_cast<std::size_t>(j)]);
            }
            top_scaled = top * c;                                           // :184
            const float alpha = exp2_of(std::fma(before, c, -top_scaled));  // :155, :191-192
            for (float& x : s) x = exp2_of(std::fma(x, c, -top_scaled));    // :183, :189-190
            const float tile = by_eights(keys, [&](float a, int j) { return a + s[static_cast<std::size_t>(j)]; });
            sum = std::fma(alpha, sum, tile);  // :193-194
            for (int e = 0; e < d; ++e) {
                float& x = o[static_cast<std::size_t>(e)];
                x = x * alpha;  // :197
                for (int j = 0; j < keys; ++j)
                    x = std::fma(to_bf16(s[static_cast<std::size_t>(j)]), at(v, key0 + j, e), x);
            }
        }
        const float inverse = 1.0f / sum;
        for (int e = 0; e < d; ++e) out.o(i, e) = to_bf16(o[static_cast<std::size_t>(e)] * inverse);
        const auto row = static_cast<std::size_t>(i);
        out.lse[row] = std::fma(log2_of(sum), ln2, top_scaled * ln2);  // :216-218
        stored[row] = out.lse[row] * -root;                            // :220-221
        delta[row] = by_eights(d, [&](float a, int e) { return std::fma(at(dout, i, e), at(out.o, i, e), a); });
    }
    std::vector<std::vector<float>> p(n, std::vector<float>(n)), ds = p;  // as the products receive them
    for (int i = 0; i < n; ++i)
        for (int j = 0; j <= i; ++j) {
            float x = stored[static_cast<std::size_t>(i)];  // :418
            for (int e = 0; e < d; ++e) x = std::fma(at(q, i, e), at(k, j, e), x);
            const float probability = exp2_of(x * c);  // :429-434
            float dp = 0;
            for (int e = 0; e < d; ++e) dp = std::fma(at(dout, i, e), at(v, j, e), dp);
            const float g = probability * (dp - delta[static_cast<std::size_t>(i)]) * scale;  // :437-441
            p[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)] = to_bf16(probability);
            ds[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)] = to_bf16(g);
        }
    for (int j = 0; j < n; ++j)
        for (int e = 0; e < d; ++e) {
            float dk = 0, dv = 0;
            for (int i = 0; i < n; ++i) {  // p and ds are 0 above the diagonal
                dv = std::fma(p[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)], at(dout, i, e), dv);
                dk = std::fma(ds[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)], at(q, i, e), dk);
            }
            out.dk(j, e) = dk;
            out.dv(j, e) = dv;
        }
    for (int i = 0; i < n; ++i)
        for (int e = 0; e < d; ++e) {
            float dq = 0;
            for (int key0 = 0; key0 < n; key0 += bwd_keys) {
                float part = 0;
                for (int j = key0; j < std::min(n, key0 + bwd_keys); ++j)
                    part = std::fma(ds[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)], at(k, j, e), part);
                dq += part;  // :583
            }
            out.dq(i, e) = dq;
        }
    return out;
}

TEST(ThunderKittens, IsTheKernelWrittenAsPlainLoopsOverFloats) {
    // Logits of unit size, and some hundreds, where a fused rescale is not 1 though the maximum stays.
    for (const double logits : {1.0, 200.0}) {
        const Head head(n, n, d, 3, 1, logits);
        const Outputs expected = plain_loops(head);
        const Result got = run(head, plain_plan());
        const HeadForward& forward = got.forward.heads[0];
        for (int i = 0; i < n; ++i) {
            EXPECT_EQ(forward.lse[static_cast<std::size_t>(i)], expected.lse[static_cast<std::size_t>(i)]) << i;
            for (int e = 0; e < d; ++e) {
                ASSERT_EQ(forward.o(i, e), expected.o(i, e)) << i << " " << e << " " << logits;
                ASSERT_EQ(got.backward.dv(i, e), expected.dv(i, e)) << i << " " << e << " " << logits;
                ASSERT_EQ(got.backward.dk(i, e), expected.dk(i, e)) << i << " " << e << " " << logits;
                ASSERT_EQ(got.backward.dq[0](i, e), expected.dq(i, e)) << i << " " << e << " " << logits;
            }
        }
    }
}

TEST(ThunderKittens, EachOfItsStepsShowsInTheBits) {
    // Large logits show a rescale that is not 1, small ones the last bits of sums of many terms.
    const Head heads[] = {Head(n, n, d, 3, 1, 1.0), Head(n, n, d, 3, 1, 20.0), Head(n, n, d, 3, 1, 200.0)};
    const auto differs = [&](auto&& change) {
        RoundingPlan plan = plain_plan();
        change(plan.schedule);
        return std::any_of(std::begin(heads), std::end(heads), [&](const Head& head) {
            const Result whole = run(head, plain_plan()), other = run(head, plan);
            return other.forward.heads[0].lse != whole.forward.heads[0].lse || other.backward.dq != whole.backward.dq ||
                   other.backward.dk != whole.backward.dk || other.backward.dv != whole.backward.dv;
        });
    };
    EXPECT_TRUE(differs([](Schedule& s) { s.lse_in = LseIn::argument; }));
    EXPECT_TRUE(differs([](Schedule& s) { s.rescale_argument = ArgumentForm::subtract_then_scale; }));
    EXPECT_TRUE(differs([](Schedule& s) { s.row_sum_order = RowSumOrder::quad; }));
    EXPECT_TRUE(differs([](Schedule& s) { s.lse_form = LseForm::log2; }));
    EXPECT_TRUE(differs([](Schedule& s) { s.delta_order = DeltaOrder::sequential; }));
}

// What the kernel itself returned on an H200 (tests/data/README.md). Its call had 768 rows, of which the file has the 256 that are
// not 0: three warpgroups go through the key tiles of the last of their 192 rows, tiles without a key for the first among
// them, and each multiplies by a rescale that is not 1.
TEST(ThunderKittens, IsTheKernelOnACard) {
    const TensorSet set =
        read_safetensors((test::source_dir() / "tests/data/thunderkittens-head.safetensors").string());
    constexpr std::ptrdiff_t rows = 256, cols = 64, of_the_call = 768;
    const auto padded = [&](const char* name) {
        const std::vector<double> values = set.at(std::string("layer0.") + name).to_double();
        Matrix m(of_the_call, cols);
        std::copy(values.begin(), values.end(), m.values.begin());
        return m;
    };
    Head head(1, 1, cols, 1);
    head.q = {padded("q")};
    head.dout = {padded("do")};
    head.k = padded("k");
    head.v = padded("v");
    const auto returned = [&](const char* name) {
        return set.at(std::string("layer0.thunderkittens.") + name).to_double();
    };
    const auto first = [&](std::vector<double> values, std::ptrdiff_t width) {
        values.resize(static_cast<std::size_t>(rows * width));
        return values;
    };
    const Result got = run(head, preset("thunderkittens", cols));
    EXPECT_EQ(first(got.forward.heads[0].o.values, cols), returned("o"));
    EXPECT_EQ(first(got.forward.heads[0].lse, 1), returned("lse"));
    EXPECT_EQ(first(got.backward.dq[0].values, cols), returned("dq"));
    EXPECT_EQ(first(got.backward.dk.values, cols), returned("dk"));
    EXPECT_EQ(first(got.backward.dv.values, cols), returned("dv"));
    // And by no other of the plans that differ from it in one of these.
    for (const auto& change :
         {+[](Schedule& s) { s.lse_in = LseIn::argument; },
          +[](Schedule& s) { s.rescale_argument = ArgumentForm::subtract_then_scale; },
          +[](Schedule& s) { s.row_sum_order = RowSumOrder::quad; }, +[](Schedule& s) { s.lse_form = LseForm::log2; },
          +[](Schedule& s) { s.delta_order = DeltaOrder::sequential; },
          +[](Schedule& s) { s.argument = ArgumentForm::unfused; }, +[](Schedule& s) { s.block_q = 64; },
          +[](Schedule& s) { s.bwd_block_k = 64; }}) {
        RoundingPlan other = preset("thunderkittens", cols);
        change(other.schedule);
        const Result result = run(head, other);
        EXPECT_FALSE(first(result.forward.heads[0].lse, 1) == returned("lse") &&
                     first(result.backward.dq[0].values, cols) == returned("dq"));
    }
}

// One query and two keys, d = 16, scale 1/4: scores 1024 and 1 - 2^-15 - 2^-17, so that lse is 256 and the accumulator starts
// at -1024. Hopper's unit aligns the 16 products with it at 2^(10-25) = 2^-15 and cuts: 2^-17 goes. The sum -1023 - 2^-15 is cut
// toward zero to 24 bits, multiples of 2^-14 there: -1023. A score by itself is exact, and -1023 - 2^-15 - 2^-17, rounded to
// nearest, is -1023 - 2^-14.
TEST(ThunderKittens, TheAccumulatorCutsAtTheSizeOfLse) {
    Head head(1, 2, 16, 1);
    head.causal = false;
    for (Matrix* m : {&head.q[0], &head.k}) std::fill(m->values.begin(), m->values.end(), 0.0);
    head.q[0](0, 0) = 1;
    head.q[0](0, 1) = -1.0 / 128;
    head.q[0](0, 2) = -1.0 / 256;
    head.q[0](0, 3) = 32;
    head.k(0, 3) = 32;
    head.k(1, 0) = 1;
    head.k(1, 1) = 1.0 / 256;
    head.k(1, 2) = 1.0 / 512;
    const auto passed = [&](Site site, LseIn where) {
        RoundingPlan plan = preset("thunderkittens", 16);
        plan.schedule.lse_in = where;
        Log log;
        run(head, plan, &log);
        for (const Event& e : log.events)
            if (e.site == site) return e.value;
        return std::vector<double>{};
    };
    EXPECT_EQ(passed(Site::lse, LseIn::accumulator), (std::vector<double>{256}));
    EXPECT_EQ(passed(Site::lse_scale, LseIn::accumulator), (std::vector<double>{1024}));
    EXPECT_EQ(passed(Site::bwd_s_accumulate, LseIn::accumulator), (std::vector<double>{0, -1023}));
    EXPECT_EQ(passed(Site::bwd_s_accumulate, LseIn::argument),
              (std::vector<double>{1024, 1 - std::ldexp(1.0, -15) - std::ldexp(1.0, -17)}));
    const double c = static_cast<float>(0.25 * 1.4426950408889634074);
    const auto argument = [&](double x) { return static_cast<double>(static_cast<float>(x * c)); };
    EXPECT_EQ(passed(Site::bwd_exp_argument, LseIn::accumulator), (std::vector<double>{0, argument(-1023)}));
    EXPECT_EQ(passed(Site::bwd_exp_argument, LseIn::argument),
              (std::vector<double>{0, argument(-1023 - std::ldexp(1.0, -14))}));
}

// Under a softcap the sum is not the logit that lse is of, and lse is subtracted behind the cap.
TEST(ThunderKittens, SubtractsBehindASoftcap) {
    Head head(n, n, d, 3, 1, 2.0);
    head.softcap = 4;
    RoundingPlan plan = preset("thunderkittens", d);
    const Result in_accumulator = run(head, plan);
    plan.schedule.lse_in = LseIn::argument;
    EXPECT_EQ(in_accumulator.backward.dk, run(head, plan).backward.dk);
}

TEST(ThunderKittens, WhatCannotStandBesideItIsSaidInASentence) {
    RoundingPlan plan = preset("thunderkittens", d);
    plan.schedule.bwd_argument = ArgumentForm::unfused;
    EXPECT_EQ(
        problem_with(plan),
        "schedule.lse_in: is \"accumulator\": expected bwd_argument = \"subtract_then_scale\", scale_at = \"exponent\" and "
        "p_saved = false, because the difference is what is scaled");
}

}  // namespace
}  // namespace faultline::testing
