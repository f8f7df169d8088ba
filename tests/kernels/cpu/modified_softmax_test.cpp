// SPDX-License-Identifier: Apache-2.0
// Softcap, sinks and dropout: the exact plan is the function whatever the schedule, the conservation laws hold at the
// tensors where they are laws, and presets do what their sources do.
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/cpu/recorder.hpp>

#include "binary64_bound.hpp"
#include "heads.hpp"
#include "log.hpp"

namespace faultline::testing {
namespace {

/// The bounds are what is compared here, not the last bit of every value of the truth.
constexpr TruthOptions certified{.correctly_rounded = false};

Head with(double softcap, bool sink, double keep) {
    Head head(40, 52, 16, 6, 2, 2.0);
    head.softcap = softcap;
    if (sink) head.sink = {0.75, -2};
    if (keep < 1) head.drop(keep, 9);
    return head;
}

RoundingPlan exact_with(const Schedule& schedule) {
    RoundingPlan p = plan("exact");
    p.schedule = schedule;
    return p;
}

TEST(ModifiedSoftmax, ExactPlanIsTheFunction) {
    for (const double softcap : {0.0, 3.0, 50.0})
        for (const bool sink : {false, true})
            for (const double keep : {1.0, 0.7}) expect_true(with(softcap, sink, keep), plan("exact"), certified);
    Head biased = with(3, true, 0.7);
    biased.causal = false;
    for (int h = 0; h < 2; ++h) {
        biased.bias.push_back(random_matrix(40, 52, 2.0, 77));
        for (std::ptrdiff_t i = 0; i < 40; ++i) biased.bias.back()(i, (i + 3) % 52) = -INFINITY;
    }
    expect_true(biased, plan("exact"), certified);
}

// With exact rules every schedule is the same function of these problems too.
TEST(ModifiedSoftmax, EveryScheduleIsTheSameFunction) {
    const Schedule base = preset("fa2").schedule;
    std::vector<Schedule> all;
    const auto add = [&](auto&& change) {
        Schedule s = base;
        s.block_q = 16;
        s.block_k = 12;
        s.bwd_block_q = 12;
        s.bwd_block_k = 20;
        change(s);
        all.push_back(s);
    };
    add([](Schedule&) {});
    add([](Schedule& s) { s.sink_in_max = true; });
    add([](Schedule& s) { s.key_splits = 3; });
    for (const ScaleAt at : {ScaleAt::scores, ScaleAt::inputs})
        for (const ExpBase exp_base : {ExpBase::e, ExpBase::two})
            for (const bool sink_in_max : {false, true})
                add([&](Schedule& s) {
                    s.scale_at = at;
                    s.exp_base = s.bwd_exp_base = exp_base;
                    s.sink_in_max = sink_in_max;
                });
    add([](Schedule& s) { s.argument = s.bwd_argument = ArgumentForm::subtract_then_scale; });
    add([](Schedule& s) { s.max_policy = MaxPolicy::lazy; });
    add([](Schedule& s) { s.max_policy = MaxPolicy::stable; });
    add([](Schedule& s) { s.max_offset = 8; });
    add([](Schedule& s) { s.row_sum_adds = RowSumAdds::two_sums; });
    for (const bool saved : {false, true})
        for (const DeltaFrom from : {DeltaFrom::o, DeltaFrom::p_dp, DeltaFrom::p_dp_normalized})
            add([&](Schedule& s) {
                s.normalize = Normalize::before_pv;
                s.block_k = 0;
                s.p_saved = saved;
                s.delta_from = from;
            });
    add([](Schedule& s) { s.division = Division::divide; });
    for (const DeltaFrom from : {DeltaFrom::o_unrounded, DeltaFrom::p_dp, DeltaFrom::p_dp_normalized})
        add([&](Schedule& s) { s.delta_from = from; });
    add([](Schedule& s) { s.delta_in = DeltaIn::accumulator; });
    for (const LseForm form : {LseForm::log2, LseForm::log2_sum}) add([&](Schedule& s) { s.lse_form = form; });
    for (const ArgumentForm form : {ArgumentForm::fused, ArgumentForm::unfused})
        add([&](Schedule& s) { s.rescale_argument = form; });
    add([](Schedule& s) { s.row_sum_order = RowSumOrder::mod_8; });
    add([](Schedule& s) { s.delta_order = DeltaOrder::mod_8; });
    add([](Schedule& s) {
        s.lse_in = LseIn::accumulator;
        s.bwd_argument = ArgumentForm::subtract_then_scale;
    });
    add([](Schedule& s) { s.ds_p = DsP::cast; });
    for (const DsScale scale : {DsScale::before, DsScale::after_cast}) add([&](Schedule& s) { s.ds_scale = scale; });
    add([](Schedule& s) { s.group_reduce = GroupReduce::before_cast; });
    const Head heads[] = {with(4, true, 0.8), with(0, true, 1), with(0, false, 0.8), with(4, false, 1)};
    for (std::size_t i = 0; i < all.size(); ++i) {
        SCOPED_TRACE("schedule number " + std::to_string(i));
        const RoundingPlan plan = exact_with(all[i]);
        ASSERT_EQ(problem_with(plan), "");
        for (const Head& head : heads) expect_true(head, plan, certified);
        Log log;
        run(heads[0], plan, &log);
        for (const Event& event : log.events) EXPECT_TRUE(reaches(plan, event.site)) << name(event.site);
    }
    Schedule each = base;
    each.normalize = Normalize::each_tile;
    each.block_k = 12;
    expect_true(with(4, false, 1), exact_with(each), certified);
}

// A problem without them passes none of their sites, and one with them all that the plan rounds at.
TEST(ModifiedSoftmax, SitesTakePartWhereTheProblemHasThem) {
    for (const char* name : {"fa2", "standard-bf16", "math", "efficient", "repo-2510.04212", "llmc"}) {
        const RoundingPlan whole = preset(name, 16);
        for (const auto& [head, extras] : {std::pair{with(0, false, 1), Extras{}},
                                           {with(4, false, 1), Extras{.softcap = true}},
                                           {with(0, true, 1), Extras{.sink = true}},
                                           {with(0, false, 0.8), Extras{.dropout = true}}}) {
            Log log;
            run(head, whole, &log);
            std::array<bool, site_count> seen{};
            for (const Event& e : log.events) seen[index(e.site)] = true;
            for (const SiteInfo& site : sites()) {
                if (!takes_part(site.site, extras)) {
                    EXPECT_FALSE(seen[index(site.site)]) << name << site.name;
                } else if (!takes_part(site.site, {})) {
                    EXPECT_EQ(seen[index(site.site)], reaches(whole, site.site)) << name << site.name;
                }
            }
        }
    }
}

/// sum_j of what passes a site, per row of one head.
class RowSumsAt final : public Instrument {
  public:
    RowSumsAt(Site site, std::ptrdiff_t rows) : sums(static_cast<std::size_t>(rows), 0.0), site_(site) {}
    [[nodiscard]] bool watches(Site site) const override { return site == site_; }
    void at(Site, const TileAt& where, MatrixView<double> value, MatrixView<const double>) override {
        for (std::ptrdiff_t i = 0; i < value.rows; ++i)
            for (std::ptrdiff_t j = 0; j < value.cols; ++j)
                sums[static_cast<std::size_t>(where.query0 + i)] += value(i, j);
    }
    std::vector<double> sums;

  private:
    Site site_;
};

// The law is of the capped score's gradient, where it holds to 2 (n + 8) u |dp| as in conservation_test.cpp. After the chain
// rule there is none: no row of two keys or more is as near to zero.
TEST(ModifiedSoftmax, ZeroSumHoldsBeforeTheSlopeAndNotAfter) {
    Head head(48, 48, 16, 5, 1, 4.0);
    head.softcap = 4;
    RowSumsAt before(Site::ds, 48), after(Site::ds_softcap, 48);
    run(head, plan("exact"), &before);
    run(head, plan("exact"), &after);
    const double bound = 2 * (48 + 8) * 0x1p-53 * 256;
    for (std::size_t i = 1; i < 48; ++i) {
        EXPECT_LE(std::abs(before.sums[i]), bound) << i;
        EXPECT_GT(std::abs(after.sums[i]), bound) << i;
    }
}

// With a sink the keys' sum is what the sink's column lacks; the recorder's rows have both, in every schedule of ds.
TEST(ModifiedSoftmax, ZeroSumWithTheSinksColumn) {
    Head head(48, 48, 16, 5);
    head.sink = {1.5};
    RowSumsAt keys(Site::ds, 48);
    run(head, plan("exact"), &keys);
    double least = INFINITY;
    for (std::size_t i = 1; i < 48; ++i) least = std::min(least, std::abs(keys.sums[i]));
    EXPECT_GT(least, 1e-4) << "without the sink's column the law is broken in every row";
    for (const double softcap : {0.0, 5.0})
        for (const DsScale scale : {DsScale::after, DsScale::before, DsScale::after_cast})
            for (const bool saved : {false, true}) {
                head.softcap = softcap;
                RoundingPlan whole = plan("exact");
                whole.schedule.ds_scale = scale;
                if (saved) {
                    whole.schedule.normalize = Normalize::before_pv;
                    whole.schedule.p_saved = true;
                }
                TileRecorder recorder(head.group(), whole);
                run(head, whole, &recorder);
                for (const double sum : recorder.rows()[0].ds.sum)
                    EXPECT_LE(std::abs(sum), 2 * (48 + 8) * 0x1p-53 * 256);
            }
}

// Two keys, the scores' cap reached: p = e^(+-c)/(…) whatever the scores.
TEST(ModifiedSoftmax, ScoresEndAtTheCap) {
    Head head(1, 2, 1, 1);
    head.causal = false;
    head.scale = 1;
    head.softcap = 0.5;
    head.q[0].values = {1024};
    head.k.values = {512, -512};
    head.v.values = {1, 0};
    const double expected = 1 / (1 + std::exp(-1.0));
    EXPECT_NEAR(run(head, plan("exact")).forward.heads[0].o(0, 0), expected, 0x1p-52);
    EXPECT_EQ(run(head, plan("exact")).backward.dq[0](0, 0), 0) << "flat there";
}

// fa4 takes the maximum of the keys alone: a sink 100 above them overflows its fp32 row sum (e^100 > 2^128), which gpt-oss's
// kernel, whose maximum starts at the sink, does not.
TEST(ModifiedSoftmax, SinkFarAboveTheScoresOverflowsWhereTheMaximumLeavesItOut) {
    Head head(8, 8, 64, 3);
    head.sink = {100};
    RoundingPlan fa4 = preset("fa4");
    EXPECT_EQ(run(head, fa4).forward.heads[0].lse[7], INFINITY);
    fa4.schedule.sink_in_max = true;
    const double lse = run(head, fa4).forward.heads[0].lse[7];
    EXPECT_NEAR(lse, 100, 1e-4);
}

// jax #40128, ROCm/aiter #3070: dsink = -sum p_sink delta cancels over the rows, so that delta of
// a rounded O costs it its digits, while delta from P and dP in fp32 keeps them. O's roundings are 2^-9 of it and fp32's
// 2^-24, of which a sum of 256 terms may make up to 2^-16 and by chance makes 2^-20: between 2^7 and 2^11 apart, so 10 tells
// them apart with room for what either sum happens to cancel.
TEST(ModifiedSoftmax, DsinkLosesItsDigitsWithDeltaOfARoundedO) {
    double rounded = 0, in_fp32 = 0;
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
        Head head(256, 256, 64, seed);
        head.sink = {2};
        const double truth = attention_truth(head.problem(), {.correctly_rounded = false}).heads[0].dsink(0, 0);
        RoundingPlan fa2 = preset("fa2");
        rounded += std::abs(run(head, fa2).backward.dsink[0] - truth);
        fa2.schedule.delta_from = DeltaFrom::p_dp;
        in_fp32 += std::abs(run(head, fa2).backward.dsink[0] - truth);
    }
    EXPECT_GT(rounded, 10 * in_fp32) << rounded << " " << in_fp32;
}

// Keep 1/2: every factor of dropout is a power of two, so that a mask of ones with keep 1/2 doubles o, and dq, dk and dv
// fourfold where it also doubles dO's way, bit for bit in FlashAttention-2 and in standard attention.
TEST(ModifiedSoftmax, KeptShareOfAHalfDoubles) {
    for (const char* name : {"fa2", "fa3", "efficient", "standard-bf16", "math"}) {
        Head head(40, 40, 64, 8);
        const Result plain = run(head, preset(name));
        head.dropout.emplace_back(40, 40, 1.0);
        head.keep = 0.5;
        const Result twice = run(head, preset(name));
        const auto expect_times = [&](const Matrix& a, const Matrix& b, double factor) {
            for (std::size_t i = 0; i < a.values.size(); ++i) ASSERT_EQ(factor * a.values[i], b.values[i]) << name << i;
        };
        expect_times(plain.forward.heads[0].o, twice.forward.heads[0].o, 2);
        expect_times(plain.backward.dv, twice.backward.dv, 2);
        expect_times(plain.backward.dq[0], twice.backward.dq[0], 2);
        expect_times(plain.backward.dk, twice.backward.dk, 2);
    }
}

TEST(ModifiedSoftmax, PlansThatCannotRunAProblemSaySo) {
    const auto refused = [](const RoundingPlan& plan, const Head& head) {
        EXPECT_THROW((void)attention_forward(head.group(), plan), RequestError) << plan.name;
    };
    RoundingPlan projecting = preset("fa2"), centering = preset("fa2"), accumulating = preset("math");
    projecting.schedule.zero_sum = ZeroSum::weighted;
    centering.schedule.key_centering = true;
    accumulating.schedule.delta_from = DeltaFrom::o;
    accumulating.schedule.delta_in = DeltaIn::accumulator;
    for (const RoundingPlan& plan : {projecting, centering}) {
        refused(plan, with(4, false, 1));
        refused(plan, with(0, true, 1));
        EXPECT_NO_THROW((void)attention_forward(with(0, false, 0.5).group(), plan));
    }
    refused(accumulating, with(0, false, 0.5));
    refused(preset("fa1"), with(0, true, 1));
    refused(preset("fa1"), with(0, false, 0.5));
    EXPECT_NO_THROW((void)attention_forward(with(4, false, 1).group(), preset("fa1")));
}

}  // namespace
}  // namespace faultline::testing
