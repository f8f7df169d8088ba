// SPDX-License-Identifier: Apache-2.0
// The recorder's sums against the tiles themselves, and that watching changes nothing.
#include <gtest/gtest.h>

#include <limits>

#include <faultline/cpu/recorder.hpp>

#include "heads.hpp"
#include "log.hpp"

namespace faultline::testing {
namespace {

TEST(Recorder, ChangesNothing) {
    const Head head(140, 140, 64, 21, 2);
    const Result plain = run(head, preset("fa2"));
    TileRecorder recorder(head.group(), preset("fa2"));
    const Result watched = run(head, preset("fa2"), &recorder);
    for (std::size_t h = 0; h < 2; ++h) {
        EXPECT_EQ(plain.forward.heads[h].o, watched.forward.heads[h].o);
        EXPECT_EQ(plain.backward.dq[h], watched.backward.dq[h]);
    }
    EXPECT_EQ(plain.backward.dk, watched.backward.dk);
    EXPECT_EQ(plain.backward.dv, watched.backward.dv);
}

// o_cast of the whole head in one tile: the statistics can be formed again from what the run returns.
TEST(Recorder, SumsAreThoseOfTheTile) {
    const Head head(60, 60, 64, 22);
    TileRecorder recorder(head.group(), preset("fa2"));
    const Result r = run(head, preset("fa2"), &recorder);
    const TileStatistics s = recorder.statistics(Site::o_cast);
    ASSERT_EQ(s.count.size(), 1U);
    const Matrix& o = r.forward.heads[0].o;
    const Matrix& before = r.forward.heads[0].o_unrounded;
    double sum = 0, squares = 0, largest = 0;
    for (std::size_t i = 0; i < o.values.size(); ++i) {
        const double e = o.values[i] - before.values[i];
        sum += e;
        squares += e * e;
        largest = std::max(largest, std::abs(e));
    }
    const auto n = static_cast<double>(o.values.size());
    EXPECT_EQ(s.count[0], n);
    EXPECT_EQ(s.signed_mean[0], sum / n);
    EXPECT_EQ(s.rms[0], std::sqrt(squares / n));
    EXPECT_EQ(s.max_abs[0], largest);
    EXPECT_DOUBLE_EQ(s.signed_bias(), sum / n / std::sqrt(squares / n));
}

// Masked elements are no samples; tiles above the diagonal stay empty.
TEST(Recorder, CountsWhatIsVisible) {
    const Head head(256, 256, 64, 23);
    TileRecorder recorder(head.group(), preset("fa2"));
    run(head, preset("fa2"), &recorder);
    const TileStatistics s = recorder.statistics(Site::p_cast);  // tiles of 128 x 128
    ASSERT_EQ(s.q_tiles, 2);
    ASSERT_EQ(s.k_tiles, 2);
    EXPECT_EQ(s.count[0], 128.0 * 129 / 2);
    EXPECT_EQ(s.count[1], 0.0);
    EXPECT_EQ(s.count[2], 128.0 * 128);
    EXPECT_EQ(s.count[3], 128.0 * 129 / 2);
}

// What the mask hides is no sample at any site, from q k^T on, and a visible probability of 0 is one.
TEST(Recorder, HiddenElementsCountAtNoSite) {
    Head head(60, 60, 64, 26, 2, 40.0);  // logits of hundreds: many probabilities underflow to 0
    for (int h = 0; h < 2; ++h) {
        Matrix& bias = head.bias.emplace_back(60, 60);
        for (std::ptrdiff_t i = 10; i < 60; ++i) bias(i, 3 + h) = -std::numeric_limits<double>::infinity();
    }
    const double visible = 60 * 61 / 2 - 50;
    for (const char* plan : {"fa2", "standard-bf16"}) {
        TileRecorder recorder(head.group(), preset(plan));
        run(head, preset(plan), &recorder);
        for (const Site site : preset(plan).rounding_sites()) {
            if (info(site).shape != SiteShape::score_tile) continue;
            const TileStatistics s = recorder.statistics(site);
            if (s.count.empty()) continue;  // the schedule does not reach it
            ASSERT_EQ(s.count.size(), 2U);
            EXPECT_EQ(s.count[0], visible) << plan << " " << name(site);
            EXPECT_EQ(s.count[1], visible) << plan << " " << name(site);
        }
    }
}

// The rows' sums are those of the tile that the products receive, after the second rounding, where there is one; in nat/logit,
// without the scale that is in it there.
TEST(Recorder, RowsSumTheLastScoreGradient) {
    const Head head(60, 60, 128, 27);
    const RoundingPlan plan = preset("standard-bf16", 128);
    TileRecorder recorder(head.group(), plan);
    Log log;
    Instruments both({&recorder, &log});
    run(head, plan, &both);
    for (const Event& e : log.events) {
        if (e.site != Site::ds_scaled) continue;
        for (std::size_t i = 0; i < 60; ++i) {
            double sum = 0;
            for (std::size_t j = 0; j < 60; ++j) sum += e.value[60 * i + j] / head.scale;
            EXPECT_EQ(recorder.rows()[0].ds.sum[i], sum);
        }
    }
}

// bf16 has 8 significant bits: 257 lies half way between 256 and 258, 255.5 between 255 and 256; both go to the even 256.
TEST(Recorder, MaximaAreThoseOfTheScoresAfterTheirCasts) {
    Matrix q(1, 16), k(4, 16), v(4, 16);
    q.view()(0, 0) = 1;
    const double scores[] = {257, 256, 128, 255.5};
    for (std::ptrdiff_t j = 0; j < 4; ++j) k.view()(j, 0) = scores[j];
    HeadGroup group;
    group.q = {q.view()};
    group.k = k.view();
    group.v = v.view();
    group.scale = 1;
    group.causal = false;
    RoundingPlan plan = preset("exact", 16);
    const auto maxima = [&] {
        TileRecorder recorder(group, plan);
        (void)attention_forward(group, plan, &recorder);
        return recorder.rows()[0];
    };
    EXPECT_EQ(maxima().score_max[0], 257);
    EXPECT_EQ(maxima().score_max_keys[0], 1);
    plan.set(Site::s_cast, {bf16});
    EXPECT_EQ(maxima().score_max[0], 256) << "255.5 and 257 go to the even 256";
    EXPECT_EQ(maxima().score_max_keys[0], 3);
    for (const int block : {1, 2, 3}) {
        plan.schedule.block_k = block;
        EXPECT_EQ(maxima().score_max_keys[0], 3) << "keys in tiles of " << block;
    }
}

TEST(Recorder, TStatisticIsUndefinedWithoutScatter) {
    TileStatistics s;
    s.signed_mean = {0.25};
    s.count = {4};
    s.rms = {0.25};
    EXPECT_TRUE(std::isnan(s.t_statistic())) << "a single tile";
    s.signed_mean = std::vector<double>(9, 0.1);
    s.signed_mean.back() = 7;
    s.count = std::vector<double>(9, 4);
    s.count.back() = 0;
    EXPECT_TRUE(std::isnan(s.t_statistic())) << "the same mean in every tile";
    // Squares are 1 -+ 2^-29 + 2^-60, the last lost in binary64.
    s.signed_mean.clear();
    for (int pair = 0; pair < 4; ++pair) s.signed_mean.insert(s.signed_mean.end(), {1 - 0x1p-30, 1 + 0x1p-30});
    s.count = std::vector<double>(8, 4);
    EXPECT_DOUBLE_EQ(s.t_statistic(), std::sqrt(7.0) * 0x1p30);  // variance 8/7 2^-60, over 8 samples
    s.count.back() = 0;
    EXPECT_TRUE(std::isnan(s.t_statistic())) << "seven tiles";
}

TEST(Recorder, JoinsHeadsInOrder) {
    const Head a(70, 70, 64, 24), b(70, 70, 64, 25);
    TileRecorder first(a.group(), preset("fa2")), second(b.group(), preset("fa2"));
    run(a, preset("fa2"), &first);
    run(b, preset("fa2"), &second);
    const TileStatistics both = joined(first.statistics(Site::ds_cast), second.statistics(Site::ds_cast));
    EXPECT_EQ(both.heads, 2);
    EXPECT_EQ(both.rms.front(), first.statistics(Site::ds_cast).rms.front());
    EXPECT_EQ(both.rms.back(), second.statistics(Site::ds_cast).rms.back());
}

}  // namespace
}  // namespace faultline::testing
