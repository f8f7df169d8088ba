// SPDX-License-Identifier: Apache-2.0
// Every family is what its description says, judged by certified truth.
#include <cmath>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/attribution/group_run.hpp>
#include <faultline/base/error.hpp>
#include <faultline/format/format.hpp>
#include <faultline/generation/family.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/probes/saturation.hpp>

namespace faultline {
namespace {

using ::testing::HasSubstr;

const std::vector<std::ptrdiff_t> head_sizes{16, 64, 96, 128, 256};

InputShape shape_of(std::ptrdiff_t head_dim) {
    return {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 32, .keys = 32, .head_dim = head_dim, .causal = true};
}

LayerCapture made(std::string_view family, std::ptrdiff_t head_dim, std::uint64_t seed = 1) {
    return make_inputs(*find_family(family), shape_of(head_dim), seed);
}

HeadTruth truth_of_first_head(const LayerCapture& layer) {
    const attribution::Group group = attribution::groups_of(layer, {}, 0)[0];
    return attention_truth(group.problem, {.correctly_rounded = false, .keep_matrices = true}).heads[0];
}

double largest_in_row(const CertifiedMatrix& m, std::ptrdiff_t i) {
    double largest = m(i, 0);
    for (std::ptrdiff_t j = 1; j < m.cols; ++j) largest = std::max(largest, m(i, j));
    return largest;
}

TEST(Families, EveryValueIsExactInFiveFormats) {
    for (const InputFamily& family : input_families())
        for (const std::ptrdiff_t d : head_sizes) {
            const LayerCapture layer = made(family.name, d);
            for (const HeadArray* a : {&layer.q, &layer.k, &layer.v, &layer.dout})
                for (const double x : a->values)
                    for (const Format& format : {fp32, fp16, bf16, e5m2, e4m3})
                        ASSERT_EQ(round(x, format, Rounding::nearest_even), x) << family.name << " " << d;
        }
}

TEST(Families, DependOnSeedAndNameAlone) {
    std::set<std::vector<double>> seen;
    for (const InputFamily& family : input_families()) {
        EXPECT_EQ(made(family.name, 16).q.values, made(family.name, 16).q.values);
        EXPECT_NE(made(family.name, 16).k.values, made(family.name, 16, 2).k.values) << family.name;
        seen.insert(made(family.name, 16).k.values);
    }
    EXPECT_EQ(seen.size(), input_families().size()) << "two families have the same keys";
}

// In fp32, fp16, bf16 and both of fp8 alike: a file of any of these types holds the same numbers.
TEST(Families, AreCapturesThatAreReadBack) {
    std::vector<LayerCapture> layers;
    for (const InputFamily& family : input_families()) {
        layers.push_back(made(family.name, 64));
        observe(layers.back(), plan("fa2"), "fa2", 0, 1);
    }
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::e4m3, Dtype::e5m2}) {
        const Capture capture = capture_of(tensors_of(layers, dtype));
        ASSERT_EQ(capture.layers.size(), layers.size());
        for (const LayerCapture& layer : layers) {
            const LayerCapture& back = capture[layer.name];
            for (const auto input : {&LayerCapture::q, &LayerCapture::k, &LayerCapture::v, &LayerCapture::dout})
                EXPECT_EQ((back.*input).values, (layer.*input).values) << layer.name << " " << print_name(dtype);
            EXPECT_EQ(back.bias.has_value(), layer.bias.has_value()) << layer.name;
            if (back.bias && layer.bias) {
                EXPECT_EQ(back.bias->values, layer.bias->values) << layer.name;
            }
            EXPECT_EQ(back.sink, layer.sink) << layer.name;
            EXPECT_EQ(back.softcap, layer.softcap) << layer.name;
            EXPECT_EQ(back.causal, layer.causal) << layer.name;
            ASSERT_EQ(back.observed.size(), 1u);
            for (const Output output : all_outputs)
                EXPECT_EQ(back.observed[0][output]->values, layer.observed[0][output]->values) << layer.name;
        }
    }
}

// dk and dv of grouped heads are summed behind their cast in fa2: the sum's rounding is the last, and its type the file's.
TEST(Families, OutputsAreStoredInTheTypeOfTheirLastRounding) {
    const auto types = [](const RoundingPlan& plan, int kv_heads) {
        InputShape shape = shape_of(16);
        shape.heads = 4;
        shape.kv_heads = kv_heads;
        std::vector<LayerCapture> layers{make_inputs(*find_family("benign"), shape, 3)};
        observe(layers[0], plan, "mine", 0, 1);
        const Capture back = capture_of(tensors_of(layers, Dtype::bf16));
        std::string text;
        for (const Output output : all_outputs) {
            const HeadArray& made = *layers[0].observed[0][output];
            EXPECT_EQ(back.layers[0].observed[0][output]->values, made.values) << name(output);
            EXPECT_EQ(back.layers[0].observed[0][output]->dtype, made.dtype);
            text += std::string(print_name(made.dtype)) + " ";
        }
        return text;
    };
    RoundingPlan sums = plan("fa2");
    sums.set(Site::kv_group_reduce, Rule{fp16});
    EXPECT_EQ(types(sums, 2), "bfloat16 bfloat16 float16 float16 ");
    EXPECT_EQ(types(sums, 4), "bfloat16 bfloat16 bfloat16 bfloat16 ") << "nothing is summed";
    RoundingPlan unrounded = sums;
    unrounded.set(Site::kv_group_reduce, Rule{});
    EXPECT_EQ(types(unrounded, 2), "bfloat16 bfloat16 float64 float64 ") << "a sum of bf16 is none";
    sums.schedule.group_reduce = GroupReduce::before_cast;
    EXPECT_EQ(types(sums, 2), "bfloat16 bfloat16 bfloat16 bfloat16 ") << "the cast is last";
    EXPECT_EQ(types(plan("thunderkittens"), 2), "bfloat16 float32 float32 float32 ");
}

// What is read back is what was made, sequence by sequence, with the plan's outputs: nothing of the cache's NaN.
TEST(Families, SequencesAreReadBack) {
    std::vector<LayerCapture> layers;
    for (const char* family : {"varlen", "paged"})
        for (LayerCapture& layer : make_layers(*find_family(family), shape_of(16), 3)) {
            observe(layer, plan("fa2"), "fa2", 0, 1);
            layers.push_back(std::move(layer));
        }
    ASSERT_EQ(layers.size(), 8u);
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::e4m3, Dtype::e5m2}) {
        const TensorSet set = tensors_of(layers, dtype);
        EXPECT_NE(set.find("varlen.cu_seqlens_k"), nullptr);
        EXPECT_NE(set.find("paged.block_table"), nullptr);
        const std::vector<double> cache = set.at("paged.k").to_double();
        EXPECT_TRUE(std::any_of(cache.begin(), cache.end(), [](double x) { return std::isnan(x); }));
        const Capture capture = capture_of(set);
        ASSERT_EQ(capture.layers.size(), 8u);
        for (const LayerCapture& layer : layers) {
            const LayerCapture& back = capture[layer.name];
            EXPECT_EQ(back.q.values, layer.q.values) << layer.name;
            EXPECT_EQ(back.k.values, layer.k.values) << layer.name;
            EXPECT_EQ(back.v.values, layer.v.values) << layer.name;
            EXPECT_EQ(back.dout.values, layer.dout.values) << layer.name;
            for (const Output output : {Output::o, Output::dq})
                EXPECT_EQ(back.observed.at(0)[output]->values, layer.observed[0][output]->values) << layer.name;
        }
        EXPECT_EQ(capture["varlen[1]"].observed[0][Output::dk]->values, layers[1].observed[0][Output::dk]->values);
    }
}

TEST(Families, BlockScalesStandForTheSameValues) {
    std::vector<LayerCapture> layers;
    for (const InputFamily& family : input_families())
        if (!family.sequences) layers.push_back(made(family.name, 80));  // a last block of 16
    const TensorSet set = tensors_of(layers, Dtype::bf16, mxfp8_e4m3);
    EXPECT_EQ(set.at("benign.k").dtype, Dtype::e4m3);
    EXPECT_EQ(set.at("benign.k_scale").shape, (std::vector<std::int64_t>{1, 1, 32, 3}));
    const Capture capture = capture_of(set);
    for (const LayerCapture& layer : layers) {
        EXPECT_EQ(capture[layer.name].q.values, layer.q.values) << layer.name;
        EXPECT_EQ(capture[layer.name].k.values, layer.k.values) << layer.name;
        EXPECT_EQ(capture[layer.name].v.values, layer.v.values) << layer.name;
    }
}

TEST(Families, ExtrasAreReadBack) {
    for (const char* family : {"softcap", "sink-logit", "dropout"}) {
        const LayerCapture layer = made(family, 64);
        const LayerCapture back = capture_of(tensors_of({layer}, Dtype::bf16)).layers.at(0);
        EXPECT_EQ(back.softcap, layer.softcap);
        EXPECT_EQ(back.sink, layer.sink);
        EXPECT_EQ(back.keep, layer.keep);
        ASSERT_EQ(back.dropout.has_value(), layer.dropout.has_value());
        if (layer.dropout) {
            EXPECT_EQ(back.dropout->values, layer.dropout->values);
        }
    }
}

// Scores on both sides of the cap, slopes that are nearly 1 and slopes of next to nothing.
TEST(Families, SoftcapIsSweptThrough) {
    for (const std::ptrdiff_t d : {64, 128}) {
        const LayerCapture layer = made("softcap", d);
        double least = INFINITY, most = 0;
        for (std::ptrdiff_t i = 0; i < 32; ++i) {
            double top = 0;
            for (std::ptrdiff_t j = 0; j <= i; ++j) {
                double s = 0;
                for (std::ptrdiff_t c = 0; c < d; ++c) s += layer.q(0, 0)(i, c) * layer.k(0, 0)(j, c);
                top = std::max(top, s / std::sqrt(static_cast<double>(d)));
            }
            least = std::min(least, top);
            most = std::max(most, top);
        }
        EXPECT_LT(least, 3);
        EXPECT_GT(most, 500);
        EXPECT_EQ(layer.softcap, 30);
    }
}

TEST(Families, SinksTakeTheirShareOfEveryRow) {
    const HeadTruth truth = truth_of_first_head(made("sink-logit", 64));
    for (std::ptrdiff_t i = 0; i < truth.p.rows; ++i) {
        double sum = 0;
        for (std::ptrdiff_t j = 0; j <= i; ++j) sum += truth.p(i, j);
        EXPECT_LT(sum, 0.9999);
    }
}

TEST(Families, ATenthIsDropped) {
    const LayerCapture layer = made("dropout", 64);
    double kept = 0;
    for (const double x : layer.dropout->values) kept += x;
    const auto n =
        static_cast<double>(layer.dropout->values.size());  // 2048: four deviations of sqrt(0.09/n) are 0.027
    EXPECT_NEAR(kept / n, layer.keep, 4 * std::sqrt(0.09 / n));
}

TEST(Families, SaturatedRowsAreSaturated) {
    for (const std::ptrdiff_t d : {64, 96, 128, 256}) {
        const HeadTruth truth = truth_of_first_head(made("saturated", d));
        for (std::ptrdiff_t i = 0; i < truth.p.rows; ++i) EXPECT_GT(largest_in_row(truth.p, i), 1 - 0x1p-9) << d;
    }
}

TEST(Families, MaximaRepeat) {
    for (const std::ptrdiff_t d : {64, 96, 128, 256}) {
        const HeadTruth exact = truth_of_first_head(made("repeated-max", d));
        const HeadTruth near = truth_of_first_head(made("near-repeated", d));
        int repeated = 0, apart = 0;
        for (std::ptrdiff_t i = 8; i < exact.s.rows; ++i) {
            const double top = largest_in_row(exact.s, i), near_top = largest_in_row(near.s, i);
            int equal = 0, close = 0, different = 0;
            for (std::ptrdiff_t j = 0; j <= i; ++j) {
                equal += exact.s(i, j) == top;
                close += near.s(i, j) > near_top - 0x1p-9;
                different += near.s(i, j) > near_top - 0x1p-9 && near.s(i, j) != near_top;
            }
            EXPECT_GE(equal, 2) << d << " row " << i;
            EXPECT_GE(close, 2) << d << " row " << i;
            repeated += equal >= 2, apart += different > 0;
        }
        EXPECT_GT(repeated, 0);
        EXPECT_GT(apart, 12) << d;
    }
}

TEST(Families, TwoLevelRowsHaveOneAtTheTopAndOneLevelBelow) {
    const HeadTruth truth = truth_of_first_head(made("two-level", 64));
    std::set<double> levels;
    for (std::ptrdiff_t i = 2; i < truth.p.rows; ++i) {
        for (std::ptrdiff_t j = 1; j <= i; ++j) EXPECT_EQ(truth.s(i, j), truth.s(i, 1));
        EXPECT_GT(truth.s(i, 0), truth.s(i, 1));
        levels.insert(truth.s(i, 0) - truth.s(i, 1));
        for (std::ptrdiff_t c = 0; c < truth.o.cols; ++c) EXPECT_EQ(truth.o(i, c), 1);
    }
    EXPECT_GT(levels.size(), 15u);
}

TEST(Families, DeepRowsAreBetween200And490BelowZero) {
    for (const std::ptrdiff_t d : {32, 64, 96, 128, 256}) {
        const HeadTruth truth = truth_of_first_head(made("deep-negative", d));
        double sum = 0, count = 0;
        for (std::ptrdiff_t j = 0; j <= 15; ++j) sum += truth.s(15, j), count += 1;
        EXPECT_LT(sum / count, -200) << d;
        EXPECT_GT(sum / count, -490) << d;
        EXPECT_LT(largest_in_row(truth.s, 15), -150) << d;
    }
}

TEST(Families, KeysLieFarFromZeroAndCloseTogether) {
    const LayerCapture layer = made("large-key-mean", 64);
    const MatrixView<const double> k = layer.k(0, 0);
    for (std::ptrdiff_t c = 0; c < k.cols; ++c) {
        double mean = 0, spread = 0;
        for (std::ptrdiff_t j = 0; j < k.rows; ++j) mean += k(j, c) / static_cast<double>(k.rows);
        for (std::ptrdiff_t j = 0; j < k.rows; ++j)
            spread += (k(j, c) - mean) * (k(j, c) - mean) / static_cast<double>(k.rows);
        EXPECT_GT(std::abs(mean), 3 * std::sqrt(spread));
    }
}

TEST(Families, TheMeanKeyDoublesFromHeadToHeadAndTheSpreadStays) {
    InputShape shape = shape_of(64);
    shape.heads = shape.kv_heads = 11;
    shape.queries = shape.keys = 200;
    const LayerCapture layer = make_inputs(*find_family("key-mean-sweep"), shape, 1);
    for (std::ptrdiff_t h = 0; h < 11; ++h) {
        const KeyMoments keys = key_moments(layer.k(0, h));
        // 32 columns of exactly 2^(h - 2), and 32 whose means of 200 normal deviates are some 32/200 squared together.
        const double planted = std::sqrt(32.0) * std::exp2(static_cast<double>(h - 2));
        EXPECT_NEAR(keys.mean_norm, planted, 32.0 / 200 / planted) << h;
        EXPECT_NEAR(keys.spread, std::sqrt(32.0), 0.1 * std::sqrt(32.0)) << h;
    }
}

TEST(Families, PowersOfTwoAreSwept) {
    const HeadTruth truth = truth_of_first_head(made("power-sweep", 64));
    std::set<int> binades;
    for (std::ptrdiff_t i = 0; i < truth.s.rows; ++i) binades.insert(std::ilogb(largest_in_row(truth.s, i)));
    for (int k = 5; k <= 19; ++k) EXPECT_TRUE(binades.contains(k)) << k;
    // What the family is for: the exponent of a fused argument is off by up to half an ulp. It is a matter of the logit's
    // bits, so the odd row may be exact, but not most (with powers of two alone all were: their products do not round).
    int off = 0;
    for (std::ptrdiff_t i = 0; i < truth.s.rows; ++i)
        off += winner_exponent(8 * largest_in_row(truth.s, i), 0.125, true) != 0;
    EXPECT_GT(off, truth.s.rows / 2);
}

TEST(Families, CancellingGradientsCancel) {
    for (const std::ptrdiff_t d : {64, 96, 128}) {
        const HeadTruth truth = truth_of_first_head(made("cancelling-gradient", d));
        for (std::ptrdiff_t i = 0; i < 7; ++i)  // rows that see no key that is off
            for (std::ptrdiff_t c = 0; c < truth.dq.cols; ++c) EXPECT_EQ(truth.dq(i, c), 0) << d;
        for (std::ptrdiff_t j = 1; j < truth.dp.cols - 1; ++j) {
            if (j % 8 == 7) continue;
            EXPECT_EQ(truth.dp(31, j), truth.dp(31, 0)) << d;
        }
    }
}

TEST(Families, HiddenKeysAreHiddenAndPoisoned) {
    for (const char* name : {"padding", "left-padding"}) {
        const LayerCapture layer = made(name, 64);
        ASSERT_TRUE(layer.bias.has_value());
        EXPECT_FALSE(layer.causal);
        const MatrixView<const double> bias = (*layer.bias)(0, 0);
        int hidden = 0;
        for (std::ptrdiff_t j = 0; j < bias.cols; ++j) {
            if (bias(0, j) == 0) continue;
            ++hidden;
            for (std::ptrdiff_t c = 0; c < 64; ++c) EXPECT_EQ(std::abs(layer.v(0, 0)(j, c)), 448) << name;
        }
        EXPECT_GE(hidden, 10) << name;
    }
}

// A head of some thousand rows takes seconds: the run ends between two tiles, and leaves nothing.
TEST(Families, ObservingEndsWhenAsked) {
    const LayerCapture inputs = made("benign", 64);
    LayerCapture stopped = inputs, watched = inputs, plain = inputs;
    int polls = 0;
    observe(stopped, plan("fa2"), "fa2", 0, 1, [&] { return ++polls > 5; });
    EXPECT_EQ(polls, 6);
    EXPECT_TRUE(stopped.observed.empty());
    observe(watched, plan("fa2"), "fa2", 0, 1, [] { return false; });
    observe(plain, plan("fa2"), "fa2", 0, 1);
    for (const Output output : all_outputs)
        EXPECT_EQ(watched.observed.at(0)[output]->values, plain.observed.at(0)[output]->values);
}

TEST(Families, RefuseShapesThatHoldNone) {
    const auto refusal = [](InputShape shape) -> std::string {
        try {
            (void)make_inputs(*find_family("benign"), shape, 0);
        } catch (const RequestError& error) {
            return error.what();
        }
        return "";
    };
    EXPECT_THAT(refusal({.heads = 3, .kv_heads = 2}), HasSubstr("expected a whole number of query heads"));
    EXPECT_THAT(refusal({.keys = 4}), HasSubstr("keys is 4"));
    EXPECT_THAT(refusal({.queries = 64, .keys = 32}), HasSubstr("--no-causal"));
    EXPECT_THAT(refusal({.head_dim = 0}), HasSubstr("head_dim is 0"));
    EXPECT_THAT(refusal({.queries = 1 << 20, .keys = 1 << 20, .head_dim = 1 << 12}), HasSubstr("smaller shape"));
}

}  // namespace
}  // namespace faultline
