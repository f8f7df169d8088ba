// SPDX-License-Identifier: Apache-2.0
// Any shape: the exact plan against certified truth for odd lengths, masks, grouped heads, tilings and orders.
#include <gtest/gtest.h>

#include <limits>

#include "heads.hpp"

namespace faultline::testing {
namespace {

/// Largest |value - truth| over the largest |truth|.
double distance(const Matrix& value, const CertifiedMatrix& truth) {
    double worst = 0, size = 0;
    for (std::ptrdiff_t i = 0; i < value.rows; ++i)
        for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
            worst = std::max(worst, std::abs(value(i, j) - truth(i, j)));
            size = std::max(size, std::abs(truth(i, j)));
        }
    return size > 0 ? worst / size : worst;
}

// Sums of at most n + d products, a handful of further roundings, amplified by logits of at most 16: far below 2^-38.
constexpr double binary64_tolerance = 0x1p-38;

void expect_true(const Head& head, const RoundingPlan& plan) {
    const Result r = run(head, plan);
    const GroupTruth truth = attention_truth(head.problem());
    for (std::size_t h = 0; h < head.q.size(); ++h) {
        EXPECT_LT(distance(r.forward.heads[h].o, truth.heads[h].o), binary64_tolerance);
        EXPECT_LT(distance(r.backward.dq[h], truth.heads[h].dq), binary64_tolerance);
    }
    EXPECT_LT(distance(r.backward.dk, truth.dk), binary64_tolerance);
    EXPECT_LT(distance(r.backward.dv, truth.dv), binary64_tolerance);
}

RoundingPlan exact_with(const Schedule& schedule) {
    RoundingPlan p = plan("exact");
    p.schedule = schedule;
    return p;
}

TEST(Shapes, ExactPlanIsTheFunction) {
    for (const auto& [n_q, n_k, d] :
         {std::tuple{1, 1, 8}, {7, 7, 5}, {65, 65, 16}, {100, 100, 96}, {17, 40, 16}, {40, 40, 128}})
        for (const bool causal : {true, false}) {
            Head head(n_q, n_k, d, 3);
            head.causal = causal;
            expect_true(head, plan("exact"));
        }
}

TEST(Shapes, GroupedHeads) { expect_true(Head(37, 37, 16, 4, 3), plan("exact")); }

TEST(Shapes, AdditiveMask) {
    Head head(30, 30, 16, 5);
    head.causal = false;
    head.bias.push_back(random_matrix(30, 30, 2.0, 77));
    for (std::ptrdiff_t i = 0; i < 30; ++i) head.bias[0](i, (i + 3) % 30) = -std::numeric_limits<double>::infinity();
    expect_true(head, plan("exact"));
}

// Every schedule field is a rewriting that leaves the function alone: with exact rules all of them give the truth.
TEST(Shapes, EveryScheduleIsTheSameFunction) {
    const Head head(90, 90, 16, 6);
    const Schedule base = preset("fa2").schedule;
    std::vector<Schedule> all;
    const auto add = [&](auto&& change) {
        Schedule s = base;
        s.block_q = 32;
        s.block_k = 24;
        s.bwd_block_q = 24;
        s.bwd_block_k = 40;
        change(s);
        all.push_back(s);
    };
    add([](Schedule&) {});
    add([](Schedule& s) { s.key_order = Order::ascending; });
    add([](Schedule& s) {
        s.bwd_key_order = Order::descending;
        s.bwd_query_order = Order::ascending;
    });
    add([](Schedule& s) { s.key_splits = 3; });
    add([](Schedule& s) {
        s.scale_at = ScaleAt::scores;
        s.exp_base = ExpBase::e;
    });
    add([](Schedule& s) {
        s.scale_at = ScaleAt::inputs;
        s.exp_base = ExpBase::e;
    });
    add([](Schedule& s) { s.exp_base = ExpBase::e; });
    add([](Schedule& s) { s.argument = s.bwd_argument = ArgumentForm::subtract_then_scale; });
    add([](Schedule& s) { s.argument = s.bwd_argument = ArgumentForm::unfused; });
    add([](Schedule& s) { s.max_policy = MaxPolicy::lazy; });
    add([](Schedule& s) { s.max_policy = MaxPolicy::stable; });
    add([](Schedule& s) { s.max_offset = 8; });
    for (const RowSumAdds adds : {RowSumAdds::rounded, RowSumAdds::two_sums})
        add([&](Schedule& s) { s.row_sum_adds = adds; });
    for (const RowSumOrder order : {RowSumOrder::sequential, RowSumOrder::pairwise})
        add([&](Schedule& s) { s.row_sum_order = order; });
    add([](Schedule& s) {
        s.normalize = Normalize::before_pv;
        s.block_k = 0;
        s.p_saved = true;
    });
    add([](Schedule& s) { s.normalize = Normalize::each_tile; });
    add([](Schedule& s) { s.division = Division::divide; });
    add([](Schedule& s) {
        s.pv_carry = s.dkv_carry = Carry::added;
        s.dq_carry = Carry::chained;
    });
    for (const DeltaFrom from : {DeltaFrom::o_unrounded, DeltaFrom::p_dp, DeltaFrom::p_dp_normalized})
        add([&](Schedule& s) { s.delta_from = from; });
    add([](Schedule& s) { s.delta_in = DeltaIn::accumulator; });
    add([](Schedule& s) { s.delta_order = DeltaOrder::sequential; });
    for (const DsScale scale : {DsScale::before, DsScale::after_cast}) add([&](Schedule& s) { s.ds_scale = scale; });
    add([](Schedule& s) { s.group_reduce = GroupReduce::before_cast; });
    for (const ZeroSum kind : {ZeroSum::uniform, ZeroSum::weighted, ZeroSum::largest})
        add([&](Schedule& s) { s.zero_sum = kind; });
    add([](Schedule& s) { s.key_centering = true; });
    for (std::size_t i = 0; i < all.size(); ++i) {
        SCOPED_TRACE("schedule number " + std::to_string(i));
        ASSERT_EQ(problem_with(exact_with(all[i])), "");
        expect_true(head, exact_with(all[i]));
    }
}

// A tile that the sequence does not fill is a smaller tile, not padding that takes part.
TEST(Shapes, TailsFollowTheSamePlan) {
    for (const char* name : {"fa2", "fa3", "standard-bf16", "repo-2510.04212"}) {
        const Head head(131, 131, 64, 8);
        const GroupTruth truth = attention_truth(head.problem());
        const Result r = run(head, preset(name));
        EXPECT_LT(distance(r.forward.heads[0].o, truth.heads[0].o), 0x1p-5) << name;  // a handful of bf16 roundings
        EXPECT_LT(distance(r.backward.dq[0], truth.heads[0].dq), 0x1p-4) << name;
    }
}

}  // namespace
}  // namespace faultline::testing
