// SPDX-License-Identifier: Apache-2.0
// An intervention and faults driven as a trainer drives them, without a trainer.
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include <Eigen/SVD>

#include <faultline/dissociation/channel.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

constexpr int layers = 2, heads = 2, width = 16;

/// What was asked of the trainer.
struct Control final : gpt::StepControl {
    std::map<int, std::vector<double>> normed;
    double rate = 1, clip = 1, tau = 0;
    int resets = 0;
    bool fp32 = false;
    int layers() const override { return 2; }
    int heads() const override { return 2; }
    int head_dim() const override { return 16; }
    void enable_qk_norm(int layer, std::span<const double> scale) override {
        normed[layer].assign(scale.begin(), scale.end());
    }
    bool qk_norm_enabled(int layer) const override { return normed.contains(layer); }
    void reset_optimizer() override { ++resets; }
    void set_learning_rate_factor(double factor) override { rate = factor; }
    void set_clip_factor(double factor) override { clip = factor; }
    void set_fp32_ffn(bool on) override { fp32 = on; }
    void set_qk_clip(double t) override { tau = t; }
    MatrixView<const float> weight(std::string_view) const override { throw std::out_of_range(""); }
};

gpt::StepReport report(std::int64_t step, double max_logit) {
    gpt::StepReport r;
    r.step = step;
    r.layers = layers;
    r.heads = heads;
    r.max_logit = {1, max_logit, 2, std::numeric_limits<double>::quiet_NaN()};
    r.qk_rms = {1, 2, 3, 4};
    r.sigma_q = {std::numeric_limits<double>::quiet_NaN(), 1};
    return r;
}

const std::vector<double>& extra(const gpt::StepReport& r, const std::string& name) {
    for (const auto& e : r.extras)
        if (e.name == name) return e.values;
    throw std::runtime_error("no extra " + name);
}

/// Steps with the given largest logits, the way the trainer calls: before, after.
void drive(Channel& channel, Control& control, const std::vector<double>& logits, std::int64_t first = 0) {
    for (std::size_t i = 0; i < logits.size(); ++i) {
        channel.before_step(first + static_cast<std::int64_t>(i), nullptr, control);
        gpt::StepReport r = report(first + static_cast<std::int64_t>(i), logits[i]);
        channel.after_step(r);
    }
}

TEST(Guard, LatchesAtTheFirstCrossingAndNeverAgain) {
    Channel channel(parse_intervention("guard:threshold=50"), layers, heads, 0, nullptr);
    Control control;
    drive(channel, control, {10, 49, 50});  // 50 is not above 50
    EXPECT_EQ(channel.triggered_at(), -1);
    drive(channel, control, {60}, 3);
    EXPECT_EQ(channel.triggered_at(), 3);
    EXPECT_TRUE(control.normed.empty());  // in force from the next step
    drive(channel, control, {10}, 4);
    // Continuous at the switch: scale = rms(q) rms(k) / sqrt(head_dim), head_dim 16.
    EXPECT_EQ(control.normed[0], (std::vector<double>{0.25, 0.5}));
    EXPECT_EQ(control.normed[1], (std::vector<double>{0.75, 1.0}));
    control.normed.clear();
    drive(channel, control, {100, 5, 100}, 5);
    EXPECT_TRUE(control.normed.empty());
    EXPECT_EQ(channel.triggered_at(), 3);
}

TEST(Guard, PlacebosActAtTheSameTrigger) {
    const auto acted = [](const std::string& word) {
        Channel channel(parse_intervention(word), layers, heads, 0, nullptr);
        Control control;
        drive(channel, control, {160, 60, 60});
        return control;
    };
    EXPECT_EQ(acted("guard:action=lower_rate").rate, 0.1);
    EXPECT_EQ(acted("guard:action=tighter_clip:factor=0.5").clip, 0.5);
    EXPECT_EQ(acted("guard:action=reset_optimizer").resets, 1);
    EXPECT_TRUE(acted("guard:action=fp32_ffn").fp32);
    EXPECT_EQ(acted("guard:action=qk_clip:tau=40").tau, 40.0);
    EXPECT_TRUE(acted("guard:scale=unit").normed.at(0).empty());
    for (const char* word : {"guard:action=lower_rate", "guard:action=reset_optimizer"})
        EXPECT_TRUE(acted(word).normed.empty());
    EXPECT_EQ(acted("qk_clip:tau=30").tau, 30.0);
    const Control nothing = acted("none");
    EXPECT_EQ(nothing.rate, 1.0);
    EXPECT_EQ(nothing.resets, 0);
}

// NaN means "not due" and is no crossing.
TEST(Guard, WatchesWhatItIsTold) {
    Channel channel(parse_intervention("guard:monitor=sigma_q:threshold=5"), layers, heads, 0, nullptr);
    Control control;
    drive(channel, control, {1e6, 1e6});
    EXPECT_EQ(channel.triggered_at(), -1);
    gpt::StepReport r = report(2, 0);
    r.sigma_q = {6, std::numeric_limits<double>::quiet_NaN()};
    channel.after_step(r);
    EXPECT_EQ(channel.triggered_at(), 2);
}

TEST(Guard, GoesOnAfterACheckpointBetweenTriggerAndAction) {
    const Intervention guard = parse_intervention("guard");
    Channel first(guard, layers, heads, 0, nullptr), second(guard, layers, heads, 0, nullptr);
    Control control;
    drive(first, control, {160});
    second.load(first.save());
    drive(second, control, {1}, 1);
    EXPECT_EQ(second.triggered_at(), 0);
    EXPECT_EQ(control.normed[1], (std::vector<double>{0.75, 1.0}));
}

/// Weights and updates of a toy model.
struct Weights {
    std::vector<float> q, k, v, dq, dk, dv;
    explicit Weights(std::uint64_t seed) {
        const RandomStream stream(seed);
        std::uint64_t n = 0;
        for (auto* x : {&q, &k, &v, &dq, &dk, &dv})
            for (int i = 0; i < width * width; ++i) x->push_back(static_cast<float>(stream.normal(n++)));
    }
    static MatrixView<float> view(std::vector<float>& x) { return {x.data(), width, width}; }
    std::vector<gpt::ParameterUpdate> updates(int layer) {
        return {{"w_q", layer, gpt::Role::w_q, view(q), view(dq)},
                {"w_k", layer, gpt::Role::w_k, view(k), view(dk)},
                {"w_v", layer, gpt::Role::w_v, view(v), view(dv)}};
    }
};

TEST(Channel, ProjectsQueriesAndKeysAndNothingElse) {
    Channel channel(parse_intervention("project"), layers, heads, 0, nullptr);
    Weights w(1);
    const Weights before = w;
    channel.before_apply(0, w.updates(1));
    EXPECT_EQ(w.dv, before.dv);
    for (auto [weight, update] : {std::pair{&w.q, &w.dq}, {&w.k, &w.dk}}) {
        const Eigen::JacobiSVD<Eigen::MatrixXd> svd(to_eigen(Weights::view(*weight)),
                                                    Eigen::ComputeThinU | Eigen::ComputeThinV);
        const Eigen::MatrixXd d = to_eigen(Weights::view(*update));
        // Directions to 1e-6 of sigma_1 over the gap, updates of norm 16 stored as floats.
        EXPECT_LT((svd.matrixU().leftCols(3).transpose() * d * svd.matrixV().leftCols(3)).norm(), 1e-3);
    }
    gpt::StepReport r = report(0, 1);
    channel.after_step(r);
    EXPECT_EQ(extra(r, "removed_fraction")[0], 0.0);
    EXPECT_GT(extra(r, "removed_fraction")[1], 0.0);
    EXPECT_NEAR(extra(r, "removed_fraction")[1], extra(r, "leading_fraction")[1], 1e-12);  // Pythagoras, in binary64
    double squares = 0;
    for (std::size_t i = 0; i < w.dq.size(); ++i)
        for (const float x : {before.dq[i] - w.dq[i], before.dk[i] - w.dk[i]}) squares += static_cast<double>(x) * x;
    EXPECT_NEAR(extra(r, "removed_energy")[1], squares, 1e-4 * squares);  // differences of floats
    // The next step begins from nothing.
    gpt::StepReport next = report(1, 1);
    channel.after_step(next);
    EXPECT_EQ(extra(next, "removed_energy")[1], 0.0);
}

// A step that is given up may have begun to follow directions: the state of before is one without any.
TEST(Channel, TakesBackTheFirstStepsDirections) {
    Channel channel(parse_intervention("project"), layers, heads, 7, nullptr);
    const std::string before = channel.save();
    Weights w(1);
    channel.before_apply(0, w.updates(0));
    EXPECT_NE(channel.save(), before);
    channel.load(before);
    EXPECT_EQ(channel.save(), before);
}

TEST(Channel, ResumesBitForBit) {
    for (const char* word : {"project", "project:removal=elsewhere"}) {
        Channel a(parse_intervention(word), layers, heads, 7, nullptr),
            b(parse_intervention(word), layers, heads, 7, nullptr);
        Weights first(1), second(2);
        a.before_apply(0, first.updates(0));
        gpt::StepReport r = report(0, 1);
        a.after_step(r);
        b.load(a.save());
        Weights again(2);
        a.before_apply(1, second.updates(0));
        b.before_apply(1, again.updates(0));
        EXPECT_EQ(second.dq, again.dq) << word;
        EXPECT_EQ(second.dk, again.dk) << word;
    }
}

TEST(Channel, RepairEndsTheFault) {
    const RoundingPlan plan;
    FaultHooks faults({parse_fault("delta:multiplicative:0.1"), parse_fault("ffn_output:fixed:0.1:layers=1")}, layers,
                      heads, [&](int, int) { return &plan; });
    Channel channel(parse_intervention("repair:from=2"), layers, heads, 0, &faults);
    Control control;
    EXPECT_TRUE(faults.watches(0, 0, Site::delta));
    EXPECT_FALSE(faults.watches(0, 0, Site::lse));
    EXPECT_TRUE(faults.watches(ModelSite::ffn_output, 1));
    EXPECT_FALSE(faults.watches(ModelSite::ffn_output, 0));
    drive(channel, control, {1, 1});
    EXPECT_TRUE(faults.watches(0, 0, Site::delta));
    drive(channel, control, {1}, 2);
    EXPECT_FALSE(faults.watches(2, 0, Site::delta));
    EXPECT_FALSE(faults.watches(ModelSite::ffn_output, 1));
    EXPECT_EQ(faults.instrument({.step = 2}), nullptr);
}

TEST(FaultHooks, ReportWhatEachHeadGot) {
    const RoundingPlan plan;
    FaultHooks faults({parse_fault("delta:per_head:0.1")}, layers, heads, [&](int, int) { return &plan; });
    for (std::int64_t step = 0; step < 3; ++step) {
        for (int head = 0; head < heads; ++head)
            for (int sequence = 0; sequence < 2; ++sequence) {
                std::vector<double> delta{1, 2, 3}, exact = delta;
                const auto instrument =
                    faults.instrument({.step = step, .layer = 1, .head = head, .sequence = sequence});
                ASSERT_NE(instrument, nullptr);
                instrument->at(Site::delta, {}, {delta.data(), 3, 1}, {exact.data(), 3, 1});
                EXPECT_NE(delta, exact);
            }
        gpt::StepReport r = report(step, 1);
        faults.report(r);
        const std::vector<double>& rms = extra(r, "injected_rms");
        EXPECT_EQ(rms[0], 0.0);
        EXPECT_NEAR(rms[2], 0.1, 1e-12);
        EXPECT_NEAR(rms[3], 0.1, 1e-12);
        EXPECT_NEAR(extra(r, "injected_mean")[2], -extra(r, "injected_mean")[3], 1e-12);
        EXPECT_NEAR(extra(r, "injected_sign_coherence")[2], 1.0, 1e-12);
        EXPECT_EQ(extra(r, "injected_step_coherence")[3], 1.0);
        EXPECT_TRUE(std::isnan(extra(r, "injected_step_coherence")[0])) << "layer 0 got nothing";
    }
}

// A fault that begins late and ends keeps its coherence, over a checkpoint too.
TEST(FaultHooks, CoherenceIsOverTheStepsWithAnError) {
    const RoundingPlan plan;
    const auto make = [&] {
        return FaultHooks({parse_fault("delta:fixed:0.1:from=3:until=6")}, 1, 1, [&](int, int) { return &plan; });
    };
    const auto step_of = [](FaultHooks& faults, std::int64_t step) {
        std::vector<double> delta{1, 2, 3}, exact = delta;
        if (const auto instrument = faults.instrument({.step = step}))
            instrument->at(Site::delta, {}, {delta.data(), 3, 1}, {exact.data(), 3, 1});
        return faults.take_step().step_coherence[0];
    };
    FaultHooks faults = make();
    for (std::int64_t step = 0; step < 10; ++step) {
        if (step == 5) {  // resumed
            FaultHooks resumed = make();
            resumed.load(faults.save());
            EXPECT_EQ(step_of(resumed, step), 1.0);
        }
        const double coherence = step_of(faults, step);
        if (step < 3)
            EXPECT_TRUE(std::isnan(coherence)) << step;
        else
            EXPECT_EQ(coherence, 1.0) << step;
    }
}

}  // namespace
}  // namespace faultline
