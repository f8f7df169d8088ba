// SPDX-License-Identifier: Apache-2.0
// Coherence, distances between weights and early warning, on series whose answers are known.
#include <cmath>
#include <limits>
#include <stdexcept>

#include <gtest/gtest.h>

#include <faultline/probes/coherence.hpp>
#include <faultline/probes/early_warning.hpp>
#include <faultline/probes/trajectory.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

TEST(Coherence, PlantedSigns) {
    const std::vector<double> e{2, 2, 2, -1, 2, 2, 2, 2};  // 7 against 1
    const Coherence c = coherence(e);
    EXPECT_EQ(c.count, 8u);
    EXPECT_EQ(c.mean_sign, 6.0 / 8);
    EXPECT_EQ(c.sum_coherence, 13.0 / 15);
    EXPECT_EQ(c.mean, 13.0 / 8);
    EXPECT_EQ(c.rms, std::sqrt(29.0 / 8));
    EXPECT_NEAR(c.sign_p, 18.0 / 256, 1e-15);  // 2 (1 + 8) / 2^8
    EXPECT_EQ(c.sum_p, 4.0 / 256);  // |sum| is 13 with the 1 alone of the other sign, 15 with none, else less
    EXPECT_NEAR(c.sign_lag1, -9.0 / 56, 1e-15);  // deviations 1/4, seven times, and -7/4: (5/16 - 7/8) / (7/2)
}

TEST(Coherence, BinomialTailsByCounting) {
    for (std::size_t n = 0; n <= 12; ++n)
        for (std::size_t k = 0; k <= n; ++k) {
            double as_far = 0, all = 0, choose = 1;
            for (std::size_t i = 0; i <= n; ++i) {
                const auto twice = [&](std::size_t x) {
                    return std::abs(2.0 * static_cast<double>(x) - static_cast<double>(n));
                };
                if (twice(i) >= twice(k)) as_far += choose;
                all += choose;
                choose = choose * static_cast<double>(n - i) / static_cast<double>(i + 1);
            }
            EXPECT_NEAR(binomial_two_sided(k, n), as_far / all, 1e-12) << k << " of " << n;
        }
    EXPECT_NEAR(binomial_two_sided(0, 1000), std::exp2(-999), 1e-12 * std::exp2(-999));
    // 2 P(X <= 49,000) of Binomial(100,000, 1/2), by exact integers (Python's math.comb).
    EXPECT_NEAR(binomial_two_sided(49000, 100000), 2.58871603834689788e-10, 1e-9 * 2.58871603834689788e-10);
    EXPECT_EQ(binomial_two_sided(500000, 1000000), 1);
}

// Under the null the two p-values are what they say: of 4000 series of 64 random signs some 5% lie below 0.05. The binomial
// is discrete: P(|X - 32| >= 9) = 0.0328 is the largest value below. Bands of 5 deviations of a count.
TEST(Coherence, RandomSignsAreNotSignificant) {
    const RandomStream stream(11);
    constexpr int series = 4000, length = 64;
    int sign_low = 0, sum_low = 0;
    for (int s = 0; s < series; ++s) {
        std::vector<double> e;
        for (int i = 0; i < length; ++i) e.push_back(stream.normal(static_cast<std::uint64_t>(s * length + i)));
        sign_low += coherence(e).sign_p < 0.05;
        sum_low += coherence(e).sum_p < 0.05;
    }
    const auto band = [](double p) { return 5 * std::sqrt(series * p * (1 - p)); };
    EXPECT_NEAR(sign_low, series * 0.0328, band(0.0328));
    EXPECT_NEAR(sum_low, series * 0.05, band(0.05));
}

TEST(Coherence, Degenerate) {
    const Coherence none = coherence({});
    EXPECT_EQ(none.count, 0u);
    EXPECT_TRUE(std::isnan(none.mean) && std::isnan(none.rms));
    EXPECT_TRUE(std::isnan(none.sign_p) && std::isnan(none.mean_sign) && std::isnan(none.sum_p));
    const std::vector<double> nothing(3, nan_value);
    EXPECT_EQ(coherence(nothing).nonfinite, 3u);
    EXPECT_TRUE(std::isnan(coherence(nothing).sum_coherence) && std::isnan(coherence(nothing).sum_p));
    const std::vector<double> zeros(5, 0.0), constant(20, 3.0), one{-2}, holes{nan_value, 1, HUGE_VAL, 1};
    EXPECT_EQ(coherence(zeros).sum_coherence, 0);
    EXPECT_EQ(coherence(zeros).sum_p, 1);
    EXPECT_EQ(coherence(constant).mean_sign, 1);
    EXPECT_NEAR(coherence(constant).sign_p, std::exp2(-19), 1e-18);
    EXPECT_EQ(coherence(one).mean_sign, -1);
    EXPECT_EQ(coherence(one).sign_p, 1);
    EXPECT_EQ(coherence(holes).count, 2u);
    EXPECT_EQ(coherence(holes).nonfinite, 2u);
    EXPECT_EQ(coherence(holes).mean, 1);
}

// n equal elements: all signs one way, two of 2^n choices.
TEST(Coherence, SumsOfFewElementsAreCounted) {
    for (std::size_t n = 1; n <= sum_p_counted; ++n) {
        const std::vector<double> e(n, 0.1);
        EXPECT_EQ(coherence(e).sum_p, std::exp2(1 - static_cast<double>(n))) << n;
    }
    // Beyond the count the normal approximation: here 17 signs, 4 of them negative.
    std::vector<double> e(17, 1.0);
    for (std::size_t i = 0; i < 4; ++i) e[i] = -1;
    EXPECT_NEAR(coherence(e).sum_p, std::erfc(9 / std::sqrt(2.0 * 17)), 1e-15);
    e.pop_back();
    EXPECT_NEAR(coherence(e).sum_p, 2 * (1 + 16 + 120 + 560 + 1820) / 65536.0, 1e-15);  // 4 of 16 or fewer are negative
}

TEST(Coherence, OfAnySize) {
    for (const double size : {0x1p-560, 0x1p700, 0x1p1022}) {
        const std::vector<double> e{size, size, -size, size, 2 * size * (size < 0x1p1000 ? 1 : 0.5)};
        const Coherence c = coherence(e);
        EXPECT_TRUE(std::isfinite(c.rms) && c.rms > 0) << size;
        EXPECT_GT(c.sum_coherence, 0.5);
        EXPECT_LT(c.sum_p, 1);
    }
    const std::vector<double> plain{1, 2, -4};
    EXPECT_EQ(coherence(plain).rms, std::sqrt(7.0));
    EXPECT_EQ(coherence(plain).mean, -1.0 / 3);
}

// Blocks of four equal signs: three of four neighbours agree, correlation 1/2 in the long run.
TEST(Coherence, NeighboursOfOneSign) {
    std::vector<double> e;
    for (int i = 0; i < 400; ++i) e.push_back((i / 4) % 2 == 0 ? 1 : -1);
    EXPECT_NEAR(coherence(e).sign_lag1, 0.5, 1e-2);
    EXPECT_TRUE(std::isnan(coherence(std::vector<double>(5, 1.0)).sign_lag1));
}

TEST(Coherence, WindowsFollowASignThatFlips) {
    std::vector<double> e(10, 1.0);
    e.insert(e.end(), 10, -1.0);
    const std::vector<Coherence> windows = windowed_coherence(e, 10, 5);
    ASSERT_EQ(windows.size(), 3u);
    EXPECT_EQ(windows[0].mean_sign, 1);
    EXPECT_EQ(windows[1].mean_sign, 0);
    EXPECT_EQ(windows[2].mean_sign, -1);
    EXPECT_TRUE(windowed_coherence(e, 21, 1).empty());
    EXPECT_THROW((void)windowed_coherence(e, 0, 1), std::invalid_argument);
    EXPECT_THROW((void)windowed_coherence(e, 1, 0), std::invalid_argument);
}

TEST(Trajectory, KnownDistances) {
    const std::vector<float> a{1, 2, 3, 4}, moved{1.5F, 2.5F, 3.5F, 4.5F}, shuffled{4, 3, 2, 1};
    EXPECT_EQ(weight_distance(a, moved).wasserstein, 0.5);
    EXPECT_EQ(weight_distance(a, moved).largest, 0.5);
    EXPECT_EQ(weight_distance(a, moved).rms, 0.5);
    EXPECT_EQ(weight_distance(a, moved).relative, 1 / std::sqrt(30.0));
    EXPECT_EQ(weight_distance(a, shuffled).wasserstein, 0);  // the same distribution
    EXPECT_EQ(weight_distance(a, shuffled).largest, 3);
    // 3 samples against 2: quantiles 0 0 1 | 0 3 on sixths: |0-0| 3/6 (0, 0, 0), |0-3| 1/6, |1-3| 2/6.
    const std::vector<double> three{0, 0, 1}, two{3, 0}, none, bad{nan_value};
    EXPECT_NEAR(wasserstein(three, two), 7.0 / 6, 1e-15);
    EXPECT_NEAR(wasserstein(two, three), 7.0 / 6, 1e-15);
    EXPECT_TRUE(std::isnan(wasserstein(none, two)));
    EXPECT_TRUE(std::isnan(wasserstein(two, bad)));
    EXPECT_EQ(weight_distance({}, {}).largest, 0);
    const std::vector<float> hole{1, 2, 3, std::numeric_limits<float>::infinity()};
    EXPECT_TRUE(std::isnan(weight_distance(a, hole).largest));
    EXPECT_THROW((void)weight_distance(a, {}), std::invalid_argument);
}

TEST(EarlyWarning, DivergenceRule) {
    const DivergenceRule rule{.window = 3, .rise = 0.5};
    std::vector<double> loss{4, 3, 2, 2, 9, 2, 2};  // one bad batch is no divergence
    EXPECT_FALSE(divergence(loss, rule));
    loss.insert(loss.end(), {3, 3, 3});  // the median of three follows at the second 3
    EXPECT_EQ(divergence(loss, rule), 8u);
    loss.insert(loss.end(), {2, 2, 2});  // it comes back
    EXPECT_FALSE(divergence(loss, rule));
    loss.push_back(nan_value);
    EXPECT_EQ(divergence(loss, rule), 13u);
    EXPECT_FALSE(divergence({}, rule));
    const std::vector<double> single{7};
    EXPECT_FALSE(divergence(single, rule));
}

TEST(EarlyWarning, AlarmsNeedPersistence) {
    const std::vector<double> x{1, 9, 1, nan_value, 9, nan_value, 9, 9};
    EXPECT_EQ(alarm(x, false, 5, 1), 1u);
    EXPECT_EQ(alarm(x, false, 5, 2), 6u);  // the values not recorded are passed over
    EXPECT_FALSE(alarm(x, false, 5, 4));
    EXPECT_EQ(alarm(x, true, 5, 1), 0u);
    EXPECT_EQ(held_level(x, false, 2), 9);
    EXPECT_EQ(held_level(x, false, 4), 1);
    EXPECT_EQ(held_level(x, true, 2), 9);
    EXPECT_FALSE(held_level(x, false, 9));
}

RunSeries run_of(const std::string& name, double last_loss, double last_monitor, std::size_t monitor_from) {
    RunSeries run{name, {}, {}, {{"sigma", false, {}}}};
    for (std::size_t i = 0; i < 100; ++i) {
        run.steps.push_back(static_cast<std::int64_t>(10 * i));
        run.loss.push_back(i < 60 ? 2 : last_loss);
        run.monitors[0].values.push_back(i < monitor_from ? 1 : last_monitor);
    }
    return run;
}

// Losses rise at index 60; the median of 25 follows at the 13th value of them, index 72. The monitor rises at 40 and has
// persisted for three at 42: 30 recorded steps, 300 steps, ahead.
TEST(EarlyWarning, LeadOfAPlantedRise) {
    const std::vector<RunSeries> runs{run_of("a", 2, 1, 100), run_of("b", 2, 1.5, 50), run_of("sick", 5, 9, 40)};
    const EarlyWarning w = early_warning(runs);
    EXPECT_FALSE(w.divergence[0] || w.divergence[1]);
    EXPECT_EQ(w.divergence[2], 720);
    const MonitorVerdict& v = w.monitors.at(0);
    EXPECT_EQ(v.threshold, 3);  // twice 1.5
    EXPECT_EQ(v.alarms[2], 420);
    EXPECT_EQ(v.leads[2], 300);
    EXPECT_EQ(v.detected, 1u);
    EXPECT_EQ(v.judged, 2u);
    EXPECT_EQ(v.false_alarms, 0u);
}

TEST(EarlyWarning, FalseAlarmsAreByTheOthersRange) {
    // b's monitor goes to 4 though it stays healthy: beyond twice a's 1, and the threshold becomes 8.
    const std::vector<RunSeries> runs{run_of("a", 2, 1, 100), run_of("b", 2, 4, 50), run_of("sick", 5, 7, 40)};
    const MonitorVerdict v = early_warning(runs).monitors.at(0);
    EXPECT_EQ(v.threshold, 8);
    EXPECT_EQ(v.false_alarms, 1u);
    EXPECT_EQ(v.detected, 0u);
    EXPECT_FALSE(v.alarms[2]);
}

// A monitor that is 0 in the healthy runs has no range: there is no threshold, and one small value is no alarm.
TEST(EarlyWarning, ZeroHasNoMultiple) {
    RunSeries healthy{"a", {}, {}, {{"saturated", false, {}}}};
    for (std::int64_t step = 0; step < 60; ++step) {
        healthy.steps.push_back(step);
        healthy.loss.push_back(2);
        healthy.monitors[0].values.push_back(0);
    }
    RunSeries other = healthy;
    std::fill(other.monitors[0].values.begin() + 20, other.monitors[0].values.begin() + 30, 0.0004);
    const std::vector<RunSeries> runs{healthy, healthy, other};
    const MonitorVerdict v = early_warning(runs).monitors.at(0);
    EXPECT_EQ(v.false_alarms, 0u);
    EXPECT_EQ(v.judged, 2u) << "the two at 0 are judged by the other's level";
    EXPECT_EQ(v.threshold, 0.0008);
    EXPECT_FALSE(early_warning(std::span(runs).first(2)).monitors.at(0).threshold);
}

TEST(EarlyWarning, Degenerate) {
    EXPECT_TRUE(early_warning({}).monitors.empty());
    const std::vector<RunSeries> sick{run_of("sick", 5, 9, 40)};
    const MonitorVerdict alone = early_warning(sick).monitors.at(0);
    EXPECT_FALSE(alone.threshold || alone.alarms[0]);
    const std::vector<RunSeries> healthy{run_of("a", 2, 1, 100)};
    EXPECT_EQ(early_warning(healthy).monitors.at(0).judged, 0u);
    std::vector<RunSeries> different{run_of("a", 2, 1, 100), run_of("b", 2, 1, 100)};
    different[1].monitors[0].name = "other";
    EXPECT_THROW((void)early_warning(different), std::invalid_argument);
    // An alarm at or after the divergence is no warning.
    const std::vector<RunSeries> late{run_of("a", 2, 1, 100), run_of("sick", 5, 9, 80)};
    EXPECT_EQ(early_warning(late).monitors.at(0).leads[1], 720 - 820);
    EXPECT_EQ(early_warning(late).monitors.at(0).detected, 0u);
}

}  // namespace
}  // namespace faultline
