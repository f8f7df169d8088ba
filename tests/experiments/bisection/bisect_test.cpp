// SPDX-License-Identifier: Apache-2.0
// Bisection of plans whose answer is known, and of the shipped collapsed head.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
    options.search = {.budget = 40, .largest_size = 1};
    const Bisection found = bisect(capture, plan("fa2"), options);
    EXPECT_FALSE(all_met(found));
    EXPECT_THAT(unmet(found), ::testing::HasSubstr("no set of sites that was tried meets it"));
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
