// SPDX-License-Identifier: Apache-2.0
// The null model keeps every rounding error's size and gives it a random sign.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/emulated/host.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/verdict/null_model.hpp>

#include "made_captures.hpp"

namespace faultline::verdict {
namespace {

TEST(SignFlip, KeepsSizesAndExactValuesAndDrawsSignsEvenly) {
    Matrix value(64, 64), exact(64, 64);
    for (std::size_t a = 0; a < value.values.size(); ++a) {
        exact.values[a] = static_cast<double>(a);
        value.values[a] = a % 4 == 0 ? exact.values[a] : exact.values[a] + 0.25;
    }
    value(3, 3) = INFINITY;
    Matrix flipped = value;
    SignFlip flip({Site::p_cast}, 1, 0);
    EXPECT_TRUE(flip.watches(Site::p_cast));
    EXPECT_FALSE(flip.watches(Site::o_cast));
    flip.at(Site::p_cast, {}, flipped.view(), exact.view());
    int up = 0, down = 0;
    for (std::size_t a = 0; a < value.values.size(); ++a) {
        if (std::isinf(value.values[a])) {
            EXPECT_TRUE(std::isinf(flipped.values[a]));
            continue;
        }
        const double e = flipped.values[a] - exact.values[a];
        EXPECT_EQ(std::abs(e), std::abs(value.values[a] - exact.values[a]));
        up += e > 0, down += e < 0;
    }
    EXPECT_NEAR(up, down, 4 * std::sqrt(up + down));
    Matrix again = value, other = value;
    SignFlip({Site::p_cast}, 1, 0).at(Site::p_cast, {}, again.view(), exact.view());
    SignFlip({Site::p_cast}, 1, 1).at(Site::p_cast, {}, other.view(), exact.view());
    EXPECT_EQ(again, flipped);
    EXPECT_NE(other, flipped);
}

TEST(SignFlip, OfOneSiteGivesErrorsOfTheSameSizeAndNoMean) {
    // Only o is rounded: a run of the null model has the plan's error in every element, up to its sign.
    const Capture capture = testing::made_capture({}, {.n = 64, .d = 16, .gradient = false});
    const attribution::Group group = attribution::groups_of(capture.layers[0], {}, 0)[0];
    RoundingPlan plan;
    plan.set(Site::o_cast, Rule{bf16});
    const Matrix exact = attribution::run_plan(group, RoundingPlan{})[Output::o][0];
    const Matrix own = attribution::run_plan(group, plan)[Output::o][0];
    SignFlip flip({Site::o_cast}, 3, 0);
    const Matrix run = attribution::run_plan(group, plan, &flip)[Output::o][0];
    std::size_t flipped = 0;
    for (std::size_t a = 0; a < run.values.size(); ++a) {
        const double e = own.values[a] - exact.values[a];
        EXPECT_TRUE(run.values[a] == own.values[a] || run.values[a] == exact.values[a] - e);
        flipped += run.values[a] != own.values[a];
    }
    EXPECT_NEAR(static_cast<double>(flipped), static_cast<double>(run.values.size()) / 2,
                4 * std::sqrt(static_cast<double>(run.values.size()) / 4));
}

TEST(SignFlip, GivesTheSameBitsInTheDevicesForm) {
    const Capture capture = testing::made_capture({}, {.n = 40, .d = 16});
    const attribution::Group group = attribution::groups_of(capture.layers[0], {}, 0)[0];
    for (const char* name : {"fa2", "math", "fa3-fp8"}) {
        const RoundingPlan plan = for_head_dim(faultline::plan(name), 16);
        SignFlip flip(low_precision_sites(plan), 3, 5);
        const emulated::HostForm form;
        const attribution::RunOutputs cpu = attribution::run_plan(group, plan, &flip),
                                      own = attribution::run_plan(group, plan, &flip, form);
        for (const Output output : all_outputs)
            for (std::size_t i = 0; i < cpu[output].size(); ++i)
                EXPECT_EQ(cpu[output][i], own[output][i]) << name << ' ' << faultline::name(output);
        EXPECT_NE(cpu[Output::dq][0], attribution::run_plan(group, plan)[Output::dq][0]) << name;
    }
}

TEST(LowPrecisionSites, AreTheCastsOrAllWhereThePlanHasNone) {
    EXPECT_THAT(low_precision_sites(plan("fa2")), ::testing::Contains(Site::p_cast));
    EXPECT_THAT(low_precision_sites(plan("fa2")), ::testing::Not(::testing::Contains(Site::lse)));
    RoundingPlan plan;
    plan.set(Site::exp, Rule{fp32});
    plan.set(Site::scale, Rule{fp32});
    EXPECT_THAT(low_precision_sites(plan), ::testing::ElementsAre(Site::exp));
}

}  // namespace
}  // namespace faultline::verdict
