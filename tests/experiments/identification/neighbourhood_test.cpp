// SPDX-License-Identifier: Apache-2.0
// What is one step away from a plan.
#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include <faultline/identification/neighbourhood.hpp>
#include <faultline/plan/effect.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/presets.hpp>

namespace faultline::identification {
namespace {

TEST(Neighbourhood, HoldsPlansThatDifferEachOnce) {
    for (const RoundingPlan& preset : presets()) {
        const RoundingPlan plan = for_head_dim(preset, 128, true);
        const std::vector<Neighbour> all = neighbours(plan, {});
        EXPECT_GT(all.size(), 40u) << preset.name;
        for (std::size_t i = 0; i < all.size(); ++i) {
            EXPECT_FALSE(all[i].changes.empty());
            EXPECT_EQ(all[i].changes, differences(plan, all[i].plan));
            EXPECT_EQ(problem_with(all[i].plan), "") << preset.name << ": " << all[i].field;
            for (std::size_t j = 0; j < i; ++j)
                EXPECT_FALSE(all[i].plan.same_numerics(all[j].plan)) << preset.name << ": " << all[i].field;
            // What is said to leave the forward alone changes no site and no field of it.
            for (const SiteInfo& site : sites())
                if (all[i].backward_only && site.pass != Pass::backward) {
                    EXPECT_EQ(all[i].plan[site.site], plan[site.site]);
                }
        }
    }
}

TEST(Neighbourhood, HoldsNoPlanTwiceUnderOtherFields) {
    for (const RoundingPlan& preset : presets()) {
        const RoundingPlan plan = for_head_dim(preset, 64, true);
        const std::vector<Neighbour> all = neighbours(plan, {});
        for (std::size_t i = 0; i < all.size(); ++i) {
            EXPECT_FALSE(same_effect(all[i].plan, plan)) << preset.name << ": " << all[i].field;
            for (std::size_t j = 0; j < i; ++j)
                EXPECT_FALSE(same_effect(all[i].plan, all[j].plan)) << preset.name << ": " << all[i].field;
        }
        for (const Neighbour& pair : rounding_pairs(plan, all, {Site::p_cast, Site::bwd_p_cast, Site::ds_cast}))
            for (const Neighbour& member : pair.members)
                EXPECT_FALSE(same_effect(pair.plan, member.plan)) << preset.name << ": " << pair.field;
    }
}

TEST(Neighbourhood, OfHeadsOfOneTileHoldsNoOrder) {
    const RoundingPlan plan = for_head_dim(faultline::plan("fa2"), 64, true);  // 128 keys forward and backward
    const auto fields_of = [](const RoundingPlan& around, const NeighbourhoodOptions& options) {
        std::set<std::string> found;
        for (const Neighbour& n : neighbours(around, options)) found.insert(n.field);
        return found;
    };
    const auto fields = [&](const NeighbourhoodOptions& options) { return fields_of(plan, options); };
    const std::set<std::string> of_one = fields({.queries = 128, .keys = 128}),
                                of_two = fields({.queries = 129, .keys = 129});
    for (const char* order : {"key_order", "bwd_query_order", "bwd_key_order", "rescale_argument", "pv_carry",
                              "dq_carry", "dkv_carry", "max_policy"}) {
        EXPECT_FALSE(of_one.contains(order)) << order;
        EXPECT_TRUE(of_two.contains(order)) << order;
    }
    EXPECT_TRUE(of_one.contains("block_k")) << "smaller ones";
    RoundingPlan from_sink = plan;
    from_sink.schedule.sink_in_max = true;
    const NeighbourhoodOptions sink_and_one_tile{.extras = {.sink = true}, .queries = 128, .keys = 128};
    EXPECT_TRUE(fields_of(from_sink, sink_and_one_tile).contains("max_policy")) << "the maximum starts at the sink";
    EXPECT_FALSE(fields(sink_and_one_tile).contains("max_policy")) << "fa2's does not";
}

// efficient says nothing of the argument's form, its scores being scaled: the forms come with the scale.
TEST(Neighbourhood, TriesTheFormsOfTheArgumentWhereTheScaleComesToIt) {
    std::set<ArgumentForm> forms;
    for (const Neighbour& n : neighbours(for_head_dim(faultline::plan("efficient"), 64, true), {}))
        if (n.plan.schedule.scale_at == ScaleAt::exponent) forms.insert(n.plan.schedule.argument);
    EXPECT_EQ(forms.size(), 3u);
}

TEST(Neighbourhood, HoldsWhatDistinguishesKernels) {
    const RoundingPlan plan = for_head_dim(faultline::plan("fa2"), 128, true);
    std::set<std::string> found;
    for (const Neighbour& n : neighbours(plan, {}))
        for (const Difference& d : n.changes) found.insert(d.field + "=" + d.to);
    for (const char* wanted : {"schedule.argument=unfused",
                               "schedule.argument=subtract_then_scale",
                               "schedule.key_order=ascending",
                               "schedule.block_k=128",
                               "schedule.block_k=256",
                               "schedule.key_splits=4",
                               "schedule.row_sum_adds=rounded",
                               "schedule.row_sum_order=warp_of_32",
                               "schedule.ds_scale=before",
                               "schedule.ds_p=cast",
                               "schedule.delta_from=o_unrounded",
                               "schedule.dq_carry=chained",
                               "schedule.dkv_carry=added",
                               "schedule.bwd_query_order=ascending",
                               "sites.p_cast.format=fp16",
                               "sites.ds_cast.format=fp16",
                               "sites.s_accumulate.accumulation=ampere-mma-bf16",
                               "sites.o_cast.rounding=toward_zero",
                               "sites.p_cast.rounding=stochastic",
                               "sites.dq_cast.rounding=toward_zero"})
        EXPECT_TRUE(found.contains(wanted)) << wanted;
}

// A cast that a plan has not, with the rounding of it, is one rule: format alone is another kernel, and no step to it.
TEST(Neighbourhood, HoldsACastThatCutsWhereThePlanHasNone) {
    const RoundingPlan plan = for_head_dim(faultline::plan("math"), 64, true);
    const std::vector<Neighbour> all = neighbours(plan, {});
    for (const Site site : {Site::p_cast, Site::ds_cast})
        for (const Format& format : {bf16, fp16})
            for (const Rounding rounding : {Rounding::nearest_even, Rounding::toward_zero, Rounding::stochastic}) {
                Rule wanted = plan[site];
                wanted.format = format;
                wanted.rounding = rounding;
                EXPECT_EQ(
                    std::count_if(all.begin(), all.end(),
                                  [&](const Neighbour& n) { return n.plan.same_numerics(plan.with(site, wanted)); }),
                    1)
                    << name(site);
            }
}

TEST(Neighbourhood, WithoutGradientsHoldsNoChangeOfTheBackwardAlone) {
    const std::vector<Neighbour> all = neighbours(for_head_dim(plan("fa2"), 64, true), {.backward = false});
    EXPECT_TRUE(std::none_of(all.begin(), all.end(), [](const Neighbour& n) { return n.backward_only; }));
}

TEST(Neighbourhood, PairsMakeBothChangesAndExcludeTheSameField) {
    const RoundingPlan plan = for_head_dim(faultline::plan("fa2"), 128, true);
    const std::vector<Neighbour> all = neighbours(plan, {});
    const auto named = [&](const std::string& field, std::size_t skip = 0) {
        for (const Neighbour& n : all)
            if (n.field == field && skip-- == 0) return n;
        return Neighbour{};
    };
    const Neighbour both = together(plan, named("argument"), named("key_order"));
    EXPECT_EQ(both.plan.schedule.key_order, Order::ascending);
    EXPECT_EQ(both.plan.schedule.argument, named("argument").plan.schedule.argument);
    EXPECT_EQ(both.changes.size(), 2u);
    EXPECT_TRUE(together(plan, named("argument", 0), named("argument", 1)).field.empty());
}

}  // namespace
}  // namespace faultline::identification
