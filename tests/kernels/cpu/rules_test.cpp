// SPDX-License-Identifier: Apache-2.0
// Every rule changes what it says and nothing else: for each rounding site of each preset, the plan with that site exact
// differs from the plan at the site, has no local error there, and has the same bits at every tile computed before it.
#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include "heads.hpp"

namespace faultline::testing {
namespace {

struct Event {
    Site site;
    int q_tile, k_tile;
    std::vector<double> value, exact;
};

/// Every tile at every site, in the order in which the kernel passes them.
class Log final : public Instrument {
  public:
    [[nodiscard]] bool watches(Site) const override { return true; }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        Event e{site, where.q_tile, where.k_tile, {}, {}};
        for (std::ptrdiff_t i = 0; i < value.rows; ++i)
            for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
                e.value.push_back(value(i, j));
                e.exact.push_back(exact(i, j));
            }
        events.push_back(std::move(e));
    }
    std::vector<Event> events;
};

/// Small enough to be quick, large enough for several tiles, tails, and a rounding that shows at every site.
Head probe(int query_heads) { return Head(150, 150, 72, 11, query_heads, 3.0); }

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
    };
    return sites;
}

class Rules : public ::testing::TestWithParam<const char*> {};

TEST_P(Rules, RepairChangesItsSiteAndNothingBeforeIt) {
    const RoundingPlan whole = preset(GetParam(), 72);
    // Made of P and dP, delta is shown before the sweep that shows them.
    const bool delta_last = needs_dp(whole.schedule.delta_from);
    const Head head = probe(2);  // two query heads, so that the group's reduction is passed
    Log before;
    run(head, whole, &before);
    for (const Site site : whole.rounding_sites()) {
        Log after;
        run(head, whole.repaired(site), &after);
        ASSERT_EQ(before.events.size(), after.events.size()) << name(site);
        bool reached = false, changed = false;
        for (std::size_t e = 0; e < before.events.size(); ++e) {
            const Event& a = before.events[e];
            const Event& b = after.events[e];
            ASSERT_EQ(a.site, b.site);
            if (b.site == site) {
                reached = true;
                changed = changed || a.value != b.value;
                for (std::size_t i = 0; i < b.value.size(); ++i)
                    if (std::isfinite(b.exact[i])) {
                        ASSERT_EQ(b.value[i], b.exact[i]) << name(site) << " still rounds when exact";
                    }
            } else if (!reached && !(delta_last && a.site == Site::delta)) {
                ASSERT_EQ(a.value, b.value) << name(site) << " changed " << name(a.site) << ", which comes before it";
            }
        }
        if (reached && rounds_at(before, site)) {
            EXPECT_TRUE(changed) << name(site) << " rounds, and its repair changes nothing";
        } else if (reached) {
            EXPECT_TRUE(idle().count(site) > 0) << name(site) << " has a rule that never rounds";
        }
    }
}

// A value after a site is in the site's format.
TEST_P(Rules, ValuesAreInTheFormatOfTheirSite) {
    const RoundingPlan whole = preset(GetParam(), 72);
    Log log;
    run(probe(2), whole, &log);
    for (const Event& e : log.events) {
        const Rule& rule = whole[e.site];
        if (is_exact(rule.format)) continue;
        for (const double x : e.value)
            if (!std::isnan(x)) {
                ASSERT_EQ(round(x, rule.format, Rounding::nearest_even), x) << name(e.site);
            }
    }
}

// exact_except(site): the only local errors are at the site.
TEST_P(Rules, AloneErrsOnlyAtItsSite) {
    const RoundingPlan whole = preset(GetParam(), 72);
    for (const Site site : whole.rounding_sites()) {
        Log log;
        run(probe(1), whole.exact_except(site), &log);
        for (const Event& e : log.events) {
            if (e.site == site) continue;
            for (std::size_t i = 0; i < e.value.size(); ++i)
                if (std::isfinite(e.exact[i])) {
                    ASSERT_EQ(e.value[i], e.exact[i])
                        << name(e.site) << " rounds with only " << name(site) << " in the plan";
                }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Presets, Rules,
                         ::testing::Values("standard-bf16", "fa1", "fa2", "fa2-unfused", "fa2-unfused-splitkv", "fa3",
                                           "repo-2510.04212"),
                         [](const auto& tested) {
                             std::string name = tested.param;
                             std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
                             return name;
                         });

}  // namespace
}  // namespace faultline::testing
