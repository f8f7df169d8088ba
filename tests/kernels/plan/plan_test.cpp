// SPDX-License-Identifier: Apache-2.0
// Changing one rule of a plan changes that rule and nothing else; tile sizes by head; nearest names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/plan/difference.hpp>
#include <faultline/plan/effect.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/presets.hpp>

namespace faultline {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

/// A rule that no preset has at any site.
Rule strange_rule(Site site) {
    Rule rule{.format = e5m2, .rounding = Rounding::to_odd};
    if (info(site).accumulates) rule.accumulation = {Accumulation::Kind::pairwise, {}};
    return rule;
}

void expect_others_equal(const RoundingPlan& a, const RoundingPlan& b, Site except) {
    for (const SiteInfo& site : sites()) {
        if (site.site == except) continue;
        EXPECT_EQ(a[site.site], b[site.site]) << site.name;
    }
    EXPECT_EQ(a.schedule, b.schedule);
    EXPECT_EQ(a.tiles, b.tiles);
}

TEST(Plan, WithChangesTheSiteAndNothingElse) {
    for (const RoundingPlan& preset : presets()) {
        for (const SiteInfo& site : sites()) {
            const RoundingPlan changed = preset.with(site.site, strange_rule(site.site));
            EXPECT_EQ(changed[site.site], strange_rule(site.site)) << preset.name << " " << site.name;
            expect_others_equal(preset, changed, site.site);
            for (const Difference& d : differences(preset, changed))
                EXPECT_TRUE(d.field.starts_with("sites." + std::string(site.name) + ".")) << d.field;
            EXPECT_FALSE(preset.same_numerics(changed));
        }
    }
}

TEST(Plan, RepairedMakesTheSiteExactAndNothingElse) {
    for (const RoundingPlan& preset : presets()) {
        for (const SiteInfo& site : sites()) {
            const RoundingPlan repaired = preset.repaired(site.site);
            EXPECT_TRUE(repaired[site.site].is_exact());
            expect_others_equal(preset, repaired, site.site);
            EXPECT_EQ(repaired.same_numerics(preset), preset[site.site] == Rule{}) << preset.name << " " << site.name;
        }
    }
}

TEST(Plan, ExactExceptKeepsTheSiteAndTheSchedule) {
    for (const RoundingPlan& preset : presets()) {
        for (const SiteInfo& site : sites()) {
            const RoundingPlan alone = preset.exact_except(site.site);
            EXPECT_EQ(alone[site.site], preset[site.site]);
            EXPECT_EQ(alone.schedule, preset.schedule);
            EXPECT_EQ(alone.tiles, preset.tiles);
            for (const Site other : alone.rounding_sites()) EXPECT_EQ(other, site.site);
        }
    }
}

TEST(Plan, RoundingSitesAreTheOnesThatRound) {
    const RoundingPlan plan = RoundingPlan{}
                                  .with(Site::ds_cast, {.format = bf16})
                                  .with(Site::p_cast, {.format = bf16})
                                  .with(Site::delta, {.accumulation = fp32_sequential});
    EXPECT_THAT(plan.rounding_sites(), ElementsAre(Site::p_cast, Site::delta, Site::ds_cast));
    EXPECT_THAT(RoundingPlan{}.rounding_sites(), IsEmpty());
}

TEST(Plan, DifferencesNameEveryField) {
    RoundingPlan a;
    RoundingPlan b = a.with(Site::delta, {fp32, Rounding::toward_zero, fp32_sequential});
    b.schedule.zero_sum = ZeroSum::weighted;
    b.schedule.block_q = 64;
    b.schedule.stable_beta = 2.5;
    b.schedule.key_centering = true;
    b.tiles = {{.head_dim = 64, .causal = true, .block_q = 192, .bwd_block_k = 80}};
    EXPECT_THAT(differences(a, b),
                ElementsAre(Difference{"schedule.block_q", "0", "64"}, Difference{"schedule.stable_beta", "7", "2.5"},
                            Difference{"schedule.zero_sum", "none", "weighted"},
                            Difference{"schedule.key_centering", "false", "true"},
                            Difference{"tiles", "none", "64 causal: 192 queries, backward 80 keys"},
                            Difference{"sites.delta.format", "exact", "fp32"},
                            Difference{"sites.delta.rounding", "nearest_even", "toward_zero"},
                            Difference{"sites.delta.accumulation", "exact", "fp32-sequential"}));
    EXPECT_THAT(differences(a, a), IsEmpty());
}

/// Of a plan that refuses every sink and softcap: the cause, not the rules and the field that nothing reads then.
TEST(Plan, DifferencesThatAreReadNameTheCause) {
    RoundingPlan centered = plan("fa2");
    centered.schedule.key_centering = true;
    const Difference cause{"schedule.key_centering", "false", "true"};
    EXPECT_THAT(differences(plan("fa2"), without_idle(centered)), testing::SizeIs(testing::Gt(1u)));
    EXPECT_THAT(differences_that_are_read(plan("fa2"), centered), ElementsAre(cause));
    EXPECT_THAT(differences_that_are_read(centered, without_idle(centered)), IsEmpty());
}

TEST(Tiles, FirstCaseThatFitsDecides) {
    RoundingPlan plan;
    plan.schedule.block_q = 16;
    plan.schedule.block_k = 16;
    plan.schedule.bwd_block_q = 16;
    plan.schedule.bwd_block_k = 16;
    plan.tiles = {{.head_dim = 64, .causal = true, .block_q = 192, .block_k = 128},
                  {.head_dim = 64, .block_q = 192, .block_k = 192, .delta_threads = 4},
                  {.head_dim = 128, .bwd_block_q = 80, .bwd_block_k = 96}};
    const auto tiles = [&](int head_dim, bool causal) {
        const Schedule s = for_head_dim(plan, head_dim, causal).schedule;
        return std::array{s.block_q, s.block_k, s.bwd_block_q, s.bwd_block_k, s.delta_threads};
    };
    EXPECT_THAT(tiles(64, true), ElementsAre(192, 128, 16, 16, 8));
    EXPECT_THAT(tiles(64, false), ElementsAre(192, 192, 16, 16, 4));
    EXPECT_THAT(tiles(40, true), ElementsAre(192, 128, 16, 16, 8)) << "a smaller head runs the next larger kernel";
    EXPECT_THAT(tiles(65, true), ElementsAre(16, 16, 80, 96, 8));
    EXPECT_THAT(tiles(256, true), ElementsAre(16, 16, 16, 16, 8)) << "no case fits: the schedule stays";
    const RoundingPlan settled = for_head_dim(plan, 64);
    EXPECT_THAT(settled.tiles, IsEmpty());
    EXPECT_TRUE(for_head_dim(settled, 128).same_numerics(settled));
}

TEST(NearestName, CountsEditsAndGivesUpWhenNothingIsNear) {
    constexpr std::array<std::string_view, 3> names{"ascending", "descending", "p_cast"};
    EXPECT_EQ(nearest_name("descendin", names), "descending");
    EXPECT_EQ(nearest_name("acsending", names), "ascending");  // one swap
    EXPECT_EQ(nearest_name("pcast", names), "p_cast");
    EXPECT_EQ(nearest_name("sideways", names), "");
    EXPECT_EQ(nearest_name("", names), "");
    EXPECT_EQ(nearest_name(std::string(100000, 'a'), names), "");
    EXPECT_EQ(expected_one_of("sideways", names), "expected one of ascending, descending, p_cast");
    EXPECT_EQ(expected_one_of("p_casts", names),
              "expected one of ascending, descending, p_cast (did you mean \"p_cast\"?)");
}

}  // namespace
}  // namespace faultline
