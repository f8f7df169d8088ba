// SPDX-License-Identifier: Apache-2.0
// The rule that says what became of a run, on runs made by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <faultline/dissociation/collect.hpp>
#include <faultline/dissociation/outcome.hpp>

namespace faultline {
namespace {

RunResult run(const std::string& source, const std::string& intervention, std::uint64_t seed,
              std::vector<double> sigma = {1, 1, 1, 1}, double loss = 2) {
    RunResult r;
    r.source = source;
    r.intervention = intervention;
    r.seed = seed;
    r.finished = true;
    for (std::size_t i = 0; i < sigma.size(); ++i) r.monitor_step.push_back(static_cast<std::int64_t>(10 * i));
    r.sigma_q = std::move(sigma);
    r.max_logit = {5, 7};
    r.train_loss = loss;
    return r;
}

const JudgingRule rule{.sigma_ratio = 2, .loss_ratio = 1.05};

TEST(RunVerdict, RunawayIsAboveTheRatioToTheEnd) {
    const RunResult control = run("none", "none", 0, {1, 2, 3, 4});
    // Ratios 1, 3, 2, 2.5: above 2 at step 10, not at 20, above again from 30 on.
    const RunVerdict v = judge(run("x", "none", 0, {1, 6, 6, 10}), control, rule);
    EXPECT_TRUE(v.runaway);
    EXPECT_EQ(v.first_step, 30);
    EXPECT_DOUBLE_EQ(v.sigma_ratio, 2.5);
    EXPECT_EQ(v.text(), "runaway");
    EXPECT_EQ(judge(run("x", "none", 0, {1, 6, 9, 10}), control, rule).first_step, 10);
    // Back within the ratio at the end: none.
    const RunVerdict back = judge(run("x", "none", 0, {1, 6, 9, 8}), control, rule);
    EXPECT_FALSE(back.runaway);
    EXPECT_EQ(back.first_step, -1);
    EXPECT_TRUE(back.healthy());
}

TEST(RunVerdict, LossIsARatioOrNoNumber) {
    const RunResult control = run("none", "none", 0);
    EXPECT_FALSE(judge(run("x", "none", 0, {1, 1, 1, 1}, 2.1), control, rule).loss);  // 1.05 is not above 1.05
    EXPECT_TRUE(judge(run("x", "none", 0, {1, 1, 1, 1}, 2.11), control, rule).loss);
    EXPECT_TRUE(judge(run("x", "none", 0, {1, 1, 1, 1}, std::nan("")), control, rule).loss);
    RunResult stopped = run("x", "none", 0);
    stopped.not_finite = true;
    EXPECT_TRUE(judge(stopped, control, rule).loss);
    EXPECT_EQ(judge(run("x", "none", 0, {1, 1, 1, 3}, 3), control, rule).text(), "runaway, loss");
    EXPECT_EQ(judge(run("x", "none", 0, {1, 1, 1, 1}, 3), control, rule).text(), "loss");
}

TEST(RunVerdict, ShorterRunsAreComparedAsFarAsTheyGo) {
    const RunVerdict v = judge(run("x", "none", 0, {1, 5}), run("none", "none", 0, {1, 1, 1, 9}), rule);
    EXPECT_TRUE(v.runaway);
    EXPECT_EQ(v.first_step, 10);
}

TEST(Control, IsTheSameRunWithoutTheFault) {
    const std::vector<RunResult> all{run("none", "none", 0), run("none", "qk_norm", 0), run("none", "none", 1),
                                     run("x", "none", 0),    run("x", "qk_norm", 0),    run("x", "guard", 0),
                                     run("x", "none", 1),    run("x", "none", 2)};
    EXPECT_EQ(control_of(all[3], all), &all[0]);
    EXPECT_EQ(control_of(all[4], all), &all[1]);
    EXPECT_EQ(control_of(all[5], all), &all[0]);  // no control of its own intervention
    EXPECT_EQ(control_of(all[6], all), &all[2]);
    EXPECT_EQ(control_of(all[7], all), nullptr);
    EXPECT_EQ(control_of(all[0], all), nullptr);
    EXPECT_EQ(control_of(all[1], all), &all[0]);  // what an intervention costs without a fault
}

TEST(Spread, IsLeastMedianGreatest) {
    const Spread odd = spread({3, 1, 2}), even = spread({4, 1, 2, 3, std::nan("")});
    EXPECT_EQ(odd.least, 1);
    EXPECT_EQ(odd.median, 2);
    EXPECT_EQ(odd.greatest, 3);
    EXPECT_EQ(even.median, 2.5);
    EXPECT_TRUE(std::isnan(spread({}).median));
}

TEST(Collect, SeriesAreThoseOfTheMonitoredSteps) {
    std::vector<StepSample> samples;
    for (std::int64_t step = 0; step < 100; ++step) {
        StepSample s;
        s.step = step;
        s.loss = static_cast<double>(100 - step);
        s.max_logit = step == 33 ? 50 : -2;
        if (step % 10 == 0 || step == 99) s.sigma_q = s.sigma_k = static_cast<double>(step);
        s.injected_rms = step < 50 ? 0.1 : 0;  // ended
        // 0.6 to be removed, in every second step; in half of those 0.4 of it was not found.
        if (step % 2 == 0) s.removed_fraction = step % 4 == 0 ? 0.2 : 0.6;
        s.missing_fraction = step % 4 == 0 ? 0.4 : 0;
        s.intervention_active = step >= 61;
        if (step == 99) s.validation_loss = 7;
        samples.push_back(s);
    }
    RunResult r;
    collect(samples, r);
    EXPECT_EQ(r.steps, 100);
    ASSERT_EQ(r.monitor_step.size(), 11U);
    EXPECT_EQ(r.monitor_step[4], 40);
    EXPECT_EQ(r.sigma_q[4], 40);
    EXPECT_EQ(r.max_logit[3], -2);
    EXPECT_EQ(r.max_logit[4], 50);            // since step 31
    EXPECT_EQ(r.loss[4], 64.5);               // of steps 31 to 40: losses 69 to 60
    EXPECT_EQ(r.train_loss, 25.5);            // of steps 50 to 99: losses 50 to 1
    EXPECT_NEAR(r.injected_rms, 0.1, 1e-15);  // over the steps that had a fault
    EXPECT_NEAR(r.removed_fraction, 0.4, 1e-15);
    EXPECT_NEAR(r.missing_fraction, 0.2, 1e-15);  // over the same steps: together what was to be removed
    EXPECT_EQ(r.triggered_at, 60);                // in force at 61
    EXPECT_EQ(r.validation_loss, 7);
}

}  // namespace
}  // namespace faultline
