// SPDX-License-Identifier: Apache-2.0
// The null model keeps every rounding error's size and gives it a random sign.
#include <algorithm>
#include <cmath>

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

// Eight query heads that are copies of one another on one key head, dk of each cast by itself: with signs of their own the
// errors of the eight casts add as sqrt(8), with common ones as 8, which is what the plan does here.
TEST(SignFlip, CastsOfAGroupsHeadsHaveSignsOfTheirOwn) {
    constexpr std::ptrdiff_t heads = 8;
    Capture capture = testing::made_capture({}, {.heads = heads, .kv_heads = 1, .n = 64, .d = 16});
    LayerCapture& layer = capture.layers[0];
    for (HeadArray* a : {&layer.q, &layer.dout})
        for (std::ptrdiff_t h = 1; h < heads; ++h)
            std::copy_n(a->values.begin(), a->rows * a->cols, a->values.begin() + h * a->rows * a->cols);
    const attribution::Group group = attribution::groups_of(layer, {}, 0)[0];
    RoundingPlan plan;
    plan.schedule.group_reduce = GroupReduce::after_cast;
    plan.set(Site::dk_cast, Rule{bf16});
    const Matrix exact = attribution::run_plan(group, RoundingPlan{})[Output::dk][0];
    const auto norm = [&](const Matrix& dk) {
        double sum = 0;
        for (std::size_t a = 0; a < dk.values.size(); ++a)
            sum += (dk.values[a] - exact.values[a]) * (dk.values[a] - exact.values[a]);
        return std::sqrt(sum);
    };
    SignFlip flip({Site::dk_cast}, 3, 0);
    const emulated::HostForm form;
    const Matrix run = attribution::run_plan(group, plan, &flip)[Output::dk][0];
    EXPECT_EQ(run, attribution::run_plan(group, plan, &flip, form)[Output::dk][0]);
    // The mean of 1024 elements' squares, each of a variance of some 2 times its mean's square: 5 standard deviations are 22%
    // of the square, 11% of the norm.
    EXPECT_NEAR(norm(attribution::run_plan(group, plan)[Output::dk][0]) / norm(run), std::sqrt(8.0),
                0.11 * std::sqrt(8.0));
}

TEST(SignFlip, GivesTheSameBitsInTheDevicesForm) {
    const Capture capture = testing::made_capture({}, {.n = 40, .d = 16});
    const attribution::Group group = attribution::groups_of(capture.layers[0], {}, 0)[0];
    for (const char* name : {"fa2", "math", "fa3-fp8"}) {
        const RoundingPlan plan = for_head_dim(faultline::plan(name), 16);
        SignFlip flip(low_precision_sites(plan), 3, 5);
        OtherSumOrder order(plan, 3, 5);
        Instruments both({&flip, &order});
        const emulated::HostForm form;
        const attribution::RunOutputs cpu = attribution::run_plan(group, plan, &both),
                                      own = attribution::run_plan(group, plan, &both, form);
        EXPECT_NE(cpu[Output::dq][0], attribution::run_plan(group, plan, &flip)[Output::dq][0]) << name;
        for (const Output output : all_outputs)
            for (std::size_t i = 0; i < cpu[output].size(); ++i)
                EXPECT_EQ(cpu[output][i], own[output][i]) << name << ' ' << faultline::name(output);
        EXPECT_NE(cpu[Output::dq][0], attribution::run_plan(group, plan)[Output::dq][0]) << name;
    }
}

// Delta alone changes, by what fp32 sums of d products may differ by: sqrt(d/3) 2^-24 of the root of their squares.
TEST(OtherSumOrder, ShiftsDeltaByLastBits) {
    const RoundingPlan fa2 = plan("fa2");
    OtherSumOrder order(fa2, 1, 0);
    for (const Site site : fa2.rounding_sites()) EXPECT_EQ(order.watches(site), false) << name(site);
    EXPECT_TRUE(order.watches(Site::delta_product));
    EXPECT_TRUE(OtherSumOrder(plan("math"), 1, 0).watches(Site::delta));
    EXPECT_FALSE(OtherSumOrder(plan("exact"), 1, 0).watches(Site::delta));
    EXPECT_FALSE(OtherSumOrder(plan("exact"), 1, 0).watches(Site::delta_product));
    Matrix products(500, 48);
    for (std::size_t a = 0; a < products.values.size(); ++a) products.values[a] = 1 + static_cast<double>(a % 7);
    Matrix changed = products;
    order.at(Site::delta_product, {}, changed.view(), products.view());
    double squares = 0, expected = 0;
    for (std::ptrdiff_t i = 0; i < products.rows; ++i) {
        double error = 0;
        for (std::ptrdiff_t j = 0; j < products.cols; ++j) {
            error += changed(i, j) - products(i, j);
            expected += 16 * products(i, j) * products(i, j) * 0x1p-48;  // 48/3 = 16
        }
        squares += error * error;
    }
    // A mean of 500 squares of sums: within four standard deviations, 4 sqrt(2/500) = 0.25.
    EXPECT_NEAR(squares / expected, 1, 0.25);
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
