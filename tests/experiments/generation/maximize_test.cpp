// SPDX-License-Identifier: Apache-2.0
// The search: what it reports is what the inputs do, and more than random inputs do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/generation/maximize.hpp>
#include <faultline/plan/presets.hpp>

namespace faultline {
namespace {

MaximizeOptions small() {
    MaximizeOptions options;
    options.shape = {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 16, .keys = 16, .head_dim = 16, .causal = true};
    options.evaluations = 400;
    options.baseline = 32;
    return options;
}

TEST(Maximize, FindsInputsThatBiasASiteMoreThanRandomOnesDo) {
    for (const Site site : {Site::o_cast, Site::p_cast, Site::ds_cast, Site::exp_argument}) {
        const Maximized found = maximize(site, plan("fa2"), small());
        EXPECT_GT(found.reached.objective, found.random_largest) << name(site);
        const SiteBias again = site_bias(found.inputs, plan("fa2"), site);
        EXPECT_EQ(again.mean, found.reached.mean) << name(site);
        EXPECT_EQ(again.objective, found.reached.objective) << name(site);
        EXPECT_LE(found.evaluations, 400u);
        for (const HeadArray* a : {&found.inputs.q, &found.inputs.k, &found.inputs.v, &found.inputs.dout})
            for (const double x : a->values) {
                EXPECT_LE(std::abs(x), 8);
                EXPECT_EQ(generation::on_grid(x), x);
            }
    }
}

TEST(Maximize, DependsOnTheSeedAndNotOnThreads) {
    MaximizeOptions options = small();
    options.threads = 1;
    const Maximized one = maximize(Site::o_cast, plan("fa2"), options);
    options.threads = 5;
    const Maximized five = maximize(Site::o_cast, plan("fa2"), options);
    EXPECT_EQ(one.inputs.v.values, five.inputs.v.values);
    EXPECT_EQ(one.reached.objective, five.reached.objective);
    options.seed = 1;
    EXPECT_NE(one.inputs.v.values, maximize(Site::o_cast, plan("fa2"), options).inputs.v.values);
}

TEST(Maximize, TheErrorOfACastIsTheDifferenceThatItMakes) {
    // One key: p = 1, and o is v. A plan that casts o to 3 bits and nothing else has no error on the grid of 3 bits.
    LayerCapture layer =
        make_inputs(*find_family("benign"), {.heads = 1, .kv_heads = 1, .queries = 8, .keys = 8, .head_dim = 8}, 3);
    RoundingPlan rounding;
    rounding.set(Site::v_cast, Rule{bf16});
    EXPECT_EQ(site_bias(layer, rounding, Site::v_cast).rms, 0);
    for (double& x : layer.v.values) x = 1 + 0x1p-8 + 0x1p-12;  // rounds up to 1 + 2^-7 by 2^-8 - 2^-12
    const SiteBias bias = site_bias(layer, rounding, Site::v_cast);
    EXPECT_EQ(bias.mean, 0x1p-8 - 0x1p-12);
    EXPECT_EQ(bias.rms, 0x1p-8 - 0x1p-12);
}

TEST(Maximize, RefusesSitesThatHaveNoErrorToMaximize) {
    EXPECT_THROW((void)maximize(Site::merge, plan("fa2"), small()), RequestError);
    EXPECT_THROW((void)maximize(Site::scale, plan("fa2"), small()), RequestError);
    // One tile of keys is never rescaled, one query head's gradients are summed with nobody's.
    EXPECT_THROW((void)maximize(Site::rescale_factor, plan("fa2"), small()), RequestError);
    EXPECT_THROW((void)maximize(Site::kv_group_reduce, plan("fa2"), small()), RequestError);
    // What is cast is in fp32 already.
    try {
        (void)maximize(Site::partial_o_cast, plan("fa2-unfused-splitkv"), small());
        ADD_FAILURE();
    } catch (const RequestError& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr("site partial_o_cast: rounds nothing in "));
    }
    MaximizeOptions grouped = small();
    grouped.shape.heads = 2;
    EXPECT_GT(maximize(Site::kv_group_reduce, plan("fa2"), grouped).reached.rms, 0);
}

}  // namespace
}  // namespace faultline
