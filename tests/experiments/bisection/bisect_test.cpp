// SPDX-License-Identifier: Apache-2.0
// Bisection of plans whose answer is known, and of the shipped collapsed head.
#include <algorithm>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/bisection/bisect.hpp>
#include <faultline/bisection/report.hpp>
#include <faultline/plan/presets.hpp>

#include "made_captures.hpp"

namespace faultline {
namespace {

using ::testing::ElementsAre;
using testing::made_capture;
using testing::shipped_capture;

Target target(const Capture& capture, std::string_view text) {
    std::vector<std::string> layers;
    for (const LayerCapture& layer : capture.layers) layers.push_back(layer.name);
    return parse_target(text, layers, 0.1);
}

Capture small() { return made_capture({}, {.heads = 2, .kv_heads = 1, .n = 48, .d = 16}); }

TEST(Bisect, SitesThatCannotTouchAnOutputDoNot) {
    // The flow of data that can_touch claims, against what every preset does when the site is made exact.
    const Capture capture = made_capture({}, {.heads = 2, .kv_heads = 1, .n = 24, .d = 16, .query_size = 6});
    const attribution::Group group = attribution::groups_of(capture.layers[0], {}, 0)[0];
    for (const RoundingPlan& preset : presets()) {
        const RoundingPlan plan = for_head_dim(preset, 16);
        const attribution::RunOutputs run = attribution::run_plan(group, plan);
        for (const Site site : plan.rounding_sites()) {
            const attribution::RunOutputs repaired = attribution::run_plan(group, plan.repaired(site));
            for (const Output output : all_outputs) {
                if (can_touch(plan, site, output)) continue;
                for (std::size_t i = 0; i < run[output].size(); ++i)
                    EXPECT_EQ(run[output][i], repaired[output][i])
                        << preset.name << " " << name(site) << " " << name(output);
            }
        }
    }
}

TEST(Bisect, TheOnlyRoundingIsTheAnswerToBoth) {
    const Capture capture = small();
    RoundingPlan plan;
    plan.name = "one";
    plan.set(Site::p_cast, Rule{bf16});
    plan.set(Site::exp, Rule{fp32});
    BisectionOptions options;
    options.until = {target(capture, "layer0.dq.rel_error < 1e-6")};
    options.reproduce = {target(capture, "layer0.dq.rel_error")};
    const Bisection found = bisect(capture, plan, options);
    ASSERT_EQ(found.answers.size(), 2u);
    for (const BisectionAnswer& a : found.answers) {
        ASSERT_EQ(a.search.found.size(), 1u);
        EXPECT_THAT(a.sites_of(a.search.found[0].set), ElementsAre(Site::p_cast));
        EXPECT_TRUE(a.search.smallest);
    }
    EXPECT_TRUE(all_met(found));
}

TEST(Bisect, ATargetBelowWhatTheExactPlanReachesIsMetByNoSet) {
    const Capture capture = small();
    BisectionOptions options;
    options.until = {target(capture, "layer0.dq.rel_error < 1e-30")};
    const Bisection found = bisect(capture, plan("fa2"), options);
    EXPECT_FALSE(all_met(found));
    EXPECT_TRUE(found.answers[0].out_of_reach);
    EXPECT_EQ(found.answers[0].search.tried.size(), 2u);  // no site, all sites
    EXPECT_THAT(unmet(found), ::testing::HasSubstr("not even every site exact meets it"));
    EXPECT_THAT(table(found), ::testing::HasSubstr("not even every site exact meets it: nothing was searched"));
}

TEST(Bisect, ResultsDoNotDependOnThreads) {
    const Capture capture = small();
    BisectionOptions options;
    options.until = {target(capture, "layer0.dk.rel_error < 1e-3")};
    options.search = {.budget = 60, .largest_size = 2};
    options.threads = 1;
    const std::string one = to_json(bisect(capture, plan("fa2"), options));
    options.threads = 5;
    EXPECT_EQ(one, to_json(bisect(capture, plan("fa2"), options)));
}

TEST(Bisect, ValuesAreThoseOfThePlansThatTheyStandFor) {
    const Capture capture = small();
    const RoundingPlan plan = for_head_dim(faultline::plan("fa2"), 16);
    BisectionOptions options;
    options.until = {target(capture, "layer0.dq.rel_error < 1e-9")};
    options.search = {.budget = 30, .largest_size = 1};
    const Bisection found = bisect(capture, plan, options);
    const BisectionAnswer& a = found.answers[0];
    AttributionOptions attribution;
    attribution.outputs = {Output::dq};
    const Attribution attributed = attribute(capture, plan, attribution);
    const LayerAttribution& layer = attributed.layers[0];
    EXPECT_EQ(a.values.at(0)[0], layer.outputs[0].plan.rel_error);
    for (std::size_t i = 0; i < a.sites.size(); ++i) {
        const auto at = std::find(layer.sites.begin(), layer.sites.end(), a.sites[i]) - layer.sites.begin();
        EXPECT_EQ(a.values.at(bisection::SiteMask{1} << i)[0],
                  layer.outputs[0].sites[static_cast<std::size_t>(at)].repaired.rel_error);
    }
}

// pytorch/pytorch#121558: q = k = v = 133120 overflows fa2's fused exponent, and O is NaN.
Capture overflowing() {
    return made_capture({}, {.n = 1, .d = 64, .extras = [](LayerCapture& layer) {
                                 for (HeadArray* a : {&layer.q, &layer.k, &layer.v})
                                     std::fill(a->values.begin(), a->values.end(), 133120.0);
                             }});
}

std::string refusal(const Capture& capture, const BisectionOptions& options) {
    try {
        (void)bisect(capture, plan("fa2"), options);
    } catch (const RequestError& error) {
        return error.what();
    }
    return "no refusal";
}

TEST(Bisect, NothingIsNearAnOutputThatIsNotFinite) {
    const Capture capture = overflowing();
    for (const char* text : {"o.rel_error", "o.error_norm", "abs(o.signed_bias)"}) {
        BisectionOptions options;
        options.reproduce = {target(capture, text)};
        EXPECT_THAT(refusal(capture, options),
                    ::testing::AllOf(::testing::HasSubstr("64 elements of the plan's o are NaN or infinite"),
                                     ::testing::HasSubstr("layer0.o.nonfinite > 0")))
            << text;
    }
}

// m c is rounded to a multiple of 2^14, and what is left of s c, here +7916, depends on the constant c: with the unrounded
// one it is negative and p = 0. So it takes both roundings to overflow. No run with finite elements is that error, and
// elements that are not finite are not left out of an error's size.
TEST(Bisect, FindsTheRoundingThatMakesAnOutputNotFinite) {
    const Capture capture = overflowing();
    for (const char* text : {"o.nonfinite > 0", "o.nonfinite", "o.plan_distance < 0.1"}) {
        BisectionOptions options;
        options.reproduce = {target(capture, text)};
        options.until = {target(capture, "o.error_norm < 1e9")};
        const Bisection found = bisect(capture, plan("fa2"), options);
        ASSERT_EQ(found.answers.size(), 2u);
        for (const BisectionAnswer& a : found.answers) EXPECT_FALSE(a.search.none_met) << text;
        const BisectionAnswer &until = found.answers[0], &reproduce = found.answers[1];
        ASSERT_FALSE(until.search.found.empty());
        EXPECT_THAT(until.sites_of(until.search.found[0].set), ElementsAre(Site::exp_argument)) << table(found);
        ASSERT_EQ(reproduce.search.found.size(), 1u) << table(found);
        EXPECT_THAT(reproduce.sites_of(reproduce.search.found[0].set), ElementsAre(Site::scale, Site::exp_argument))
            << text;
    }
}

TEST(Bisect, RefusesAMeasureThatThePlansRunDoesNotHave) {
    const Capture capture = made_capture({}, {.n = 48, .d = 16});
    BisectionOptions options;
    options.until = {target(capture, "dq.head_coherence < 1")};
    EXPECT_THAT(refusal(capture, options), ::testing::HasSubstr("head_coherence being undefined there (one head"));
}

// A cap of 1e-6 beside a sink: dQ is far below the bound of its truth (docs/numerics-truth.md, lemma 5).
TEST(Bisect, RefusesAnErrorThatTheTruthDoesNotResolve) {
    const Capture capture = made_capture({}, {.n = 24, .d = 8, .extras = [](LayerCapture& layer) {
                                                  layer.softcap = 1e-6;
                                                  layer.sink = {0.5};
                                              }});
    BisectionOptions options;
    options.until = {target(capture, "dq.error_norm < 1e-3")};
    EXPECT_THAT(refusal(capture, options), ::testing::HasSubstr("its truth is only known to be within"));
    options.until = {target(capture, "dv.rel_error < 1e-6")};
    EXPECT_FALSE(bisect(capture, plan("fa2"), options).answers.empty());
}

TEST(Bisect, OnTheCollapsedHeadOCastAloneMakesTheFaultAndRepairingPCastAloneMakesItWorse) {
    const Capture capture = read_capture(shipped_capture());
    BisectionOptions options;
    options.reproduce = {target(capture, "layer1.dq.rel_error")};
    options.search = {.budget = 40, .largest_size = 1};
    const Bisection found = bisect(capture, plan("fa2"), options);
    const BisectionAnswer& a = found.answers[0];
    ASSERT_EQ(a.search.found.size(), 1u);
    EXPECT_THAT(a.sites_of(a.search.found[0].set), ElementsAre(Site::o_cast));
}

}  // namespace
}  // namespace faultline
