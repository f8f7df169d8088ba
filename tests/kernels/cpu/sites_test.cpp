// SPDX-License-Identifier: Apache-2.0
// What stands at single sites, formed again from the tiles around them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <numbers>

#include "heads.hpp"
#include "log.hpp"

namespace faultline::testing {
namespace {

constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

double in_fp32(double x) { return static_cast<double>(static_cast<float>(x)); }

std::vector<Event> at(const Log& log, Site site) {
    std::vector<Event> found;
    for (const Event& e : log.events)
        if (e.site == site) found.push_back(e);
    return found;
}

// flash-attention softmax.h:157: (m_old - m_new) * scale_log2, two roundings to fp32, also where the scores' argument is
// one fma; and its rule is its own.
TEST(RescaleArgument, IsSubtractedThenScaledWhateverTheScoresDo) {
    const Head head(300, 300, 72, 41, 1, 3.0);
    const RoundingPlan plan = preset("fa2", 72);
    ASSERT_EQ(plan.schedule.argument, ArgumentForm::fused);
    Log log;
    run(head, plan, &log);
    const double c = in_fp32(in_fp32(head.scale) * std::numbers::log2e);
    std::map<std::ptrdiff_t, std::vector<double>> maximum;  // by first row, of the last key tile
    std::size_t seen = 0;
    const std::vector<double>* newest = nullptr;
    std::vector<double> old;
    for (const Event& e : log.events) {
        if (e.site == Site::row_max) {
            old = maximum[e.where.query0];
            newest = &(maximum[e.where.query0] = e.value);
        }
        if (e.site != Site::rescale_argument) continue;
        ASSERT_EQ(old.size(), e.value.size());
        for (std::size_t i = 0; i < old.size(); ++i) {
            if (std::isinf(old[i])) continue;
            EXPECT_EQ(e.value[i], in_fp32(in_fp32(old[i] - (*newest)[i]) * c));
            ++seen;
        }
    }
    EXPECT_GT(seen, 300U);
}

TEST(RescaleArgument, IsNotTheScoresArgument) {
    const Head head(300, 300, 72, 41, 1, 3.0);
    const RoundingPlan whole = preset("fa2", 72);
    const auto logged = [&](const RoundingPlan& plan, Site site) {
        Log log;
        run(head, plan, &log);
        std::vector<std::vector<double>> values;
        for (const Event& e : at(log, site)) values.push_back(e.value);
        return values;
    };
    EXPECT_EQ(logged(whole.repaired(Site::exp_argument), Site::rescale_argument),
              logged(whole, Site::rescale_argument));
    EXPECT_NE(logged(whole.repaired(Site::rescale_argument), Site::rescale_argument),
              logged(whole, Site::rescale_argument));
    EXPECT_EQ(logged(whole.repaired(Site::rescale_argument), Site::exp_argument), logged(whole, Site::exp_argument));
}

// nanoGPT model.py:67: autograd multiplies the bf16 gradient by the scale into another bf16 tensor. At head size 64 the
// scale is 1/8 and nothing happens; at 128 it rounds again.
TEST(DsScaled, RoundsAgainUnlessTheScaleIsAPowerOfTwo) {
    for (const std::ptrdiff_t d : {64, 128}) {
        const Head head(60, 60, d, 42);
        Log log;
        run(head, preset("standard-bf16", d), &log);
        const std::vector<Event> cast = at(log, Site::ds_cast), scaled = at(log, Site::ds_scaled);
        ASSERT_EQ(scaled.size(), cast.size());
        std::size_t rounded = 0, total = 0;
        for (std::size_t t = 0; t < cast.size(); ++t)
            for (std::size_t i = 0; i < cast[t].value.size(); ++i) {
                EXPECT_EQ(scaled[t].value[i],
                          round(cast[t].value[i] * in_fp32(head.scale), bf16, Rounding::nearest_even));
                rounded += scaled[t].value[i] != scaled[t].exact[i];
                total += cast[t].value[i] != 0;
            }
        if (d == 64)
            EXPECT_EQ(rounded, 0U);
        else
            EXPECT_GT(rounded, total / 2);
    }
}

// Delta of P and dP takes the P that ds is made of, so that ds sums to zero: after its cast in kernels that keep only that.
TEST(DeltaOfPAndDp, TakesThePThatDsIsMadeOf) {
    const Head head(60, 60, 64, 43);
    for (const DsP which : {DsP::cast, DsP::unrounded}) {
        RoundingPlan plan = preset("fa2");
        plan.schedule.ds_p = which;
        plan.schedule.delta_from = DeltaFrom::p_dp;
        plan.set(Site::delta, Rule{});
        Log log;
        run(head, plan, &log);
        const Event delta = at(log, Site::delta).at(0);
        const Event p = at(log, which == DsP::cast ? Site::bwd_p_cast : Site::bwd_exp).at(0);
        const Event dp = at(log, Site::dp_cast).at(0);
        const Event other = at(log, which == DsP::cast ? Site::bwd_exp : Site::bwd_p_cast).at(0);
        bool told = false;
        for (std::size_t i = 0; i < 60; ++i) {
            double sum = 0, with_other = 0;
            for (std::size_t j = 0; j < 60; ++j) {
                sum += p.value[60 * i + j] * dp.value[60 * i + j];
                with_other += other.value[60 * i + j] * dp.value[60 * i + j];
            }
            EXPECT_EQ(delta.value[i], sum);
            told = told || with_other != sum;
        }
        EXPECT_TRUE(told) << "the two differ";
    }
}

// cuDNN's lse: the maximum in log2 units, rounded, times ln 2, and the logarithm of the row sum, in one fma.
TEST(LseForm, OfTheMaximumInLog2UnitsIsOneFma) {
    const Head head(50, 50, 72, 46, 1, 30.0);
    RoundingPlan plan = preset("fa2", 72);
    plan.schedule.functions = Functions::correctly_rounded;
    plan.schedule.lse_form = LseForm::log2;
    Log log;
    const Result r = run(head, plan, &log);
    const Event maximum = at(log, Site::row_max).back(), sum = at(log, Site::row_sum).back();
    ASSERT_EQ(at(log, Site::row_max).size(), 1U) << "one key tile";
    const double c = in_fp32(in_fp32(head.scale) * std::numbers::log2e), ln2 = in_fp32(std::numbers::ln2);
    std::size_t told = 0;
    for (std::size_t i = 0; i < 50; ++i) {
        const double log_sum = in_fp32(std::log(sum.value[i]));
        EXPECT_EQ(r.forward.heads[0].lse[i], in_fp32(std::fma(in_fp32(maximum.value[i] * c), ln2, log_sum)));
        told += r.forward.heads[0].lse[i] != in_fp32(std::fma(maximum.value[i], in_fp32(head.scale), log_sum));
    }
    EXPECT_GT(told, 10U) << "the two forms differ";
}

// Columns 0 … 7 belong to thread 0, 8 … 15 to thread 1, 16 … 23 to thread 0 again: ((p0 + p1) + (p2 + p3)) + …
TEST(DeltaOrder, OctetPairsAddTwoProductsFirst) {
    Head head(40, 40, 24, 47);
    for (std::ptrdiff_t i = 0; i < 40; ++i)  // of many sizes: sums of so few bf16 products would be exact
        for (std::ptrdiff_t j = 0; j < 24; ++j) head.dout[0](i, j) *= std::ldexp(1.0, static_cast<int>(7 * j % 19));
    RoundingPlan plan = preset("fa2", 24);
    plan.schedule.delta_order = DeltaOrder::octet_pairs;
    plan.schedule.delta_threads = 2;
    Log log;
    const Result r = run(head, plan, &log);
    const Event delta = at(log, Site::delta).at(0);
    std::size_t told = 0;
    for (std::ptrdiff_t i = 0; i < 40; ++i) {
        double lane[2] = {0, 0}, in_turn[2] = {0, 0};
        for (std::ptrdiff_t j = 0; j < 24; j += 2) {
            const double a = in_fp32(head.dout[0](i, j) * r.forward.heads[0].o(i, j));
            const double b = in_fp32(head.dout[0](i, j + 1) * r.forward.heads[0].o(i, j + 1));
            double &pairs = lane[(j / 8) % 2], &single = in_turn[(j / 8) % 2];
            pairs = in_fp32(pairs + in_fp32(a + b));
            single = in_fp32(in_fp32(single + a) + b);
        }
        EXPECT_EQ(delta.value[static_cast<std::size_t>(i)], in_fp32(lane[0] + lane[1]));
        told += in_fp32(lane[0] + lane[1]) != in_fp32(in_turn[0] + in_turn[1]);
    }
    EXPECT_GT(told, 5U) << "the two orders differ";
}

// Keys 30 … 39 are padding: no query sees them, and whatever stands there may change nothing.
TEST(KeyCentering, PaddingTakesNoPart) {
    Head head(40, 40, 16, 44, 2);
    for (int h = 0; h < 2; ++h) {
        Matrix& bias = head.bias.emplace_back(40, 40);
        for (std::ptrdiff_t i = 0; i < 40; ++i)
            for (std::ptrdiff_t j = 30; j < 40; ++j) bias(i, j) = minus_infinity;
    }
    RoundingPlan plan = preset("fa2");
    plan.schedule.key_centering = true;
    const Result before = run(head, plan);
    const std::vector<double> mean = mean_visible_key(head.group(), head.k.view());
    for (std::size_t c = 0; c < 16; ++c) {
        double sum = 0;
        for (std::ptrdiff_t j = 0; j < 30; ++j) sum += head.k(j, static_cast<std::ptrdiff_t>(c));
        EXPECT_EQ(mean[c], sum / 30);
    }
    for (std::ptrdiff_t j = 30; j < 40; ++j)
        for (std::ptrdiff_t c = 0; c < 16; ++c) head.k(j, c) = 1000;
    const Result after = run(head, plan);
    EXPECT_EQ(before.backward.dq[0], after.backward.dq[0]);
    EXPECT_EQ(before.backward.dq[1], after.backward.dq[1]);
    // Seen by one row of one head, they count.
    head.bias[1](39, 30) = 0;
    EXPECT_NE(mean_visible_key(head.group(), head.k.view()), mean);
}

TEST(MeanVisibleKey, UnderTheCausalMaskAllKeysCount) {
    const Head head(7, 20, 8, 45);
    double sum = 0;
    for (std::ptrdiff_t j = 0; j < 20; ++j) sum += head.k(j, 0);
    EXPECT_EQ(mean_visible_key(head.group(), head.k.view())[0], sum / 20);
}

}  // namespace
}  // namespace faultline::testing
