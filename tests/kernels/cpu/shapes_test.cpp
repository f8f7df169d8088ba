// SPDX-License-Identifier: Apache-2.0
// Any shape: the exact plan against certified truth for odd lengths, masks, grouped heads, tilings and orders.
#include <gtest/gtest.h>

#include <limits>

#include "binary64_bound.hpp"
#include "heads.hpp"
#include "log.hpp"

namespace faultline::testing {
namespace {

// The bound is far below one rounding to fp32, so that a forgotten float would be seen.
TEST(Shapes, BoundTellsBinary64FromFloat) {
    const Head head(90, 90, 16, 6);
    const Binary64Bound bound(head);
    const GroupTruth truth = attention_truth(head.problem());
    RoundingPlan float_p = plan("exact");
    float_p.set(Site::p_cast, {.format = fp32});
    const Result r = run(head, float_p);
    std::size_t outside = 0;
    for (std::ptrdiff_t i = 1; i < 90; ++i)  // row 0 has p = 1
        for (std::ptrdiff_t j = 0; j < 16; ++j)
            outside +=
                std::abs(r.forward.heads[0].o(i, j) - truth.heads[0].o(i, j)) > bound.o[0][static_cast<std::size_t>(i)];
    EXPECT_GT(outside, 89U * 16 * 9 / 10) << "nearly all";
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
    for (const DeltaOrder order : {DeltaOrder::sequential, DeltaOrder::octet_pairs})
        add([&](Schedule& s) { s.delta_order = order; });
    for (const LseForm form : {LseForm::log2, LseForm::log2_sum}) add([&](Schedule& s) { s.lse_form = form; });
    for (const ArgumentForm form : {ArgumentForm::fused, ArgumentForm::unfused})
        add([&](Schedule& s) { s.rescale_argument = form; });
    add([](Schedule& s) { s.row_sum_order = RowSumOrder::mod_8; });
    add([](Schedule& s) { s.delta_order = DeltaOrder::mod_8; });
    add([](Schedule& s) {
        s.lse_in = LseIn::accumulator;
        s.bwd_argument = ArgumentForm::subtract_then_scale;
    });
    for (const DsScale scale : {DsScale::before, DsScale::after_cast}) add([&](Schedule& s) { s.ds_scale = scale; });
    add([](Schedule& s) { s.group_reduce = GroupReduce::before_cast; });
    for (const ZeroSum kind : {ZeroSum::uniform, ZeroSum::weighted, ZeroSum::largest})
        add([&](Schedule& s) { s.zero_sum = kind; });
    add([](Schedule& s) { s.key_centering = true; });
    for (std::size_t i = 0; i < all.size(); ++i) {
        SCOPED_TRACE("schedule number " + std::to_string(i));
        ASSERT_EQ(problem_with(exact_with(all[i])), "");
        const RoundingPlan plan = exact_with(all[i]);
        expect_true(head, plan);
        Log log;
        run(head, plan, &log);
        for (const Event& event : log.events) EXPECT_TRUE(reaches(plan, event.site)) << name(event.site);
    }
}

/// The first rows of a matrix.
Matrix first_rows(const Matrix& m, std::ptrdiff_t rows) { return Matrix(m.view().middle_rows(0, rows)); }

// A tile that the sequence does not fill is a smaller tile, not padding that takes part: a sequence of 131 and one of 256
// that starts with it and ends in rows without gradient have the same bits in the first 131 rows of everything. Later keys
// are hidden from earlier queries, and p = 0, dO = 0 add zeros, in which no rule rounds.
TEST(Shapes, TailsAreSmallerTiles) {
    for (const char* name : {"fa1", "fa2", "fa3", "efficient", "standard-bf16", "repo-2510.04212"}) {
        const Head longer(256, 256, 64, 8, 2);
        Head head = longer, padded = longer;
        for (std::size_t h = 0; h < 2; ++h) {
            head.q[h] = first_rows(longer.q[h], 131);
            head.dout[h] = first_rows(longer.dout[h], 131);
            for (std::ptrdiff_t i = 131; i < 256; ++i)
                for (std::ptrdiff_t c = 0; c < 64; ++c) padded.dout[h](i, c) = 0;
        }
        head.k = first_rows(longer.k, 131);
        head.v = first_rows(longer.v, 131);
        const Result part = run(head, preset(name)), whole = run(padded, preset(name));
        for (std::size_t h = 0; h < 2; ++h) {
            EXPECT_EQ(part.forward.heads[h].o, first_rows(whole.forward.heads[h].o, 131)) << name;
            EXPECT_EQ(part.backward.dq[h], first_rows(whole.backward.dq[h], 131)) << name;
        }
        EXPECT_EQ(part.backward.dk, first_rows(whole.backward.dk, 131)) << name;
        EXPECT_EQ(part.backward.dv, first_rows(whole.backward.dv, 131)) << name;
    }
}

}  // namespace
}  // namespace faultline::testing
