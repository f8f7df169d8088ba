// SPDX-License-Identifier: Apache-2.0
// Faults at every site of the attention kernels: what lies downstream changes, and nothing else does.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include <faultline/base/parallel.hpp>
#include <faultline/injectors/attention_injector.hpp>

#include "../kernels/cpu/heads.hpp"

namespace faultline::testing {
namespace {

constexpr std::ptrdiff_t n = 40, d = 16;

struct Variant {
    const char* name;
    RoundingPlan plan;
};

/// Kernels that together pass every site, in small tiles so that state is carried from tile to tile.
std::vector<Variant> variants() {
    const auto tiled = [](RoundingPlan p, int block) {
        p.schedule.block_q = p.schedule.block_k = p.schedule.bwd_block_q = p.schedule.bwd_block_k = block;
        return p;
    };
    RoundingPlan split = tiled(preset("fa2-unfused-splitkv", d), 8);
    split.schedule.key_splits = 3;
    return {{"fa2", tiled(preset("fa2", d), 16)},
            {"split", split},
            {"standard-bf16", preset("standard-bf16", d)},
            {"repo", tiled(preset("repo-2510.04212", d), 16)},
            {"exact", RoundingPlan{}}};
}

enum Result_ : unsigned { o = 1, lse = 2, dq = 4, dk = 8, dv = 16, dsink = 32 };
constexpr unsigned gradients = dq | dk | dv;

/// What a fault at a site reaches, by the flow of data in FlashAttention (arXiv 2205.14135, algorithms 1 and 4): o enters
/// the backward through delta alone, which dv does not see; lse enters through the recomputed p.
unsigned downstream(Site site, const Schedule& s) {
    const unsigned through_delta = s.delta_from == DeltaFrom::o ? (o | dq | dk) : o;
    const unsigned forward_p = through_delta | (s.p_saved ? gradients : 0U);
    switch (site) {
        case Site::q_cast:
        case Site::k_cast:
        case Site::s_accumulate:
        case Site::s_cast:
        case Site::s_scale:
            return o | lse | gradients;
        case Site::row_max:  // the shift cancels in exact arithmetic; roundings differ, and so may everything
        case Site::exp_argument:
        case Site::exp:
            return forward_p | lse | gradients;
        case Site::v_cast:
            return o | dq | dk;
        case Site::rescale_argument:
        case Site::rescale_factor:
        case Site::row_sum:
            return through_delta | lse | gradients;
        case Site::lse:
            return s.key_splits > 1 ? (o | lse | gradients) : (lse | (s.p_saved ? 0U : gradients));
        case Site::p_normalize:
        case Site::p_cast:
            return site == Site::p_cast ? through_delta : forward_p;
        case Site::o_rescale:
        case Site::pv_accumulate:
        case Site::o_normalize:
        case Site::partial_o_cast:
        case Site::merge:
        case Site::o_cast:
            return through_delta;
        case Site::do_cast:
        case Site::lse_scale:
        case Site::bwd_s_accumulate:
        case Site::bwd_s_cast:
        case Site::bwd_s_scale:
        case Site::bwd_exp_argument:
        case Site::bwd_exp:
            return gradients;
        case Site::bwd_p_cast:
            return s.ds_p == DsP::cast ? gradients : unsigned{dv};
        case Site::delta_product:
        case Site::delta:
        case Site::dp_accumulate:
        case Site::dp_cast:
        case Site::ds:
        case Site::ds_cast:
        case Site::ds_scaled:
            return dq | dk;
        case Site::dv_accumulate:
        case Site::dv_cast:
            return dv;
        case Site::dk_accumulate:
        case Site::dk_cast:
            return dk;
        case Site::dq_accumulate:
        case Site::dq_cast:
            return dq;
        case Site::kv_group_reduce:
            return dk | dv;
        case Site::softcap:
            return o | lse | gradients | dsink;
        case Site::sink_exp:
        case Site::sink_sum:
            return through_delta | lse | gradients | dsink;
        case Site::p_dropout:  // p again in the backward, for dv
            return through_delta | dv | (s.delta_from == DeltaFrom::o ? dsink : 0U);
        case Site::bwd_softcap:
            return gradients;
        case Site::dp_dropout:  // of which delta is made under autograd
            return dq | dk | (needs_dp(s.delta_from) ? dsink : 0U);
        case Site::ds_softcap:
            return dq | dk;
        case Site::sink_p:
        case Site::dsink:
            return dsink;
        case Site::scale:
            break;
    }
    return 0;
}

/// Sites that only a problem with a softcap, sinks and dropout passes.
bool is_of_modified(Site site) {
    switch (site) {
        case Site::softcap:
        case Site::sink_exp:
        case Site::sink_sum:
        case Site::p_dropout:
        case Site::bwd_softcap:
        case Site::sink_p:
        case Site::dp_dropout:
        case Site::ds_softcap:
        case Site::dsink:
            return true;
        default:
            return false;
    }
}

unsigned difference(const Result& a, const Result& b) {
    unsigned found = 0;
    for (std::size_t h = 0; h < a.forward.heads.size(); ++h) {
        if (a.forward.heads[h].o != b.forward.heads[h].o) found |= o;
        if (a.forward.heads[h].lse != b.forward.heads[h].lse) found |= lse;
        if (a.backward.dq[h] != b.backward.dq[h]) found |= dq;
    }
    if (a.backward.dk != b.backward.dk) found |= dk;
    if (a.backward.dv != b.backward.dv) found |= dv;
    if (a.backward.dsink != b.backward.dsink) found |= dsink;
    return found;
}

Fault at(Site site, double magnitude, Law law = Law::fixed) {
    return {.site = site, .law = law, .magnitude = magnitude};
}

TEST(KernelSites, AFaultChangesWhatLiesDownstreamAndNothingElse) {
    const Head head(n, n, d, 31, 2);
    std::set<Site> reached;
    for (const Variant& v : variants()) {
        const Result clean = run(head, v.plan);
        for (const SiteInfo& site : sites()) {
            if (site.site == Site::scale) continue;
            // Random signs: a shift of all arguments of a row is none, since softmax divides it out.
            AttentionInjector injector(at(site.site, 0.3, Law::random), v.plan, 2);
            const Result faulty = run(head, v.plan, &injector);
            if (injector.total().count == 0) {
                EXPECT_EQ(difference(clean, faulty), 0U) << v.name << " " << site.name;
                continue;
            }
            reached.insert(site.site);
            EXPECT_GT(injector.total().rms(), 0.0) << v.name << " " << site.name;
            const unsigned changed = difference(clean, faulty), allowed = downstream(site.site, v.plan.schedule);
            EXPECT_EQ(changed & ~allowed, 0U) << v.name << " " << site.name << " reaches too much: " << changed;
            // A shift of the row maximum cancels: it may leave outputs as they are.
            if (site.site == Site::row_max) continue;
            EXPECT_EQ(changed, allowed) << v.name << " " << site.name << " reaches " << changed << " of " << allowed;
        }
    }
    for (const SiteInfo& site : sites()) {
        if (site.site == Site::scale || is_of_modified(site.site)) continue;
        EXPECT_TRUE(reached.contains(site.site)) << site.name << " was passed by no kernel";
    }
}

TEST(KernelSites, AFaultOfSoftcapSinkOrDropoutChangesWhatLiesDownstreamAndNothingElse) {
    Head head(n, n, d, 33, 2);
    head.softcap = 3;
    head.sink = {0.5, -0.5};
    head.drop(0.8, 34);
    std::set<Site> reached;
    for (const Variant& v : variants()) {
        if (v.plan.schedule.key_splits > 1) continue;
        const Result clean = run(head, v.plan);
        for (const SiteInfo& site : sites()) {
            if (!is_of_modified(site.site)) continue;
            AttentionInjector injector(at(site.site, 0.3, Law::random), v.plan, 2);
            const Result faulty = run(head, v.plan, &injector);
            const unsigned changed = difference(clean, faulty), allowed = downstream(site.site, v.plan.schedule);
            if (injector.total().count == 0) {
                EXPECT_EQ(changed, 0U) << v.name << " " << site.name;
                continue;
            }
            reached.insert(site.site);
            EXPECT_EQ(changed, allowed) << v.name << " " << site.name << " reaches " << changed << " of " << allowed;
        }
    }
    for (const SiteInfo& site : sites()) EXPECT_EQ(reached.contains(site.site), is_of_modified(site.site)) << site.name;
}

TEST(KernelSites, NoMagnitudeIsNoInjectorBitForBit) {
    const Head head(n, n, d, 32, 2);
    for (const Variant& v : variants()) {
        const Result clean = run(head, v.plan);
        for (const SiteInfo& site : sites()) {
            if (site.site == Site::scale) continue;
            AttentionInjector injector(at(site.site, 0), v.plan, 2);
            EXPECT_EQ(difference(clean, run(head, v.plan, &injector)), 0U) << v.name << " " << site.name;
        }
    }
}

// A fault makes nothing visible that the mask hides.
TEST(KernelSites, MaskedElementsStayMasked) {
    const Head head(n, n, d, 33);
    RoundingPlan plan;  // exact, one tile
    for (const Site site : {Site::exp, Site::p_cast, Site::bwd_exp, Site::bwd_p_cast, Site::ds, Site::ds_cast}) {
        AttentionInjector injector(at(site, 0.3), plan, 1);
        const Result faulty = run(head, plan, &injector);
        EXPECT_EQ(injector.total().count, n * (n + 1) / 2.0) << name(site);
        // Row 0 sees key 0 alone: p = 1 up to the fault, o = p v / p.
        if (site != Site::exp) continue;
        for (std::ptrdiff_t c = 0; c < d; ++c)
            EXPECT_NEAR(faulty.forward.heads[0].o.view()(0, c), head.v.view()(0, c), 4 * 0x1p-53 * 10);
    }
}

TEST(KernelSites, HeadsLayersAndStepsAreChosen) {
    const Head head(n, n, d, 34, 2);
    const RoundingPlan plan = preset("fa2", d);
    const Result clean = run(head, plan);
    Fault fault = at(Site::o_cast, 0.1);
    fault.heads = {1};
    fault.from = 5;
    fault.until = 6;
    for (const std::int64_t step : {4, 5, 6}) {
        AttentionInjector injector(fault, plan, 2, step);
        const Result faulty = run(head, plan, &injector);
        EXPECT_EQ(clean.forward.heads[0].o, faulty.forward.heads[0].o);
        EXPECT_EQ(clean.forward.heads[1].o != faulty.forward.heads[1].o, step == 5);
        EXPECT_EQ(injector.realised()[0].count, 0.0);
        EXPECT_EQ(injector.realised()[1].count > 0, step == 5);
    }
    fault.from = 0;
    fault.layers = {3};
    AttentionInjector elsewhere(fault, plan, 2);
    EXPECT_EQ(difference(clean, run(head, plan, &elsewhere)), 0U);
}

// What stands at the place of head 1 of batch element 2 is the same whoever computes it, and in whatever order.
TEST(KernelSites, ThreadsAndOrderDoNotMatter) {
    constexpr int groups = 6;
    const RoundingPlan plan = preset("fa2", d);
    const Fault fault = at(Site::ds_cast, 0.2, Law::random);
    const auto compute = [&](std::size_t g, Realised& found) {
        const Head head(n, n, d, 40 + g);
        HeadGroup group = head.group();
        group.first_head = static_cast<int>(g);
        AttentionInjector injector(fault, plan, 2, 9);
        const GroupForward forward = attention_forward(group, plan, &injector);
        Matrix result = attention_backward(group, forward, plan, &injector).dq[0];
        found = injector.total();
        return result;
    };
    std::vector<Matrix> alone(groups), together(groups);
    std::vector<Realised> alone_found(groups), together_found(groups);
    for (std::size_t g = groups; g-- > 0;) alone[g] = compute(g, alone_found[g]);
    parallel_for(groups, 4, [&](std::size_t g) { together[g] = compute(g, together_found[g]); });
    EXPECT_EQ(alone, together);
    EXPECT_EQ(alone_found, together_found);
}

double largest_difference(const Matrix& a, const Matrix& b) {
    double largest = 0;
    for (std::size_t i = 0; i < a.values.size(); ++i) largest = std::max(largest, std::abs(a.values[i] - b.values[i]));
    return largest;
}

// Binary64 sums of n terms of magnitude below 10 (n * 10 * 2^-53, three products deep).
constexpr double binary64_noise = 3 * 40 * 10 * 0x1p-53;

// A constant added to every dp of a row moves delta = rowsum(P o dP) by as much, since P sums to 1, and ds not at all:
// the sweep that makes delta must see the fault that the score gradient sees.
TEST(KernelSites, DeltaIsMadeOfTheFaultyDp) {
    const Head head(n, n, d, 35);
    RoundingPlan plan;
    plan.schedule.delta_from = DeltaFrom::p_dp;
    AttentionInjector injector(at(Site::dp_accumulate, 0.5), plan, 1);
    const Result clean = run(head, plan), faulty = run(head, plan, &injector);
    EXPECT_LT(largest_difference(clean.backward.dq[0], faulty.backward.dq[0]), binary64_noise);
    // With delta from O the same fault is a constant off in every row, and dq is wrong by a mean key.
    plan.schedule.delta_from = DeltaFrom::o;
    EXPECT_GT(largest_difference(run(head, plan).backward.dq[0], run(head, plan, &injector).backward.dq[0]), 0.01);
}

// A constant on every visible element of ds breaks the zero-sum law by exactly what the uniform projection removes.
TEST(KernelSites, ProjectionsSeeTheFaultyScoreGradient) {
    const Head head(n, n, d, 36);
    RoundingPlan plan;
    plan.schedule.zero_sum = ZeroSum::uniform;
    AttentionInjector injector(at(Site::ds_cast, 0.5), plan, 1);
    const Result clean = run(head, plan), faulty = run(head, plan, &injector);
    EXPECT_LT(largest_difference(clean.backward.dq[0], faulty.backward.dq[0]), binary64_noise);
    EXPECT_LT(largest_difference(clean.backward.dk, faulty.backward.dk), binary64_noise);
}

// delta times (1 + b), the fault of the recipes: realised is asked, and dq's error is b delta_i times the weighted mean key.
TEST(KernelSites, ABiasedDeltaIsARankOneErrorOfDq) {
    const Head head(n, n, d, 37);
    const RoundingPlan plan;
    AttentionInjector injector(at(Site::delta, 0.1, Law::multiplicative), plan, 1);
    const Result clean = run(head, plan), faulty = run(head, plan, &injector);
    EXPECT_NEAR(injector.total().relative_rms(), 0.1, 1e-15);
    const Matrix& out = clean.forward.heads[0].o;
    for (std::ptrdiff_t i = 0; i < n; ++i) {
        double delta = 0;
        for (std::ptrdiff_t c = 0; c < d; ++c) delta += head.dout[0].view()(i, c) * out.view()(i, c);
        std::vector<double> p(static_cast<std::size_t>(i + 1)), mean_key(d, 0.0);
        for (std::ptrdiff_t j = 0; j <= i; ++j) {
            double s = 0;
            for (std::ptrdiff_t c = 0; c < d; ++c) s += head.q[0].view()(i, c) * head.k.view()(j, c);
            const double probability =
                std::exp(s * head.scale - clean.forward.heads[0].lse[static_cast<std::size_t>(i)]);
            for (std::ptrdiff_t c = 0; c < d; ++c)
                mean_key[static_cast<std::size_t>(c)] += probability * head.k.view()(j, c);
        }
        for (std::ptrdiff_t c = 0; c < d; ++c)
            EXPECT_NEAR(faulty.backward.dq[0].view()(i, c) - clean.backward.dq[0].view()(i, c),
                        -head.scale * 0.1 * delta * mean_key[static_cast<std::size_t>(c)], binary64_noise);
    }
}

}  // namespace
}  // namespace faultline::testing
