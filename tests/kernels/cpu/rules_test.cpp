// SPDX-License-Identifier: Apache-2.0
// Every rule changes what it says and nothing else. For each rounding site of each preset, `repaired` (the site exact) and
// `alone` (every other site exact) are held against runs in which nothing is exact that was not, or nothing rounds, but the
// site's tiles are replaced by those of the run in question: they must then agree in every bit of every tile of every other
// site. A tile's own record of its exact value proves nothing, since an exact site is shown a copy of itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>

#include "heads.hpp"
#include "log.hpp"

namespace faultline::testing {
namespace {

/// Small enough to be quick, large enough for several tiles, tails, and a rounding that shows at every site.
Head probe(int query_heads) { return Head(70, 150, 72, 11, query_heads, 3.0); }

/// The same with a softcap, sinks and dropout, as far as the plan can run them.
Head probe_with_extras(const RoundingPlan& plan) {
    Head head = probe(1);
    head.softcap = 20;
    if (plan.schedule.normalize == Normalize::each_tile) return head;
    head.sink = {1.0};
    head.drop(0.9, 5);
    return head;
}

bool rounds_at(const Log& log, Site site) {
    for (const Event& e : log.events) {
        if (e.site != site) continue;
        for (std::size_t i = 0; i < e.value.size(); ++i)
            if (std::isfinite(e.exact[i]) && e.value[i] != e.exact[i]) return true;
    }
    return false;
}

/// Sites whose operand is in their format already in at least one preset.
const std::map<Site, const char*>& idle() {
    static const std::map<Site, const char*> sites{
        {Site::q_cast, "the inputs are bf16"},
        {Site::k_cast, "the inputs are bf16"},
        {Site::v_cast, "the inputs are bf16"},
        {Site::do_cast, "the inputs are bf16"},
        {Site::row_max, "the maximum of floats is a float"},
        {Site::partial_o_cast, "fp32, as the normalised output is"},
        {Site::s_cast, "fp32, as the accumulator is"},
        {Site::bwd_s_cast, "fp32, as the accumulator is"},
        {Site::dp_cast, "fp32, as the accumulator is"},
        {Site::exp_argument, "the difference of two bf16 scores near each other is a float"},
        {Site::o_cast, "the running output is bf16 already"},
        {Site::dq_cast, "the running dq is bf16 already"},
        {Site::dk_cast, "the running dk is bf16 already"},
        {Site::dv_cast, "the running dv is bf16 already"},
        {Site::rescale_factor, "with one key tile there is nothing to rescale"},
        {Site::o_rescale, "with one key tile there is nothing to rescale"},
        {Site::sink_p, "the saved softmax is fp32 already"},
    };
    return sites;
}

class Rules : public ::testing::TestWithParam<const char*> {};

/// Where a replaced tile does not go the way of the kernel's own.
bool replaceable(Site site, const RoundingPlan& plan) {
    if (site == Site::scale) return false;    // shown as a copy: the constant is used in many places
    if (site == Site::row_sum) return false;  // a change goes into the first of the row's partial sums
    // Seen in the sweep that makes dq, dk and dv, not in the one before it that makes delta.
    constexpr std::array twice{Site::bwd_s_accumulate, Site::bwd_s_cast, Site::bwd_softcap,   Site::bwd_s_scale,
                               Site::bwd_exp_argument, Site::bwd_exp,    Site::dp_accumulate, Site::dp_cast,
                               Site::dp_dropout,       Site::bwd_p_cast};
    // The forward's dropped p is made again for dv, unseen; a cap's saved tanh stands in the backward's slope.
    if (site == Site::p_dropout) return false;
    if (site == Site::sink_sum && plan.schedule.row_sum_adds == RowSumAdds::two_sums) return false;
    return !needs_dp(plan.schedule.delta_from) || std::find(twice.begin(), twice.end(), site) == twice.end();
}

/// Tiles of all sites but one are the same in every bit.
void expect_same_but(const Log& a, const Log& b, Site site, const char* what) {
    ASSERT_EQ(a.events.size(), b.events.size()) << name(site);
    for (std::size_t e = 0; e < a.events.size(); ++e) {
        ASSERT_EQ(a.events[e].site, b.events[e].site);
        if (a.events[e].site != site) {
            ASSERT_EQ(a.events[e].value, b.events[e].value) << name(a.events[e].site) << " " << what << name(site);
        }
    }
}

void repair_each(const Head& head, const RoundingPlan& whole, const std::vector<Site>& sites) {
    Log before;
    run(head, whole, &before);
    for (const Site site : sites) {
        Log after;
        run(head, whole.repaired(site), &after);
        ASSERT_EQ(before.events.size(), after.events.size()) << name(site);
        std::size_t first = before.events.size();
        bool changed = false;
        for (std::size_t e = 0; e < before.events.size(); ++e) {
            if (after.events[e].site != site) continue;
            first = std::min(first, e);
            changed = changed || before.events[e].value != after.events[e].value;
        }
        if (first == before.events.size()) continue;  // the schedule does not reach it
        // At its first tile the operands are those of the whole plan, whose record says what is exact there.
        EXPECT_EQ(after.events[first].value, before.events[first].exact) << name(site) << " still rounds when exact";
        if (rounds_at(before, site)) {
            EXPECT_TRUE(changed) << name(site) << " rounds, and its repair changes nothing";
        } else {
            EXPECT_TRUE(idle().count(site) > 0) << name(site) << " has a rule that never rounds";
        }
        if (!replaceable(site, whole)) continue;
        Replay replayed(after, site);
        run(head, whole, &replayed);
        expect_same_but(after, replayed, site, "changed with the repair of ");
    }
}

/// Those of a softcap, sinks and dropout that the plan rounds at, and those that stand next to them.
std::vector<Site> sites_of_extras(const RoundingPlan& plan) {
    std::vector<Site> sites;
    for (const Site site : plan.rounding_sites())
        if (!takes_part(site, {}) || site == Site::delta || site == Site::o_normalize || site == Site::ds ||
            site == Site::dv_cast || site == Site::dq_cast)
            sites.push_back(site);
    return sites;
}

TEST_P(Rules, RepairMakesItsSiteExactAndChangesNothingElse) {
    const RoundingPlan whole = preset(GetParam(), 72);
    repair_each(probe(2), whole, whole.rounding_sites());  // two query heads, so that the group's reduction is passed
}

TEST_P(Rules, SoSitesOfCapSinkAndDropout) {
    const RoundingPlan whole = preset(GetParam(), 72);
    repair_each(probe_with_extras(whole), whole, sites_of_extras(whole));
}

// A value after a site is in the site's format.
TEST_P(Rules, ValuesAreInTheFormatOfTheirSite) {
    const RoundingPlan whole = preset(GetParam(), 72);
    Log log;
    run(probe(2), whole, &log);
    run(probe_with_extras(whole), whole, &log);
    for (const Event& e : log.events) {
        const Rule& rule = whole[e.site];
        if (is_exact(rule.format)) continue;
        for (const double x : e.value)
            if (!std::isnan(x)) {
                ASSERT_EQ(round(x, rule.format, Rounding::nearest_even), x) << name(e.site);
            }
    }
}

// exact_except(site) is the exact plan (which is the truth: shapes_test) but for that site's tiles.
TEST_P(Rules, AloneDiffersFromTheExactPlanAtItsSiteOnly) {
    const RoundingPlan whole = preset(GetParam(), 72);
    RoundingPlan nothing = whole;
    for (const Site site : whole.rounding_sites()) nothing.set(site, Rule{});
    const auto alone_differs = [&](const Head& head, Site site) {
        if (!replaceable(site, whole)) return;
        Log alone;
        run(head, whole.exact_except(site), &alone);
        Replay replayed(alone, site);
        run(head, nothing, &replayed);
        expect_same_but(alone, replayed, site, "rounds with only ");
    };
    const Head head = probe(2), with_extras = probe_with_extras(whole);
    for (const Site site : whole.rounding_sites()) alone_differs(head, site);
    for (const Site site : sites_of_extras(whole)) alone_differs(with_extras, site);
}

INSTANTIATE_TEST_SUITE_P(Presets, Rules,
                         ::testing::Values("standard-bf16", "fa1", "fa2", "fa2-unfused", "fa2-unfused-splitkv", "fa3",
                                           "fa4", "thunderkittens", "llmc", "repo-2510.04212"),
                         [](const auto& tested) {
                             std::string name = tested.param;
                             std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
                             return name;
                         });

}  // namespace
}  // namespace faultline::testing
