// SPDX-License-Identifier: Apache-2.0
// Attribution of layers in memory: streams of random numbers, the mean key, corrections that change the inputs, and what is
// given where only some sites, heads or passes are there.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/attribution/attribution.hpp>
#include <faultline/attribution/group_run.hpp>
#include <faultline/attribution/json.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/rows.hpp>
#include <faultline/base/error.hpp>
#include <faultline/emulated/host.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

using attribution::Group;
using attribution::groups_of;

HeadArray normals(std::ptrdiff_t heads, std::ptrdiff_t rows, std::ptrdiff_t cols, std::uint64_t seed,
                  const Format& format = bf16, Dtype dtype = Dtype::bf16) {
    HeadArray a{1, heads, rows, cols, std::vector<double>(static_cast<std::size_t>(heads * rows * cols)), dtype};
    const RandomStream stream(seed, 3);
    for (std::size_t i = 0; i < a.values.size(); ++i)
        a.values[i] = round(stream.normal(i), format, Rounding::nearest_even);
    return a;
}

/// Four query heads on two of keys.
LayerCapture grouped_layer(std::ptrdiff_t n = 20, std::ptrdiff_t d = 16) {
    LayerCapture layer;
    layer.name = "layer3";
    layer.q = normals(4, n, d, 1);
    layer.k = normals(2, n, d, 2);
    layer.v = normals(2, n, d, 3);
    layer.dout = normals(4, n, d, 4);
    return layer;
}

TEST(Groups, DrawDifferentNumbersInEveryLayer) {
    LayerCapture layer = grouped_layer();
    std::set<std::uint64_t> seeds;
    for (const char* name : {"layer0", "layer1", "layer10", "layer01", "l", ""})
        for (const std::uint64_t seed : {0, 1}) {
            layer.name = name;
            const std::vector<Group> groups = groups_of(layer, {}, seed);
            EXPECT_EQ(groups[0].inputs.seed, groups[1].inputs.seed);
            EXPECT_EQ(groups[0].inputs.seed, groups_of(layer, {}, seed)[0].inputs.seed);
            EXPECT_TRUE(seeds.insert(groups[0].inputs.seed).second) << name << " " << seed;
        }
}

// Truth, counterfactuals, corrections, recorded tiles, rows, a planted fault: nothing depends on the back end.
TEST(Backend, GivesTheSameAttribution) {
    Capture capture;
    capture.path = "made";
    capture.layers.push_back(grouped_layer());
    AttributionOptions options;
    options.faults.push_back(parse_fault("delta:per_head:10%"));
    options.corrections = {parse_correction("delta_exact"), parse_correction("zero_sum_weighted"),
                           parse_correction("qk_norm")};
    const Attribution cpu = attribute(capture, plan("fa2"), options);
    const emulated::HostForm form;
    options.backend = &form;
    const Attribution own = attribute(capture, plan("fa2"), options);
    EXPECT_EQ(to_json(cpu), to_json(own));
    for (std::size_t s = 0; s < cpu.layers[0].local.size(); ++s) {
        EXPECT_EQ(cpu.layers[0].local[s].signed_mean, own.layers[0].local[s].signed_mean);
        EXPECT_EQ(cpu.layers[0].local[s].rms, own.layers[0].local[s].rms);
    }
    EXPECT_EQ(cpu.layers[0].rows.zero_sum, own.layers[0].rows.zero_sum);
    EXPECT_GT(cpu.layers[0].faults[0].count, 0);
}

TEST(MeanKey, OfKeysThatSomeQuerySees) {
    LayerCapture layer = grouped_layer();
    layer.causal = false;
    HeadArray mask{1, 1, 20, 20, std::vector<double>(400, 0.0), Dtype::f32};
    for (std::size_t i = 0; i < 20; ++i)
        for (std::size_t j = 15; j < 20; ++j) mask.values[20 * i + j] = -std::numeric_limits<double>::infinity();
    layer.bias = mask;
    const std::vector<double> before = attribution::mean_key_direction(groups_of(layer, {}, 0)[0]);
    for (std::size_t j = 15; j < 20; ++j) layer.k.values[16 * j] = 1e6;  // padding of the first key head
    EXPECT_EQ(attribution::mean_key_direction(groups_of(layer, {}, 0)[0]), before);
}

// qk_norm rounds as the capture stores q and k, and its dq is measured along the mean of the keys that made it.
TEST(QkNorm, KeepsTheFormatOfTheCapture) {
    const Correction correction = parse_correction("qk_norm");
    LayerCapture layer = grouped_layer();
    layer.q = normals(4, 20, 16, 1, fp32, Dtype::f32);
    const Group group = groups_of(layer, {}, 0)[0];
    const attribution::TransformedGroup transformed(group, correction, attribution::format_of(layer.q.dtype),
                                                    attribution::format_of(layer.k.dtype));
    std::size_t beyond_bf16 = 0;
    for (const double x : transformed.q[0].values) beyond_bf16 += round(x, bf16, Rounding::nearest_even) != x;
    EXPECT_GT(beyond_bf16, transformed.q[0].values.size() / 2);
    for (const double x : transformed.k.values) ASSERT_EQ(round(x, bf16, Rounding::nearest_even), x);
}

TEST(QkNorm, MeasuresDqAlongTheTransformedKeys) {
    LayerCapture layer = grouped_layer();
    for (std::size_t i = 0; i < layer.k.values.size(); ++i)  // rows of very different sizes: the means point elsewhere
        layer.k.values[i] *= std::ldexp(1.0, static_cast<int>((i / 16) % 7));
    AttributionOptions options;
    options.outputs = {Output::dq};
    options.sites = {Site::o_cast};
    options.corrections = {parse_correction("qk_norm")};
    options.heads = {0};
    const RoundingPlan fa2 = for_head_dim(plan("fa2"), 16);
    const OutputAttribution dq = attribute(layer, fa2, options).outputs[0];

    const Group group = groups_of(layer, {0}, 0)[0];
    const attribution::TransformedGroup transformed(group, options.corrections[0], bf16, bf16);
    const GroupTruth truth = attention_truth(transformed.group.problem);
    const auto run = attribution::run_plan(transformed.group, fa2);
    const auto share = [&](const Group& keys) {
        return attribution::errors_of(run[Output::dq], truth, Output::dq, attribution::mean_key_direction(keys))
            .measure()
            .mean_key_share;
    };
    constexpr double last_bits = 1e-6;  // the truth here is correctly rounded, in attribution within its bound
    EXPECT_NEAR(dq.corrections[0].error.mean_key_share, share(transformed.group), last_bits);
    EXPECT_GT(std::abs(share(transformed.group) - share(group)), 1000 * last_bits) << "the two means differ";
}

// A scale of 2^-2 is exact, so that the casts before and after it round alike: one without the other is the same kernel.
TEST(Attribution, SitesThatRoundTheSameAreRedundant) {
    AttributionOptions options;
    options.outputs = {Output::o};
    const LayerAttribution layer = attribute(grouped_layer(), plan("standard-bf16"), options);
    const OutputAttribution& o = layer.outputs[0];
    const auto effect = [&](Site site) {
        const auto at = std::find(layer.sites.begin(), layer.sites.end(), site);
        return o.sites[static_cast<std::size_t>(at - layer.sites.begin())];
    };
    for (const Site site : {Site::s_cast, Site::s_scale}) {
        EXPECT_EQ(effect(site).share, 0);
        EXPECT_EQ(effect(site).repaired.rel_error, o.plan.rel_error);
        EXPECT_GT(effect(site).alone_squared, worth_naming);
        EXPECT_TRUE(is_redundant(effect(site)));
        EXPECT_EQ(effect(site).interaction, -effect(site).alone_squared);
    }
    ASSERT_EQ(o.redundant.size(), 1u);
    const RedundantSites& set = o.redundant[0];
    EXPECT_EQ(set.sites, (std::vector<Site>{Site::s_cast, Site::s_scale}));
    const RoundingPlan both = plan("standard-bf16").repaired(Site::s_cast).repaired(Site::s_scale);
    EXPECT_EQ(set.repaired.rel_error, attribute(grouped_layer(), both, options).outputs[0].plan.rel_error);
    EXPECT_GT(set.share, worth_naming);
    options.sites = {Site::s_cast};
    EXPECT_TRUE(attribute(grouped_layer(), plan("standard-bf16"), options).outputs[0].redundant.empty()) << "one alone";
    // In dq the score gradient, cast before and after the scale, makes a set of its own.
    options.sites.clear();
    options.outputs = {Output::dq};
    const OutputAttribution dq = attribute(grouped_layer(), plan("standard-bf16"), options).outputs[0];
    ASSERT_EQ(dq.redundant.size(), 2u);
    EXPECT_EQ(dq.redundant[0].sites, (std::vector<Site>{Site::s_cast, Site::s_scale}));
    EXPECT_EQ(dq.redundant[1].sites, (std::vector<Site>{Site::ds_cast, Site::ds_scaled}));
}

// The share is what the two errors printed beside each other say, whatever the roundings downstream do when redrawn.
TEST(Attribution, ShareIsTheFallOfTheSquaredError) {
    const LayerAttribution layer = attribute(grouped_layer(), plan("fa2"), {});
    constexpr double arithmetic = 0x1p-40;  // ratios of sums of some thousand squares, taken in two orders
    for (const OutputAttribution& a : layer.outputs) {
        double sum = 0;
        for (const SiteEffect& e : a.sites) {
            const double left = (e.repaired.error_norm / a.plan.error_norm).to_double();
            const double alone = (e.alone.error_norm / a.plan.error_norm).to_double();
            EXPECT_NEAR(e.share, 1 - left * left, arithmetic);
            EXPECT_NEAR(e.interaction, e.share - alone * alone, arithmetic);
            sum += e.alone_squared;
        }
        EXPECT_NEAR(*a.unexplained, 1 - sum, arithmetic);
    }
}

// Row 0 of a causal layer sees one key. Its score gradient p (dp - delta) is 0 in exact arithmetic, and |x| / |x| where delta
// is made of a rounded O: v in fp32 does not fit the bf16 that O, which is v there, is stored in.
TEST(Rows, OfOneKeyTakeNoPartInTheZeroSum) {
    AttributionOptions options;
    options.outputs = {Output::dq};
    LayerCapture layer = grouped_layer();
    layer.v = normals(2, 20, 16, 3, fp32, Dtype::f32);
    RoundingPlan rounds_o = plan("exact");
    rounds_o.set(Site::o_cast, {bf16});
    const RowStatistics rows = attribute(layer, rounds_o, options).rows;
    double squares = 0;
    ASSERT_EQ(rows.keys.size(), 80u);
    for (std::size_t i = 0; i < rows.keys.size(); ++i) {
        EXPECT_EQ(rows.keys[i], static_cast<double>(i % 20 + 1));
        if (i % 20 == 0)
            EXPECT_EQ(std::abs(rows.zero_sum_relative[i]), 1);
        else
            squares += rows.zero_sum_relative[i] * rows.zero_sum_relative[i];
    }
    EXPECT_DOUBLE_EQ(rows.zero_sum_rms, std::sqrt(squares / (4 * 19)));
    for (const double keys : rows.repeated_max) EXPECT_GE(keys, 1);
    layer.q = normals(4, 1, 16, 1);
    layer.dout = normals(4, 1, 16, 4);
    layer.k = normals(2, 1, 16, 2);
    layer.v = normals(2, 1, 16, 3, fp32, Dtype::f32);
    EXPECT_TRUE(std::isnan(attribute(layer, rounds_o, options).rows.zero_sum_rms)) << "no row has two keys";
}

TEST(Attribution, EffectsAddUpOnlyWhenAllSitesRan) {
    const LayerCapture layer = grouped_layer();
    AttributionOptions options;
    options.outputs = {Output::o, Output::dq};
    const LayerAttribution all = attribute(layer, plan("fa2"), options);
    EXPECT_TRUE(all.outputs[1].unexplained.has_value());
    options.sites = {Site::o_cast, Site::dq_cast};
    const LayerAttribution some = attribute(layer, plan("fa2"), options);
    EXPECT_FALSE(some.outputs[0].unexplained.has_value());
    EXPECT_FALSE(some.outputs[1].unexplained.has_value());
    options.sites = all.sites;
    EXPECT_EQ(attribute(layer, plan("fa2"), options).outputs[1].unexplained, all.outputs[1].unexplained);
}

Capture two_layers() {
    Capture capture;
    capture.path = "made";
    for (const std::ptrdiff_t n : {20, 28}) {
        capture.layers.push_back(grouped_layer(n));
        capture.layers.back().name = n == 20 ? "layer0" : "layer1";
    }
    return capture;
}

/// The processor's, with room for so many keys.
class SmallBackend final : public AttentionBackend {
  public:
    explicit SmallBackend(std::ptrdiff_t keys, std::ptrdiff_t truth_keys = 1 << 20)
        : keys_(keys), truth_keys_(truth_keys) {}
    [[nodiscard]] std::string_view name() const override { return "small"; }
    [[nodiscard]] int calls_at_once(int threads) const override { return threads; }
    void expect_room(const HeadGroup& in, const RoundingPlan& plan, const Instrument*) const override {
        if (in.k.rows > keys_) throw NoRoom("plan \"" + plan.name + "\": no room");
    }
    void expect_room_for_truth(const TruthProblem& problem) const override {
        if (problem.k.rows > truth_keys_) throw NoRoom("truth: no room");
    }
    [[nodiscard]] GroupForward forward(const HeadGroup& in, const RoundingPlan& plan, Instrument* i) const override {
        ++calls;
        return cpu_backend().forward(in, plan, i);
    }
    [[nodiscard]] GroupBackward backward(const HeadGroup& in, const GroupForward& fwd, const RoundingPlan& plan,
                                         Instrument* i) const override {
        return cpu_backend().backward(in, fwd, plan, i);
    }
    [[nodiscard]] GroupTruth truth(const TruthProblem& problem, const TruthOptions& options) const override {
        ++calls;
        return cpu_backend().truth(problem, options);
    }
    mutable std::atomic<int> calls{0};

  private:
    std::ptrdiff_t keys_, truth_keys_;
};

// The second layer does not fit: nothing is done for the first either.
TEST(Attribution, ExpectsRoomForEveryLayerBeforeAnyWork) {
    AttributionOptions options;
    options.sites = {Site::o_cast};
    const SmallBackend small(20), enough(28);
    options.backend = &small;
    EXPECT_THROW((void)attribute(two_layers(), plan("fa2"), options), WorkError);
    EXPECT_EQ(small.calls, 0);
    const SmallBackend without_truth(28, 20);
    options.backend = &without_truth;
    try {
        (void)attribute(two_layers(), plan("fa2"), options);
        FAIL();
    } catch (const NoRoom& error) {
        EXPECT_STREQ(error.what(), "made: layer1: truth: no room");
    }
    EXPECT_EQ(without_truth.calls, 0);
    options.backend = &enough;
    EXPECT_EQ(attribute(two_layers(), plan("fa2"), options).layers.size(), 2u);
    EXPECT_GT(enough.calls, 0);
}

TEST(Attribution, LayersAreShownWhenTheyAreDone) {
    AttributionOptions options;
    options.sites = {Site::o_cast};
    std::vector<std::string> shown;
    std::vector<std::string> names;
    options.layer_done = [&](const Attribution& so_far) {
        shown.push_back(to_json(so_far));
        names.push_back(so_far.layers.back().name);
    };
    const Attribution whole = attribute(two_layers(), plan("fa2"), options);
    EXPECT_EQ(names, (std::vector<std::string>{"layer0", "layer1"}));
    ASSERT_EQ(shown.size(), 2u);
    EXPECT_EQ(shown.back(), to_json(whole));
    EXPECT_NE(shown.front(), shown.back());
}

// Without dO every site that is reached is of the forward, and they are all there is.
TEST(Attribution, ForwardAloneIsWhole) {
    LayerCapture layer = grouped_layer();
    AttributionOptions options;
    options.outputs = {Output::o};
    options.corrections = {parse_correction("qk_norm"), parse_correction("two_sum")};
    const LayerAttribution with = attribute(layer, plan("fa2"), options);
    layer.dout = {};
    const LayerAttribution without = attribute(layer, plan("fa2"), options);
    const OutputAttribution &a = with.outputs[0], &b = without.outputs[0];
    ASSERT_TRUE(b.unexplained && a.unexplained && a.level && b.level);
    EXPECT_EQ(*b.level, *a.level);
    EXPECT_EQ(b.plan.rel_error, a.plan.rel_error);
    EXPECT_EQ(b.corrections[0].error.rel_error, a.corrections[0].error.rel_error);
    EXPECT_EQ(*b.corrections[0].level, *a.corrections[0].level);
    EXPECT_NE(*b.corrections[0].level, *b.level) << "another function has another truth";
    // A site of the backward does nothing to o, up to the order in which binary64 sums are added.
    EXPECT_NEAR(*b.unexplained, *a.unexplained, 1e-9);
}

// The level is that of all heads together, by dk and dv of the groups and by o and dq of the query heads.
TEST(Attribution, LevelIsThatOfTheTruthOfAllHeads) {
    const LayerCapture layer = grouped_layer();
    AttributionOptions options;
    options.sites = {Site::o_cast};
    const LayerAttribution found = attribute(layer, plan("fa2"), options);
    for (const OutputAttribution& output : found.outputs) {
        WideReal rounding, size;
        for (const Group& group : groups_of(layer, {}, 0)) {
            const GroupTruth truth = attention_truth(group.problem);
            const bool per_query = output.output == Output::o || output.output == Output::dq;
            for (std::size_t i = 0; i < (per_query ? 2U : 1U); ++i) {
                const CertifiedMatrix& matrix = attribution::truth_of(truth, output.output, i);
                const WideReal error = rounding_error(matrix, bf16), norm = frobenius_norm(matrix);
                rounding = rounding + error * error;
                size = size + norm * norm;
            }
        }
        constexpr double last_bits = 1e-9;  // of truths that are correctly rounded here and within their bounds there
        EXPECT_NEAR((*output.level / (sqrt(rounding) / sqrt(size))).to_double(), 1, last_bits) << name(output.output);
    }
}

}  // namespace
}  // namespace faultline
