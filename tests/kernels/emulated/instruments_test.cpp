// SPDX-License-Identifier: Apache-2.0
// Instruments in the device's form, run by one thread, against kernels/cpu: what a recorder holds, what faults leave in every
// output, and what they say they did, bit for bit.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include <faultline/corrections/correction.hpp>
#include <faultline/cpu/recorder.hpp>
#include <faultline/emulated/host.hpp>
#include <faultline/injectors/attention_injector.hpp>

#include "plans.hpp"

namespace faultline {
namespace {

using testing::drawn;
using testing::Head;
using testing::with_extras;
using testing::with_small_tiles;

bool same(const std::vector<double>& a, const std::vector<double>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

/// Everything that a run with faults and a recorder leaves.
struct Observed {
    GroupForward forward;
    GroupBackward backward;
    std::vector<TileStatistics> sites;
    std::vector<RecordedRows> rows;
    std::vector<Realised> realised;
};

template <class Forward, class Backward>
Observed observed(const HeadGroup& group, const RoundingPlan& plan, const std::vector<Fault>& faults, Forward&& forward,
                  Backward&& backward) {
    TileRecorder recorder(group, plan);
    std::vector<AttentionInjector> injectors;
    for (const Fault& fault : faults) injectors.emplace_back(fault, plan, 4, 3);
    std::vector<Instrument*> parts;
    for (AttentionInjector& injector : injectors) parts.push_back(&injector);
    parts.push_back(&recorder);
    Instruments all(parts);
    Observed seen;
    seen.forward = forward(group, plan, &all);
    seen.backward = backward(group, seen.forward, plan, &all);
    for (std::size_t s = 0; s < site_count; ++s) seen.sites.push_back(recorder.statistics(static_cast<Site>(s)));
    seen.rows = recorder.rows();
    for (const AttentionInjector& injector : injectors) seen.realised.push_back(injector.total());
    return seen;
}

/// That a run leaves the same whether it is recorded or not.
void expect_unchanged(const HeadGroup& group, const RoundingPlan& plan, const Observed& recorded,
                      const std::string& what) {
    const GroupForward forward = attention_forward(group, plan);
    const GroupBackward backward = attention_backward(group, forward, plan);
    for (std::size_t h = 0; h < forward.heads.size(); ++h) {
        const HeadForward &a = forward.heads[h], &b = recorded.forward.heads[h];
        EXPECT_TRUE(same(a.o.values, b.o.values)) << what << " recording changes o of head " << h;
        EXPECT_TRUE(same(a.lse, b.lse)) << what << " recording changes lse of head " << h;
        EXPECT_TRUE(same(backward.dq[h].values, recorded.backward.dq[h].values)) << what << " recording changes dq";
    }
    EXPECT_TRUE(same(backward.dk.values, recorded.backward.dk.values)) << what << " recording changes dk";
    EXPECT_TRUE(same(backward.dv.values, recorded.backward.dv.values)) << what << " recording changes dv";
    EXPECT_TRUE(same(backward.dsink, recorded.backward.dsink)) << what << " recording changes dsink";
}

/// How many tiles were recorded.
std::size_t expect_same(const Head& head, const RoundingPlan& plan, const std::vector<Fault>& faults,
                        const std::string& what, std::size_t tape = 1 << 20) {
    HeadGroup group = head.group();
    group.first_head = 5;
    group.layer = 2;
    group.seed = 11;
    const Observed cpu = observed(group, plan, faults, attention_forward, attention_backward);
    if (faults.empty()) expect_unchanged(group, plan, cpu, what);
    emulated::HostBackend backend(8, 3, tape);
    const Observed own = observed(
        group, plan, faults,
        [&](const HeadGroup& in, const RoundingPlan& p, Instrument* instrument) {
            return emulated::forward(backend, std::span(&in, 1), p, instrument).front();
        },
        [&](const HeadGroup& in, const GroupForward& fwd, const RoundingPlan& p, Instrument* instrument) {
            return emulated::backward(backend, std::span(&in, 1), std::span(&fwd, 1), p, instrument).front();
        });
    std::size_t tiles = 0;
    for (std::size_t s = 0; s < site_count; ++s) {
        const TileStatistics &a = cpu.sites[s], &b = own.sites[s];
        const std::string_view name = info(static_cast<Site>(s)).name;
        EXPECT_TRUE(a.q_tiles == b.q_tiles && a.k_tiles == b.k_tiles) << what << ' ' << name;
        EXPECT_TRUE(same(a.signed_mean, b.signed_mean) && same(a.rms, b.rms) && same(a.value_rms, b.value_rms) &&
                    same(a.max_abs, b.max_abs) && same(a.count, b.count) && same(a.nonfinite, b.nonfinite))
            << what << ' ' << name;
        for (const double count : a.count) tiles += count > 0 ? 1 : 0;
    }
    for (std::size_t h = 0; h < cpu.rows.size(); ++h) {
        const RecordedRows &a = cpu.rows[h], &b = own.rows[h];
        EXPECT_TRUE(same(a.delta, b.delta) && same(a.ds.sum, b.ds.sum) && same(a.ds.magnitude, b.ds.magnitude) &&
                    same(a.score_max, b.score_max) && a.score_max_keys == b.score_max_keys)
            << what << " rows of head " << h;
        EXPECT_TRUE(same(cpu.forward.heads[h].o.values, own.forward.heads[h].o.values)) << what << " o of head " << h;
        EXPECT_TRUE(same(cpu.forward.heads[h].lse, own.forward.heads[h].lse)) << what << " lse of head " << h;
        EXPECT_TRUE(same(cpu.backward.dq[h].values, own.backward.dq[h].values)) << what << " dq of head " << h;
    }
    EXPECT_TRUE(same(cpu.backward.dk.values, own.backward.dk.values)) << what << " dk";
    EXPECT_TRUE(same(cpu.backward.dv.values, own.backward.dv.values)) << what << " dv";
    EXPECT_TRUE(same(cpu.backward.dsink, own.backward.dsink)) << what << " dsink";
    for (std::size_t f = 0; f < faults.size(); ++f) {
        const Realised &a = cpu.realised[f], &b = own.realised[f];
        EXPECT_TRUE(a == b) << what << ' ' << to_string(faults[f]);
    }
    return tiles;
}

TEST(Instruments, RecorderOfEveryPreset) {
    std::size_t tiles = 0;
    for (const RoundingPlan& plan : presets()) {
        const RoundingPlan small = with_small_tiles(plan);
        tiles += expect_same(Head(21, 21, 16, 1, 2, 3.0), small, {}, plan.name);
        tiles += expect_same(with_extras(Head(21, 25, 16, 2, 1, 3.0), for_head_dim(small, 16), 7), small, {},
                             plan.name + " with softcap, sink and dropout", 1);  // one team's tape at a time
    }
    EXPECT_GT(tiles, 5000u);
}

// pytorch/pytorch#121558 with a recorder: q = k = v = 133120 makes the winner's fused exponent +7916 and the row sum infinite,
// which the recorder is shown and has to be left alone (O = inf / inf = NaN; a sum made NaN divides by 1, and O = inf).
TEST(Instruments, RecorderOfInfiniteRowSums) {
    int infinite = 0;
    for (const RoundingPlan& plan : presets())
        for (const std::ptrdiff_t n : {1, 2, 4}) {
            Head head(n, n, 64, 1);
            for (Matrix* m : {&head.q[0], &head.k, &head.v}) std::fill(m->values.begin(), m->values.end(), 133120.0);
            (void)expect_same(head, for_head_dim(plan, 64), {}, plan.name + " with q = k = v = 133120");
            infinite += std::isnan(attention_forward(head.group(), for_head_dim(plan, 64)).heads[0].o(0, 0)) ? 1 : 0;
        }
    EXPECT_GT(infinite, 0);
}

TEST(Instruments, RecorderOfPlansDrawnAtRandom) {
    int tried = 0;
    for (std::uint64_t seed = 1; seed <= 200; ++seed) {
        const RoundingPlan plan = for_head_dim(drawn(seed), 16);
        if (find_problem(plan)) continue;
        Head head(19, 27, 16, seed, seed % 3 == 0 ? 2 : 1, 2.0);
        head.causal = seed % 4 != 0;
        head = with_extras(head, plan, seed % 2 == 0 ? static_cast<unsigned>(seed / 2 % 8) : 0);
        (void)expect_same(head, plan, {}, "plan of seed " + std::to_string(seed));
        ++tried;
        if (HasFailure()) break;
    }
    EXPECT_GE(tried, 100);
}

TEST(Instruments, FaultsOfEveryLawAtEverySite) {
    const Head head(21, 21, 16, 3, 2, 3.0);
    Head biased = head;
    for (int h = 0; h < 2; ++h) {
        biased.bias.push_back(testing::random_matrix(21, 21, 1.0, 77 + static_cast<std::uint64_t>(h)));
        for (std::ptrdiff_t i = 0; i < 21; ++i) biased.bias.back()(i, (i * 7) % 21) = -INFINITY;
    }
    const char* const laws[] = {"fixed:10%",
                                "per_head:5%:hold=exact",
                                "per_column:2%",
                                "random:-3%:seed=4",
                                "random_step:10%",
                                "flip@2:10%:hold=nearest",
                                "operand:1%",
                                "multiplicative:0.1",
                                "fixed:1ulp:format=bf16",
                                "random:2%:shape=value",
                                "fixed:20%:heads=1"};
    std::size_t law = 0;
    for (const char* name : {"fa2", "fa2-unfused-splitkv", "math", "fa1", "standard-bf16"}) {
        const RoundingPlan plan = for_head_dim(with_small_tiles(faultline::plan(name)), 16);
        for (const SiteInfo& site : sites()) {
            if (site.shape == SiteShape::constant || !reaches(plan, site.site)) continue;
            const Fault fault = parse_fault(std::string(site.name) + ":" + laws[law++ % std::size(laws)]);
            (void)expect_same(law % 3 == 0 ? biased : head, plan, {fault}, std::string(name) + " " + to_string(fault));
            if (HasFailure()) return;
        }
    }
    EXPECT_GT(law, 5 * std::size(laws));
}

TEST(Instruments, SeveralFaultsAtOnceAndUnderAProjection) {
    const Head head(21, 21, 16, 4, 1, 3.0);
    for (const char* zero_sum : {"zero_sum_uniform", "zero_sum_largest", "delta_p_dp"}) {
        const RoundingPlan plan =
            apply(parse_correction(zero_sum), for_head_dim(with_small_tiles(faultline::plan("fa2")), 16));
        (void)expect_same(head, plan,
                          {parse_fault("bwd_exp:fixed:5%"), parse_fault("ds_cast:random:10%"),
                           parse_fault("bwd_exp:operand:1%"), parse_fault("k_cast:multiplicative:0.01")},
                          zero_sum);
    }
}

}  // namespace
}  // namespace faultline
