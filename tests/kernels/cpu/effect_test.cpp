// SPDX-License-Identifier: Apache-2.0
// Every field of every preset's schedule and each of its rules, changed to each other value: what effect.hpp says of it
// against outputs, bit for bit, and against the exact function.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include <faultline/plan/difference.hpp>
#include <faultline/plan/effect.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/plan/schedule_fields.hpp>

#include "../emulated/plans.hpp"
#include "heads.hpp"

namespace faultline::testing {
namespace {

/// Problems that between them show every field: several tiles each way, a key head with two query heads, and where the plan
/// can run them softcap, sinks, dropout, an additive mask. Repeated maxima for the policies of the maximum.
std::vector<Head> heads_for(const RoundingPlan& plan) {
    const std::ptrdiff_t n_k = plan.schedule.exp_poly_every != 0 ? 108 : 21;
    std::vector<Head> heads;
    Head causal(21, n_k, 12, 5, 2, 3.0);
    heads.push_back(causal);
    Head full(9, n_k, 40, 6, 1, 20.0);
    full.causal = false;
    for (std::ptrdiff_t j = 0; j < 40; ++j) full.k(0, j) = full.k(2, j);
    heads.push_back(full);
    const auto can = [&](const Extras& extras) { return problem_with(plan, extras).empty(); };
    Head extra(13, n_k, 12, 7, 1, 2.0);
    if (can({.sink = true})) extra.sink.push_back(9.0);
    if (can({.sink = !extra.sink.empty(), .dropout = true})) extra.drop(0.8, 5);
    extra.bias.push_back(random_matrix(13, n_k, 1.0, 77));
    heads.push_back(extra);
    if (can({.softcap = true})) {
        Head capped(13, n_k, 12, 8, 1, 2.0);
        capped.softcap = 3.0;
        heads.push_back(capped);
    }
    return heads;
}

/// All numbers of all outputs.
std::vector<double> outputs(const Head& head, const RoundingPlan& plan) {
    std::vector<double> all;
    const Result r = run(head, plan);
    const auto add = [&](const std::vector<double>& values) { all.insert(all.end(), values.begin(), values.end()); };
    for (const HeadForward& h : r.forward.heads) {
        add(h.o.values);
        add(h.lse);
    }
    for (const Matrix& dq : r.backward.dq) add(dq.values);
    add(r.backward.dk.values);
    add(r.backward.dv.values);
    add(r.backward.dsink);
    return all;
}

/// Tiles of 8 queries and 16 keys, so that small heads have several; the polynomial wants 96 keys.
RoundingPlan small(const RoundingPlan& preset) {
    RoundingPlan plan = preset;
    plan.tiles.clear();
    Schedule& s = plan.schedule;
    if (s.block_q > 0) s.block_q = 8;
    if (s.block_k > 0) s.block_k = s.exp_poly_every != 0 ? 96 : 16;
    if (s.bwd_block_q > 0) s.bwd_block_q = 12;
    if (s.bwd_block_k > 0) s.bwd_block_k = 8;
    return plan;
}

/// A schedule in which every field that can be idle is.
RoundingPlan nothing_matters() {
    RoundingPlan plan;
    Schedule& s = plan.schedule;
    s.scale_at = ScaleAt::scores;
    s.normalize = Normalize::each_tile;
    s.p_saved = true;
    s.delta_from = DeltaFrom::p_dp;
    return plan;
}

struct Change {
    std::string field, value;
    RoundingPlan plan;
};
std::vector<Change> changes_of(const RoundingPlan& plan) {
    std::vector<Change> all;
    for (const std::string_view wanted : schedule_field_names()) {
        RoundingPlan changed = plan;
        for_each_field(changed.schedule, [&](std::string_view field, auto& value) {
            if (field != wanted) return;
            using T = std::remove_reference_t<decltype(value)>;
            const T before = value;
            const auto take = [&](T other) {
                value = other;
                const auto found = differences(plan, changed);
                if (!found.empty()) all.push_back({std::string(field), found.front().to, changed});
                value = before;
            };
            if constexpr (std::is_same_v<T, bool>) {
                take(!before);
            } else if constexpr (std::is_same_v<T, int>) {
                for (const int other : {0, 1, 2, 8}) take(other);
            } else if constexpr (std::is_same_v<T, double>) {
                for (const double other : {0.25, 4.0}) take(other);
            } else {
                for (const auto& entry : enumerators<T>()) take(entry.value);
            }
        });
    }
    std::erase_if(all, [](const Change& change) { return !problem_with(change.plan).empty(); });
    return all;
}

/// The plan with casts that hide no last bit of fp32.
RoundingPlan wide(RoundingPlan plan) {
    for (const Site site : {Site::p_cast, Site::bwd_p_cast, Site::ds_cast, Site::o_cast, Site::partial_o_cast,
                            Site::dq_cast, Site::dk_cast, Site::dv_cast, Site::kv_group_reduce})
        if (!plan[site].is_exact()) plan.set(site, {.format = fp32});
    return plan;
}

/// Whether the change moves a bit of one of the heads that both plans can run.
bool is_seen(const std::vector<Head>& heads, const std::vector<std::vector<double>>& before,
             const RoundingPlan& changed) {
    for (std::size_t i = 0; i < heads.size(); ++i) {
        if (!problem_with(changed, extras_of(heads[i].group())).empty()) continue;
        const std::vector<double> after = outputs(heads[i], changed);
        if (std::memcmp(after.data(), before[i].data(), after.size() * sizeof(double)) != 0) return true;
    }
    return false;
}

std::vector<std::vector<double>> outputs_of(const std::vector<Head>& heads, const RoundingPlan& plan) {
    std::vector<std::vector<double>> all;
    for (const Head& head : heads) all.push_back(outputs(head, plan));
    return all;
}

TEST(Effect, WhatIsSaidToHaveNoneMovesNoBit) {
    std::set<std::string> met;
    for (const RoundingPlan& preset : presets()) {
        const RoundingPlan plan = small(preset);
        ASSERT_EQ(problem_with(plan), "") << plan.name;
        const std::vector<Head> heads = heads_for(plan);
        const std::vector<std::vector<double>> before = outputs_of(heads, plan);
        RoundingPlan idle_rules = plan;
        for (const SiteInfo& site : sites())
            if (!reaches(plan, site.site)) idle_rules.set(site.site, {.format = e4m3, .rounding = Rounding::upward});
        EXPECT_FALSE(is_seen(heads, before, idle_rules)) << plan.name;
        EXPECT_TRUE(same_effect(plan, idle_rules)) << plan.name;
        for (const Change& change : changes_of(plan)) {
            if (!same_effect(plan, change.plan)) {
                EXPECT_EQ(lacking(plan, change.field).empty() || lacking(change.plan, change.field).empty(), true)
                    << preset.name << " " << change.field;
                continue;
            }
            met.insert(change.field);
            EXPECT_FALSE(is_seen(heads, before, change.plan)) << preset.name << " " << change.field;
            EXPECT_FALSE(is_seen(heads, before, without_idle(change.plan))) << preset.name << " " << change.field;
        }
    }
    for (const std::string_view field : schedule_field_names()) {
        const bool can_be_idle = !lacking(nothing_matters(), field).empty();
        EXPECT_EQ(met.contains(std::string(field)) || !can_be_idle, true) << field << " has not been tried";
    }
}

/// Of one key tile a lazy maximum is the true one unless a sink starts it, and what a plan refuses to compute passes no site.
TEST(Effect, NothingLagsInOneTileAndWhatIsRefusedIsNeverReached) {
    RoundingPlan whole = small(plan("fa2"));
    whole.schedule.block_k = 0;
    const auto with = [&](auto&& change) {
        RoundingPlan changed = whole;
        change(changed.schedule);
        return changed;
    };
    const auto lazy = [](RoundingPlan plan, double threshold) {
        plan.schedule.max_policy = MaxPolicy::lazy;
        plan.schedule.max_threshold = threshold;
        return plan;
    };
    for (const RoundingPlan& plan :
         {whole, with([](Schedule& s) { s.zero_sum = ZeroSum::weighted; }), with([](Schedule& s) {
              s.sink_in_max = true;
              s.key_centering = true;
          }),
          with([](Schedule& s) { s.normalize = Normalize::each_tile; }), with([](Schedule& s) {
              s.normalize = Normalize::before_pv;
              s.delta_in = DeltaIn::accumulator;
          })}) {
        const std::vector<Head> heads = heads_for(plan);
        const std::vector<std::vector<double>> before = outputs_of(heads, plan);
        for (const double threshold : {0.0, 8.0}) {
            EXPECT_TRUE(same_effect(plan, lazy(plan, threshold))) << to_toml(plan);
            EXPECT_FALSE(is_seen(heads, before, lazy(plan, threshold))) << to_toml(plan);
        }
        RoundingPlan coarse = plan;
        for (const SiteInfo& site : sites())
            if (!reaches(plan, site.site)) coarse.set(site.site, {.format = e4m3, .rounding = Rounding::upward});
        EXPECT_TRUE(same_effect(plan, coarse));
        EXPECT_FALSE(is_seen(heads, before, coarse)) << to_toml(plan);
    }
    const RoundingPlan from_sink = with([](Schedule& s) { s.sink_in_max = true; });
    std::vector<Head> heads{Head(13, 21, 12, 7, 1, 2.0)};
    heads[0].sink.push_back(0.5);
    EXPECT_FALSE(same_effect(from_sink, lazy(from_sink, 8)));
    EXPECT_TRUE(is_seen(heads, outputs_of(heads, from_sink), lazy(from_sink, 8)));
    EXPECT_FALSE(is_seen(heads, outputs_of(heads, whole), lazy(whole, 8)));
}

/// Rows do not meet in the forward but in the numbers of a stochastic rounding; under a causal mask the tile decides how many
/// key tiles a row is led through that it sees nothing of, which are seen where such a tile rounds: where it normalises again,
/// or where a maximum that does not move rescales by something else than 1.
TEST(Effect, AQueryTileIsSeenByStochasticSitesAndWhereAMaskedTileRounds) {
    for (const RoundingPlan& preset : presets()) {
        RoundingPlan plan = small(preset), other = plan;
        for (const auto& [a, b] : {std::pair{0, 16}, {4, 9}}) {
            plan.schedule.block_q = a;
            other.schedule.block_q = b;
            const std::vector<Head> heads = heads_for(plan);
            const bool masked_tile_rounds =
                plan.schedule.normalize == Normalize::each_tile ||
                (plan.schedule.rescale_argument == ArgumentForm::fused && lacking(plan, "rescale_argument").empty());
            EXPECT_EQ(is_seen(heads, outputs_of(heads, plan), other), masked_tile_rounds) << plan.name;
        }
    }
    RoundingPlan plan = small(faultline::plan("fa2")).with(Site::p_cast, {bf16, Rounding::stochastic}), other = plan;
    other.schedule.block_q = 0;
    const std::vector<Head> heads = heads_for(plan);
    EXPECT_TRUE(is_seen(heads, outputs_of(heads, plan), other));
}

/// Each value of each field, in the first preset that shows it, with its casts or with wide ones. The rows of a query tile share
/// the numbers of a stochastic rounding, so that block_q is seen there.
TEST(Effect, EveryOtherFieldIsSeenInSomePreset) {
    std::map<std::string, bool> seen;
    for (const RoundingPlan& preset : presets()) {
        if (preset.rounding_sites().empty()) continue;
        const RoundingPlan plan = small(preset);
        const std::vector<Head> heads = heads_for(plan);
        const auto shows = [&](RoundingPlan a, RoundingPlan b) {
            if (a.schedule.block_q != b.schedule.block_q)
                for (RoundingPlan* p : {&a, &b})
                    p->set(Site::p_cast, {.format = bf16, .rounding = Rounding::stochastic});
            return is_seen(heads, outputs_of(heads, a), b) || is_seen(heads, outputs_of(heads, wide(a)), wide(b));
        };
        for (const Change& change : changes_of(plan)) {
            if (same_effect(plan, change.plan)) continue;
            bool& already = seen[change.field + " = " + change.value];
            already = already || shows(plan, change.plan);
        }
    }
    EXPECT_GT(seen.size(), 90u);
    for (const auto& [change, found] : seen) EXPECT_TRUE(found) << change;
}

/// A change that find_problem lets through and that makes another function of the exact plan would be a combination that no
/// kernel can have. The paper's shifted maximum leaves a row no p where it shifts far: its beta is not tried.
TEST(Effect, WhatIsNotRefusedIsTheSameFunction) {
    const Head head(13, 21, 12, 5, 2, 2.0);
    for (const RoundingPlan& preset : presets()) {
        RoundingPlan plan;
        plan.schedule = small(preset).schedule;
        const std::vector<double> expected = outputs(head, plan);
        for (const Change& change : changes_of(plan)) {
            const std::vector<double> found = outputs(head, change.plan);
            // Exact rules leave binary64, 2^-53 each; constants of the kernels' are fp32, 2^-24 of a logit of some 10.
            for (std::size_t i = 0; i < found.size(); ++i)
                ASSERT_NEAR(found[i], expected[i], 1e-5) << preset.name << " " << change.field << " = " << change.value;
        }
    }
}

/// The same of combinations of many.
TEST(Effect, PlansDrawnAtRandomAreTheSameFunction) {
    const Head head(9, 21, 8, 5, 2, 2.0);
    const std::vector<double> expected = outputs(head, RoundingPlan{});
    int tried = 0;
    for (std::uint64_t seed = 0; seed < 600; ++seed) {
        RoundingPlan plan;
        plan.schedule = drawn(seed).schedule;
        if (plan.schedule.max_policy == MaxPolicy::stable || find_problem(plan)) continue;
        ++tried;
        const std::vector<double> found = outputs(head, plan);
        for (std::size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-5) << to_toml(plan);
        EXPECT_EQ(outputs(head, without_idle(plan)), found) << to_toml(plan);
    }
    EXPECT_GT(tried, 100);
}

}  // namespace
}  // namespace faultline::testing
