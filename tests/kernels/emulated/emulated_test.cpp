// SPDX-License-Identifier: Apache-2.0
// The device's form of the kernel, run by one thread, against kernels/cpu: the same bits in every output, for every preset,
// correction and schedule, and for plans with rules drawn at random.
#include <faultline/emulated/host.hpp>

#include <cstring>

#include <gtest/gtest.h>

#include <faultline/corrections/correction.hpp>

#include "plans.hpp"

namespace faultline {
namespace {

using testing::drawn;
using testing::Head;
using testing::with_extras;
using testing::with_small_tiles;

/// Elements whose bits differ.
std::size_t differing(const Matrix& a, const Matrix& b) {
    if (a.values.size() != b.values.size()) return a.values.size() + b.values.size();
    std::size_t count = 0;
    for (std::size_t i = 0; i < a.values.size(); ++i)
        count += std::memcmp(&a.values[i], &b.values[i], sizeof(double)) != 0 ? 1 : 0;
    return count;
}
Matrix column(const std::vector<double>& x) {
    Matrix m(static_cast<std::ptrdiff_t>(x.size()), 1);
    m.values = x;
    return m;
}

/// in_one_call: also of both passes in one call, which keeps the operands and P.
void expect_same(const Head& head, const RoundingPlan& plan, const std::string& what, bool in_one_call = false) {
    HeadGroup group = head.group();
    group.first_head = 3;
    group.layer = 2;
    group.seed = 11;
    const RoundingPlan settled = for_head_dim(plan, static_cast<int>(group.k.cols), group.causal);
    ASSERT_EQ(problem_with(settled), "") << what;
    ASSERT_EQ(problem_with(settled, extras_of(group)), "") << what;
    const GroupForward cpu = attention_forward(group, settled);
    const GroupBackward cpu_back = attention_backward(group, cpu, settled);
    const std::vector<HeadGroup> groups{group};
    emulated::HostBackend backend(8, 3);  // more than there are tiles: they are cut
    const std::vector<GroupForward> own = emulated::forward(backend, groups, settled);
    const std::vector<GroupBackward> own_back = emulated::backward(backend, groups, own, settled);
    for (std::size_t h = 0; h < cpu.heads.size(); ++h) {
        EXPECT_EQ(differing(cpu.heads[h].o, own[0].heads[h].o), 0u) << what << " o of head " << h;
        EXPECT_EQ(differing(cpu.heads[h].o_unrounded, own[0].heads[h].o_unrounded), 0u) << what;
        EXPECT_EQ(differing(column(cpu.heads[h].lse), column(own[0].heads[h].lse)), 0u) << what << " lse of head " << h;
        EXPECT_EQ(differing(cpu.heads[h].p, own[0].heads[h].p), 0u) << what << " p of head " << h;
        EXPECT_EQ(differing(cpu.heads[h].capped, own[0].heads[h].capped), 0u) << what << " capped scores of head " << h;
        EXPECT_EQ(differing(column(cpu.heads[h].sink_p), column(own[0].heads[h].sink_p)), 0u) << what << " sink_p";
        EXPECT_EQ(differing(cpu_back.dq[h], own_back[0].dq[h]), 0u) << what << " dq of head " << h;
    }
    EXPECT_EQ(differing(cpu_back.dk, own_back[0].dk), 0u) << what << " dk";
    EXPECT_EQ(differing(cpu_back.dv, own_back[0].dv), 0u) << what << " dv";
    EXPECT_EQ(differing(column(cpu_back.dsink), column(own_back[0].dsink)), 0u) << what << " dsink";
    if (!in_one_call) return;
    emulated::HostBackend again(8, 3);
    const emulated::Attention both = emulated::attention(again, groups, settled);
    for (std::size_t h = 0; h < cpu.heads.size(); ++h) {
        EXPECT_EQ(differing(own[0].heads[h].o, both.forward[0].heads[h].o), 0u) << what << " o in one call";
        EXPECT_EQ(differing(own[0].heads[h].p, both.forward[0].heads[h].p), 0u) << what << " p in one call";
        EXPECT_EQ(differing(own_back[0].dq[h], both.backward[0].dq[h]), 0u) << what << " dq in one call";
    }
    emulated::HostBackend third(8, 3);
    const emulated::Attention kept = emulated::attention(third, groups, settled, false);
    EXPECT_TRUE(kept.forward[0].heads[0].p.values.empty() && kept.forward[0].heads[0].capped.values.empty()) << what;
    EXPECT_EQ(differing(own_back[0].dv, kept.backward[0].dv), 0u) << what << " dv where P stays";
    EXPECT_EQ(differing(own_back[0].dk, both.backward[0].dk), 0u) << what << " dk in one call";
    EXPECT_EQ(differing(own_back[0].dv, both.backward[0].dv), 0u) << what << " dv in one call";
    EXPECT_EQ(differing(column(own_back[0].dsink), column(both.backward[0].dsink)), 0u) << what << " dsink in one call";
}

/// Without a query dk and dv are zeros, without a key o and dq are, and lse is that of a row that sees none.
TEST(Emulated, WithoutQueriesOrKeys) {
    for (const RoundingPlan& plan : presets())
        for (const bool causal : {true, false}) {
            Head no_query(0, 9, 16, 1), no_key(9, 0, 16, 2);
            no_query.causal = no_key.causal = causal;
            expect_same(no_query, plan, plan.name + " without queries", true);
            expect_same(no_key, plan, plan.name + " without keys", true);
            const testing::Result a = testing::run(no_query, testing::preset(plan.name, 16)),
                                  b = testing::run(no_key, testing::preset(plan.name, 16));
            EXPECT_EQ(differing(a.backward.dk, Matrix(9, 16)) + differing(a.backward.dv, Matrix(9, 16)), 0u)
                << plan.name;
            EXPECT_EQ(differing(b.forward.heads[0].o, Matrix(9, 16)) + differing(b.backward.dq[0], Matrix(9, 16)), 0u)
                << plan.name;
            EXPECT_EQ(b.forward.heads[0].lse, std::vector<double>(9, INFINITY)) << plan.name;
        }
}

TEST(Emulated, EveryPresetGivesTheCpusBits) {
    for (const RoundingPlan& plan : presets()) {
        const Head head(70, 70, 64, 1, 2, 3.0);
        expect_same(head, plan, plan.name);
        expect_same(head, with_small_tiles(plan), plan.name + " in small tiles", true);
    }
}

TEST(Emulated, SoftcapSinksAndDropoutInEveryPreset) {
    int with = 0;
    for (const RoundingPlan& plan : presets())
        for (unsigned kind = 1; kind < 8; ++kind) {
            const RoundingPlan small = with_small_tiles(plan);
            const Head head = with_extras(Head(37, 41, 16, kind, 2, 4.0), for_head_dim(small, 16), kind);
            const Extras extras = extras_of(head.group());
            with += extras.softcap || extras.sink || extras.dropout ? 1 : 0;
            expect_same(head, small, plan.name + " with extras " + std::to_string(kind), true);
        }
    EXPECT_GE(with, 100);
}

TEST(Emulated, ShapesMasksAndGroups) {
    for (const char* name : {"fa2", "fa1", "efficient", "fa2-unfused-splitkv", "math"}) {
        const RoundingPlan small = with_small_tiles(plan(name));
        expect_same(Head(1, 1, 8, 2), small, std::string(name) + " of one key");
        Head full(13, 29, 16, 3, 3);
        full.causal = false;
        expect_same(full, small, std::string(name) + " without a mask");
        expect_same(Head(29, 13, 16, 4), small, std::string(name) + " with rows that see no key");
        Head biased(21, 21, 8, 5, 2);
        for (int h = 0; h < 2; ++h) {
            biased.bias.push_back(testing::random_matrix(21, 21, 1.0, 77 + static_cast<std::uint64_t>(h)));
            for (std::ptrdiff_t i = 0; i < 21; ++i) biased.bias.back()(i, (i * 7) % 21) = -INFINITY;
            for (std::ptrdiff_t j = 0; j < 21; ++j) biased.bias.back()(4, j) = -INFINITY;
        }
        expect_same(biased, small, std::string(name) + " with a bias");
    }
}

TEST(Emulated, EveryCorrectionGivesTheCpusBits) {
    const Head head(37, 37, 16, 6, 2, 4.0);
    int tried = 0;
    for (const CorrectionInfo& info : corrections()) {
        if (info.changes_function || info.arguments == Arguments::layers) continue;
        const std::string text(info.arguments == Arguments::sites ? std::string(info.name) + ":o_cast,ds_cast,p_cast"
                                                                  : std::string(info.name));
        const RoundingPlan base = with_small_tiles(plan("fa2"));
        if (info.problem && !info.problem(base).empty()) continue;
        expect_same(head, apply(parse_correction(text), base), text);
        ++tried;
    }
    EXPECT_GE(tried, 10);
}

TEST(Emulated, PlansDrawnAtRandomGiveTheCpusBits) {
    int tried = 0;
    for (std::uint64_t seed = 1; seed <= 600; ++seed) {
        const RoundingPlan plan = drawn(seed);
        if (find_problem(for_head_dim(plan, 16))) continue;
        Head head(19, 27, 16, seed, seed % 3 == 0 ? 2 : 1, 2.0);
        head.causal = seed % 4 != 0;
        head = with_extras(head, for_head_dim(plan, 16), seed % 2 == 0 ? static_cast<unsigned>(seed / 2 % 8) : 0);
        expect_same(head, plan, "plan of seed " + std::to_string(seed));
        ++tried;
        if (HasFailure()) break;
    }
    EXPECT_GE(tried, 300);
}

}  // namespace
}  // namespace faultline
