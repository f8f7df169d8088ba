// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding draws numbers of its own for every element: no two streams of a call are the same, and where equal
// values are rounded at two places (splits of the keys, heads of a group, two layers) they come out differently.
#include <gtest/gtest.h>

#include <map>

#include <faultline/cpu/scores.hpp>
#include <faultline/cpu/stage.hpp>

#include "heads.hpp"
#include "log.hpp"

namespace faultline::testing {
namespace {

RoundingPlan stochastic_at(RoundingPlan plan, Site site) {
    Rule rule = plan[site];
    rule.format = bf16;
    rule.rounding = Rounding::stochastic;
    plan.set(site, rule);
    return plan;
}

std::vector<Event> at(const Log& log, Site site) {
    std::vector<Event> found;
    for (const Event& e : log.events)
        if (e.site == site) found.push_back(e);
    return found;
}

class Streams : public ::testing::TestWithParam<const char*> {};

TEST_P(Streams, NoTwoTilesOfACallShareOne) {
    const Head head(150, 150, 72, 31, 3);
    Log log;
    run(head, preset(GetParam(), 72), &log);
    std::map<std::uint64_t, const Event*> seen;
    for (const Event& e : log.events) {
        if (e.site == Site::scale) continue;  // one number, which is never drawn
        const std::uint64_t key = cpu::stochastic_stream(5, 1, e.site, e.where).key;
        EXPECT_NE(key, cpu::stochastic_stream(5, 2, e.site, e.where).key) << "two layers";
        const auto [other, fresh] = seen.emplace(key, &e);
        EXPECT_TRUE(fresh) << name(e.site) << " and " << name(other->second->site);
    }
}

INSTANTIATE_TEST_SUITE_P(Presets, Streams,
                         ::testing::Values("standard-bf16", "fa1", "fa2", "fa2-unfused-splitkv", "fa3", "efficient"),
                         [](const auto& tested) {
                             std::string name = tested.param;
                             std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
                             return name;
                         });

// Two query heads that are the same have the same dk and dv; each is cast with numbers of its own.
TEST(StochasticRounding, DiffersBetweenTheHeadsOfAGroup) {
    Head head(90, 90, 64, 32, 2);
    head.q[1] = head.q[0];
    head.dout[1] = head.dout[0];
    for (const Site site : {Site::dk_cast, Site::dv_cast}) {
        Log log;
        run(head, stochastic_at(preset("fa2"), site), &log);
        const std::vector<Event> casts = at(log, site);
        ASSERT_EQ(casts.size(), 2U);
        ASSERT_EQ(casts[0].exact, casts[1].exact);
        EXPECT_NE(casts[0].value, casts[1].value) << name(site);
    }
}

// The keys twice over in two splits: both have the same output.
TEST(StochasticRounding, DiffersBetweenTheSplitsOfTheKeys) {
    Head head(64, 256, 64, 33);
    head.causal = false;
    for (std::ptrdiff_t j = 128; j < 256; ++j)
        for (std::ptrdiff_t c = 0; c < 64; ++c) {
            head.k(j, c) = head.k(j - 128, c);
            head.v(j, c) = head.v(j - 128, c);
        }
    RoundingPlan plan = preset("fa2-unfused-splitkv");
    plan.schedule.block_k = 128;
    plan.schedule.key_splits = 2;
    for (const Site site : {Site::o_normalize, Site::partial_o_cast}) {
        Log log;
        run(head, stochastic_at(plan, site), &log);
        const std::vector<Event> parts = at(log, site);
        ASSERT_EQ(parts.size(), 2U);
        ASSERT_EQ(parts[0].exact, parts[1].exact);
        EXPECT_NE(parts[0].value, parts[1].value) << name(site);
    }
}

// q = k = v = dO under one key head: dk and dv of a group are not the same tensor, but their sums are cast as two.
TEST(StochasticRounding, OfDkAndOfDvIsNotTheSame) {
    const Head head(40, 40, 64, 34, 2);
    Log log;
    run(head, stochastic_at(preset("fa2"), Site::kv_group_reduce), &log);
    const std::vector<Event> sums = at(log, Site::kv_group_reduce);
    ASSERT_EQ(sums.size(), 2U);
    EXPECT_NE(cpu::stochastic_stream(0, 0, Site::kv_group_reduce, sums[0].where),
              cpu::stochastic_stream(0, 0, Site::kv_group_reduce, sums[1].where));
}

// A scale is one number: asked to round stochastically it goes to nearest, and not down.
TEST(StochasticRounding, OfTheScaleIsToNearest) {
    RoundingPlan plan = preset("fa2", 72);
    Rule rule = plan[Site::scale];
    HeadGroup group;
    group.scale = 0.1;
    const cpu::Scales nearest(plan, group);
    rule.rounding = Rounding::stochastic;
    plan.set(Site::scale, rule);
    EXPECT_EQ(cpu::Scales(plan, group).natural, nearest.natural);
    EXPECT_EQ(nearest.natural, double{0.1F});
    EXPECT_GT(nearest.natural, 0.1) << "truncation would be seen";
}

}  // namespace
}  // namespace faultline::testing
