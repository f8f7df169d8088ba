// SPDX-License-Identifier: Apache-2.0
// The device's form of the kernel, run by one thread, against kernels/cpu: the same bits in every output, for every preset,
// correction and schedule, and for plans with rules drawn at random.
#include <faultline/emulated/host.hpp>

#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include <faultline/corrections/correction.hpp>
#include <faultline/tensor_core/accumulate.hpp>

#include "heads.hpp"

namespace faultline {
namespace {

using testing::Head;

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

void expect_same(const Head& head, const RoundingPlan& plan, const std::string& what) {
    HeadGroup group = head.group();
    group.first_head = 3;
    group.layer = 2;
    group.seed = 11;
    const RoundingPlan settled = for_head_dim(plan, static_cast<int>(group.k.cols), group.causal);
    ASSERT_EQ(problem_with(settled), "") << what;
    const GroupForward cpu = attention_forward(group, settled);
    const GroupBackward cpu_back = attention_backward(group, cpu, settled);
    const std::vector<HeadGroup> groups{group};
    emulated::HostBackend backend;
    const std::vector<GroupForward> own = emulated::forward(backend, groups, settled);
    const std::vector<GroupBackward> own_back = emulated::backward(backend, groups, own, settled);
    for (std::size_t h = 0; h < cpu.heads.size(); ++h) {
        EXPECT_EQ(differing(cpu.heads[h].o, own[0].heads[h].o), 0u) << what << " o of head " << h;
        EXPECT_EQ(differing(cpu.heads[h].o_unrounded, own[0].heads[h].o_unrounded), 0u) << what;
        EXPECT_EQ(differing(column(cpu.heads[h].lse), column(own[0].heads[h].lse)), 0u) << what << " lse of head " << h;
        EXPECT_EQ(differing(cpu.heads[h].p, own[0].heads[h].p), 0u) << what << " p of head " << h;
        EXPECT_EQ(differing(cpu_back.dq[h], own_back[0].dq[h]), 0u) << what << " dq of head " << h;
    }
    EXPECT_EQ(differing(cpu_back.dk, own_back[0].dk), 0u) << what << " dk";
    EXPECT_EQ(differing(cpu_back.dv, own_back[0].dv), 0u) << what << " dv";
}

/// Tiles small enough that heads of some tens of rows have several.
RoundingPlan with_small_tiles(RoundingPlan plan, int block_q = 8, int block_k = 16) {
    plan.tiles.clear();
    Schedule& s = plan.schedule;
    if (s.block_q > 0) s.block_q = block_q;
    if (s.block_k > 0) s.block_k = block_k;
    if (s.bwd_block_q > 0) s.bwd_block_q = block_k;
    if (s.bwd_block_k > 0) s.bwd_block_k = block_q;
    return plan;
}

TEST(Emulated, EveryPresetGivesTheCpusBits) {
    for (const RoundingPlan& plan : presets()) {
        const Head head(70, 70, 64, 1, 2, 3.0);
        expect_same(head, plan, plan.name);
        expect_same(head, with_small_tiles(plan), plan.name + " in small tiles");
    }
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

template <class E>
E one_of(std::mt19937_64& random, std::initializer_list<E> values) {
    return values.begin()[random() % values.size()];
}

/// A plan drawn at random; many are none, and find_problem says so.
RoundingPlan drawn(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    RoundingPlan plan = presets()[random() % presets().size()];
    plan.tiles.clear();
    Schedule& s = plan.schedule;
    const auto block = [&] { return one_of(random, {0, 5, 8, 16}); };
    s.block_q = block();
    s.block_k = block();
    s.bwd_block_q = block();
    s.bwd_block_k = block();
    s.key_splits = one_of(random, {1, 1, 1, 2, 3});
    s.key_order = one_of(random, {Order::ascending, Order::descending});
    s.bwd_key_order = one_of(random, {Order::ascending, Order::descending});
    s.bwd_query_order = one_of(random, {Order::ascending, Order::descending});
    s.scale_at = one_of(random, {ScaleAt::exponent, ScaleAt::scores, ScaleAt::inputs});
    s.exp_base = one_of(random, {ExpBase::two, ExpBase::e});
    s.bwd_exp_base = one_of(random, {ExpBase::two, ExpBase::e});
    s.functions = one_of(random, {Functions::correctly_rounded, Functions::hopper});
    s.exp_poly_every = one_of(random, {0, 0, 16});
    s.argument = one_of(random, {ArgumentForm::fused, ArgumentForm::unfused, ArgumentForm::subtract_then_scale});
    s.bwd_argument = one_of(random, {ArgumentForm::fused, ArgumentForm::unfused, ArgumentForm::subtract_then_scale});
    s.max_policy = one_of(random, {MaxPolicy::exact, MaxPolicy::lazy, MaxPolicy::stable});
    s.max_offset = one_of(random, {0.0, 0.0, 8.0});
    s.row_sum_adds = one_of(random, {RowSumAdds::unrounded, RowSumAdds::rounded, RowSumAdds::two_sums});
    s.row_sum_order =
        one_of(random, {RowSumOrder::sequential, RowSumOrder::pairwise, RowSumOrder::quad, RowSumOrder::warp_of_32});
    s.normalize =
        one_of(random, {Normalize::after_pv, Normalize::after_pv, Normalize::before_pv, Normalize::each_tile});
    s.division = one_of(random, {Division::divide, Division::reciprocal});
    s.lse_form = one_of(random, {LseForm::natural, LseForm::log2});
    for (Carry* carry : {&s.pv_carry, &s.dq_carry, &s.dkv_carry})
        *carry = one_of(random, {Carry::chained, Carry::added});
    s.p_saved = one_of(random, {false, false, true});
    s.delta_from = one_of(random, {DeltaFrom::o, DeltaFrom::o_unrounded, DeltaFrom::p_dp, DeltaFrom::p_dp_normalized});
    s.delta_order = one_of(random, {DeltaOrder::sequential, DeltaOrder::octets, DeltaOrder::octet_pairs});
    s.delta_threads = one_of(random, {1, 2, 8, 16});
    s.delta_in = one_of(random, {DeltaIn::difference, DeltaIn::accumulator});
    s.ds_p = one_of(random, {DsP::unrounded, DsP::cast});
    s.ds_scale = one_of(random, {DsScale::after, DsScale::before, DsScale::after_cast});
    s.group_reduce = one_of(random, {GroupReduce::after_cast, GroupReduce::before_cast});
    s.zero_sum = one_of(random, {ZeroSum::none, ZeroSum::uniform, ZeroSum::weighted, ZeroSum::largest});
    s.key_centering = one_of(random, {false, true});
    // What cannot stand together mostly does not, so that few of the plans are none.
    const bool log2_units = s.exp_base == ExpBase::two && s.scale_at == ScaleAt::exponent;
    if (s.normalize == Normalize::each_tile) {
        s.scale_at = ScaleAt::exponent;
        if (s.row_sum_adds == RowSumAdds::two_sums) s.row_sum_adds = RowSumAdds::rounded;
    }
    if (s.normalize == Normalize::before_pv) s.block_k = 0;
    if (s.normalize != Normalize::before_pv) s.p_saved = false;
    if (s.normalize != Normalize::after_pv) s.key_splits = 1;
    if (!log2_units || s.normalize != Normalize::after_pv) s.max_offset = 0;
    if (!log2_units || s.normalize == Normalize::each_tile) s.lse_form = LseForm::natural;
    if (!log2_units && s.max_policy == MaxPolicy::lazy) s.max_policy = MaxPolicy::stable;
    if (s.exp_base == ExpBase::e) s.exp_poly_every = 0;
    if (needs_dp(s.delta_from)) s.delta_in = DeltaIn::difference;
    const auto units = accumulations();
    for (std::size_t at = 0; at < site_count; ++at) {
        const auto site = static_cast<Site>(at);
        Rule rule;
        rule.format = one_of(random, {exact, fp32, fp32, bf16, fp16, e4m3, tf32});
        rule.rounding = one_of(random, {Rounding::nearest_even, Rounding::nearest_even, Rounding::toward_zero,
                                        Rounding::stochastic, Rounding::upward});
        if (site == Site::delta || site == Site::row_sum)
            rule.accumulation = fp32_sequential;
        else if (info(site).accumulates)
            rule.accumulation = units[random() % units.size()].accumulation;
        if (random() % 2 == 0 && reaches(plan, site)) plan.set(site, rule);
    }
    for (std::size_t at = 0; at < site_count; ++at)
        if (!reaches(plan, static_cast<Site>(at))) plan.set(static_cast<Site>(at), Rule{});
    return plan;
}

TEST(Emulated, PlansDrawnAtRandomGiveTheCpusBits) {
    int tried = 0;
    for (std::uint64_t seed = 1; seed <= 600; ++seed) {
        const RoundingPlan plan = drawn(seed);
        if (find_problem(for_head_dim(plan, 16))) continue;
        Head head(19, 27, 16, seed, seed % 3 == 0 ? 2 : 1, 2.0);
        head.causal = seed % 4 != 0;
        expect_same(head, plan, "plan of seed " + std::to_string(seed));
        ++tried;
        if (HasFailure()) break;
    }
    EXPECT_GE(tried, 300);
}

}  // namespace
}  // namespace faultline
