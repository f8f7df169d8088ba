// SPDX-License-Identifier: Apache-2.0
// Training is a function of its configuration, whatever the number of threads, with and without hooks that do nothing.
#include <faultline/gpt/trainer.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <set>

#include <faultline/base/error.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/probes/spectra.hpp>

#include "quick_run.hpp"

namespace faultline::gpt {
namespace {

using quick_run::quick;
using quick_run::text;
using testing::HasSubstr;

std::vector<float> trained(const TrainConfig& c, const Hooks& hooks = {}) {
    const WindowOrder order(c.seed);
    Trainer trainer(c, text(), order, hooks);
    while (!trainer.finished()) trainer.step();
    const std::span<const float> w = trainer.model().weights();
    return {w.begin(), w.end()};
}

TEST(Trainer, LearnsTheText) {
    TrainConfig c = quick();
    c.steps = 60;
    const WindowOrder order(0);
    Trainer trainer(c, text(), order);
    const double first = trainer.step().loss;
    EXPECT_NEAR(first, std::log(256.0), 0.1);  // weights near 0: every byte is as likely
    while (!trainer.finished()) trainer.step();
    EXPECT_LT(trainer.report().loss, 3.2);
    EXPECT_LT(trainer.report().validation_loss, 3.2);
}

TEST(Trainer, DoesNotDependOnThreads) {
    for (const bool emulated : {false, true}) {
        TrainConfig c = quick();
        c.steps = emulated ? 2 : 6;
        if (emulated) c.model.attention = {{1, {1}, std::make_shared<const RoundingPlan>(plan("fa2"))}};
        const std::vector<float> one = trained(c);
        c.threads = 3;
        EXPECT_EQ(one, trained(c));
    }
}

TEST(Trainer, OptionsChangeTheRun) {
    const std::vector<float> plain = trained(quick());
    const auto differs = [&](void (*change)(TrainConfig&)) {
        TrainConfig c = quick();
        change(c);
        return trained(c) != plain;
    };
    EXPECT_TRUE(differs([](TrainConfig& c) { c.model.bf16 = false; }));
    EXPECT_TRUE(differs([](TrainConfig& c) { c.seed = 1; }));
    EXPECT_TRUE(differs([](TrainConfig& c) { c.accumulate = 2; }));
    EXPECT_TRUE(differs([](TrainConfig& c) { c.clip = 0.01; }));
    EXPECT_TRUE(differs([](TrainConfig& c) { c.model.z_loss = 0.1; }));
    EXPECT_TRUE(differs([](TrainConfig& c) { c.optimizer.kind = OptimizerKind::muon; }));
    EXPECT_TRUE(differs([](TrainConfig& c) { c.qk_clip = 1e-3; }));
    EXPECT_TRUE(differs([](TrainConfig& c) { c.model.qk_norm = QkNorm::parameter_free; }));
}

// The fast kernel and the emulated one have the same cap, and sum the score gradient at the same place. Both in fp32, so
// they differ by roundings of 2^-24 in another order: 2^-19 is 32 of them. At the start little of the gradient is that of
// the logits, so the cap changes its norm by some 2^-15 only.
TEST(Trainer, SoftcapIsThatOfThePlansKernel) {
    const auto first = [](std::vector<AttentionChoice> attention, double softcap) {
        TrainConfig c = quick();
        c.model.bf16 = false;
        c.model.softcap = softcap;
        c.model.attention = std::move(attention);
        const WindowOrder order(0);
        Trainer trainer(c, text(), order);
        return trainer.step();
    };
    const double cap = 1e-3;  // of weights at their start: logits are some 1e-3, so the slope matters
    const StepReport fast = first({}, cap), uncapped = first({}, 0);
    const StepReport emulated = first({{-1, {}, std::make_shared<const RoundingPlan>(plan("exact"))}}, cap);
    EXPECT_NEAR(emulated.loss, fast.loss, 0x1p-19 * fast.loss);
    EXPECT_NEAR(emulated.grad_norm, fast.grad_norm, 0x1p-19 * fast.grad_norm);
    ASSERT_EQ(emulated.zero_sum_abs.size(), fast.zero_sum_abs.size());
    for (std::size_t i = 0; i < fast.zero_sum_abs.size(); ++i)
        EXPECT_NEAR(emulated.zero_sum_abs[i], fast.zero_sum_abs[i], 0x1p-15 * fast.zero_sum_abs[i])
            << i;  // of differences dp - delta
    EXPECT_GT(std::fabs(fast.grad_norm - uncapped.grad_norm), 0x1p-16 * fast.grad_norm);
}

// Two micro-batches of 4 windows are the gradient of one batch of 8: in fp32, to the rounding of sums.
TEST(Trainer, AccumulationIsALargerBatch) {
    TrainConfig c = quick();
    c.model.bf16 = false;
    c.steps = 1;
    c.batch = 8;
    const std::vector<float> whole = trained(c);
    c.batch = 4;
    c.accumulate = 2;
    const std::vector<float> parts = trained(c);
    // AdamW's first step is the learning rate times g/(|g| + epsilon): what differs is where |g| is near 1e-8.
    std::size_t same = 0;
    for (std::size_t i = 0; i < whole.size(); ++i) same += std::fabs(whole[i] - parts[i]) <= 1e-5F ? 1 : 0;
    EXPECT_GT(same, whole.size() * 99 / 100);
}

// A validation is of the model that is trained: with the QK norm that a hook has turned on.
TEST(Trainer, ValidationHasTheSwitchesOfTheRun) {
    class On final : public StepHook {
      public:
        void before_step(std::int64_t step, const StepReport*, StepControl& control) override {
            for (int layer = 0; step == 0 && layer < control.layers(); ++layer) control.enable_qk_norm(layer, {});
        }
    };
    const auto validation = [](const TrainConfig& c, StepHook* hook) {
        const WindowOrder order(0);
        Trainer trainer(c, text(), order, {.step = hook});
        while (!trainer.finished()) trainer.step();
        return trainer.report().validation_loss;
    };
    TrainConfig always = quick();
    always.model.qk_norm = QkNorm::parameter_free;
    On on;
    EXPECT_EQ(validation(quick(), &on),
              validation(always, nullptr));  // the same from the first step on, without a scale
    EXPECT_NE(validation(quick(), &on), validation(quick(), nullptr));
}

TEST(Capture, InputOfALayerTimesWqIsItsQueries) {
    TrainConfig c = quick();
    c.model.bf16 = false;
    const WindowOrder order(c.seed);
    Trainer trainer(c, text(), order);
    const std::vector<float> weights(trainer.model().weights().begin(), trainer.model().weights().end());
    Trainer::Captured seen;
    trainer.capture([](std::int64_t step) { return step == 0; },
                    [&](std::int64_t, int, const Trainer::Captured& layers) { seen = layers; });
    trainer.step();
    ASSERT_EQ(seen.size(), 2U);
    const auto width = static_cast<std::size_t>(c.model.width);
    const std::size_t tokens = static_cast<std::size_t>(c.batch) * static_cast<std::size_t>(c.model.context);
    for (std::size_t l = 0; l < 2; ++l) {
        const MatrixView<const float> w =
            trainer.model().layout().at("layer" + std::to_string(l) + ".w_q").of(std::span<const float>(weights));
        ASSERT_EQ(seen[l].x.size(), tokens * width);
        for (std::size_t t = 0; t < tokens; ++t)
            for (std::size_t j = 0; j < width; ++j) {
                float q = 0;  // a product of ours is one chain of fused multiply-adds over ascending k
                for (std::size_t k = 0; k < width; ++k)
                    q = std::fma(seen[l].x[t * width + k],
                                 w(static_cast<std::ptrdiff_t>(k), static_cast<std::ptrdiff_t>(j)), q);
                ASSERT_EQ(q, seen[l].q[t * width + j]) << "layer " << l << ", token " << t << ", column " << j;
            }
    }
}

/// Puts one value where it says, at step 3.
class Poison final : public ModelHook {
  public:
    explicit Poison(ModelSite site) : site_(site) {}
    [[nodiscard]] bool watches(ModelSite site, int layer) const override { return site == site_ && layer == 1; }
    void at(ModelSite, const ModelAt& where, MatrixView<float> value,
            std::span<const MatrixView<const float>>) override {
        if (where.step == 3 && (where.row0 > 0 || site_ == ModelSite::optimizer_update))
            value(value.rows - 1, 2) = std::nanf("");
    }

  private:
    ModelSite site_;
};

TEST(NonFinite, StopsBeforeTheStepAndNamesTheSite) {
    const std::pair<ModelSite, const char*> cases[] = {
        {ModelSite::ffn_output, "layer1.ffn output"},
        {ModelSite::attention_projection, "layer1.attention projection"},
        {ModelSite::ffn_activation_gradient, "layer1.gradient of the ffn activation"},
        {ModelSite::optimizer_update, "update of layer1.norm1.gain"}};
    TrainConfig three = quick();
    three.steps = 3;
    const std::vector<float> before = trained(three);
    for (const auto& [site, wanted] : cases) {
        SCOPED_TRACE(wanted);
        Poison poison(site);
        const WindowOrder order(0);
        Trainer trainer(quick(), text(), order, {.model = &poison});
        while (!trainer.finished()) trainer.step();
        ASSERT_TRUE(trainer.failure());
        EXPECT_EQ(trainer.failure()->step, 3);
        EXPECT_EQ(trainer.failure()->site, wanted);
        EXPECT_EQ(trainer.failure()->column, 2);
        EXPECT_EQ(trainer.next_step(), 3);
        EXPECT_TRUE(std::ranges::equal(trainer.model().weights(), before));
    }
}

/// Looks at everything and changes nothing.
class Watcher final : public ModelHook, public UpdateHook {
  public:
    std::set<std::string> updates;
    std::atomic<int> seen[model_site_count]{};
    [[nodiscard]] bool watches(ModelSite, int) const override { return true; }
    void at(ModelSite site, const ModelAt&, MatrixView<float>, std::span<const MatrixView<const float>>) override {
        ++seen[static_cast<std::size_t>(site)];
    }
    void before_apply(std::int64_t, std::span<const ParameterUpdate> all) override {
        for (const ParameterUpdate& u : all) updates.insert(std::string(u.name));
    }
};

TEST(Hooks, ThatOnlyLookChangeNothing) {
    Watcher watcher;
    TrainConfig c = quick();
    EXPECT_EQ(trained(c, {.model = &watcher, .update = &watcher}), trained(c));
    for (const ModelSiteInfo& site : model_sites())
        EXPECT_GT(watcher.seen[static_cast<std::size_t>(site.site)], 0) << site.name;
    EXPECT_TRUE(watcher.updates.contains("layer1.w_q"));
    EXPECT_TRUE(watcher.updates.contains("wte"));
}

TEST(Monitors, SingularValuesOfKnownMatrices) {
    const std::vector<float> diagonal{3, 0, 0, 0, -5, 0};
    const MatrixView<const float> w(diagonal.data(), 2, 3);
    const std::vector<double> values = singular_values(w, 3);
    EXPECT_NEAR(values[0], 5, 1e-14);
    EXPECT_NEAR(values[1], 3, 1e-14);
    EXPECT_EQ(values[2], 0);
    // diag(3, -5) times diag(2, 1): 6 and 5.
    const std::vector<float> a{3, 0, 0, -5, 0, 0}, b{2, 0, 0, 1, 0, 0};
    const std::vector<double> product = product_singular_values({a.data(), 3, 2}, {b.data(), 3, 2}, 3);
    EXPECT_NEAR(product[0], 6, 1e-13);
    EXPECT_NEAR(product[1], 5, 1e-13);
    const std::vector<float> bad{1, std::nanf("")};
    EXPECT_TRUE(std::isnan(singular_values({bad.data(), 1, 2}, 1)[0]));
}

TEST(Trainer, RefusesWhatMakesNoModel) {
    const WindowOrder order(0);
    const auto refusal = [&](void (*change)(TrainConfig&)) -> std::string {
        TrainConfig c = quick();
        change(c);
        try {
            const Trainer trainer(c, text(), order);
        } catch (const RequestError& error) {
            return error.what();
        }
        return "";
    };
    EXPECT_THAT(refusal([](TrainConfig& c) { c.model.heads = 3; }), HasSubstr("heads: 3: expected a divisor"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.model.context = 1 << 20; }),
                HasSubstr("expected more than the context"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.model.vocabulary = 100; }), HasSubstr("vocabulary of 100"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.batch = 0; }), HasSubstr("batch"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.model.softcap = 1e31; }), HasSubstr("softcap: 1e+31: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.optimizer.beta1 = 1.5; }), HasSubstr("beta1: 1.5: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.optimizer.beta2 = 1; }), HasSubstr("beta2: 1: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.optimizer.momentum = -0.1; }), HasSubstr("momentum: -0.1: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.optimizer.epsilon = 0; }), HasSubstr("epsilon: 0: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.optimizer.weight_decay = std::nan(""); }), HasSubstr("weight-decay"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.clip = -1; }),
                HasSubstr("clip: -1: expected 0, or a number that fp32 has"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.schedule.final_rate = -1; }), HasSubstr("final-lr"));
    // What is 0, infinite or 1 in fp32, in which a step computes.
    EXPECT_THAT(refusal([](TrainConfig& c) { c.schedule.learning_rate = 1e-300; }), HasSubstr("lr: 1e-300: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.schedule.learning_rate = 1e300; }), HasSubstr("lr: 1e+300: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.schedule.final_rate = 1e-40; }), HasSubstr("final-lr: 1e-40: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.clip = 1e-300; }), HasSubstr("clip: 1e-300: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.qk_clip = 1e300; }), HasSubstr("qk-clip: 1e+300: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.optimizer.epsilon = 1e300; }), HasSubstr("epsilon: 1e+300: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.optimizer.epsilon = 1e-300; }), HasSubstr("epsilon: 1e-300: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.optimizer.weight_decay = 1e300; }), HasSubstr("weight-decay: 1e+300"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.optimizer.beta2 = 1 - 1e-12; }),
                HasSubstr("beta2: 0.999999999999: exp"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.model.z_loss = 1e300; }), HasSubstr("z-loss: 1e+300: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.model.softcap = 1e-30; }), HasSubstr("softcap: 1e-30: expected"));
    EXPECT_THAT(refusal([](TrainConfig& c) { c.model.softcap = 1e6; }), HasSubstr("softcap: 1000000: expected"));
    EXPECT_EQ(refusal([](TrainConfig& c) {
                  c.schedule.learning_rate = 1e-37;
                  c.clip = 1e38;
                  c.optimizer.epsilon = 1e-30;
                  c.model.softcap = 1e4;
              }),
              "");
    EXPECT_THAT(refusal([](TrainConfig& c) { c.model.attention = {{7, {}, nullptr}}; }), HasSubstr("layer 7"));
}

}  // namespace
}  // namespace faultline::gpt
