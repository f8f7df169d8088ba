// SPDX-License-Identifier: Apache-2.0
// Options of the model and what a step hook may do on the device, against the CPU, on a card.
#include <faultline/base/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "../../kernels/tensor_kernel/on_hopper.hpp"
#include "../../lib/tensor/support.hpp"
#include "small_runs.hpp"

namespace faultline::gpt {
namespace {

using test::Folder;
using testing::HasSubstr;

std::vector<Named> options() {
    std::vector<Named> all;
    const auto add = [&](const char* name, auto change) {
        TrainConfig c = small();
        change(c);
        all.push_back({name, c});
    };
    add("QK norm, parameter-free", [](TrainConfig& c) { c.model.qk_norm = QkNorm::parameter_free; });
    add("QK norm, learned", [](TrainConfig& c) { c.model.qk_norm = QkNorm::learned; });
    add("QK norm, learned, heads of 96, 100 tokens", [](TrainConfig& c) {
        c.model.qk_norm = QkNorm::learned;
        c.model.width = 384;
        c.model.heads = 4;
        c.model.context = 300;
        c.batch = 3;
    });
    add("QK norm, learned, heads of 8", [](TrainConfig& c) {
        c.model.qk_norm = QkNorm::learned;
        c.model.heads = 8;
    });
    add("softcap", [](TrainConfig& c) { c.model.softcap = 3; });
    add("output gate", [](TrainConfig& c) { c.model.output_gate = true; });
    add("output gate, biases, QK norm, two micro-batches", [](TrainConfig& c) {
        c.model.output_gate = true;
        c.model.bias = true;
        c.model.qk_norm = QkNorm::learned;
        c.accumulate = 2;
    });
    return all;
}

/// As DeviceTrainer.GradientsInFp32AreAsNearToBinary64AsTheCpus.
TEST(DeviceOptions, GradientsInFp32AreAsNearToBinary64AsTheCpus) {
    NEEDS_HOPPER();
    for (const Named& named : options()) {
        SCOPED_TRACE(named);
        const std::vector<float> weights = spread(named.config);
        const std::vector<double> exact = cpu_gradient<double>(named.config, weights);
        const std::vector<double> cpu = cpu_gradient<float>(named.config, weights);
        const std::vector<double> device = device_gradient(named.config, weights);
        double most = 0;
        const ParameterLayout layout(named.config.model);
        for (const Parameter& p : layout.all()) {
            const double of_cpu = distance(p, cpu, exact), of_device = distance(p, device, exact);
            EXPECT_LE(of_device, 4 * std::max(of_cpu, 0x1p-24)) << p.name;
            most = std::max(most, of_device / std::max(of_cpu, 0x1p-24));
        }
        std::printf("%-50s gradients at most %.2f times the cpu's error\n", named.name, most);
    }
}

/// As DeviceTrainer.GradientsInBf16DifferFromTheCpusByLessThanBf16Costs.
TEST(DeviceOptions, GradientsInBf16DifferFromTheCpusByLessThanBf16Costs) {
    NEEDS_HOPPER();
    std::vector<Named> all = options();
    for (Named& named : all) named.config.model.bf16 = true;
    TrainConfig c = small();
    c.model = {.layers = 2, .width = 128, .heads = 2, .context = 200, .vocabulary = 256, .qk_norm = QkNorm::learned};
    all.push_back({"QK norm, learned, tensor cores", with_tensor_kernel(c)});
    c.model.qk_norm = QkNorm::none;
    c.model.output_gate = true;
    all.push_back({"output gate, tensor cores", with_tensor_kernel(c)});
    for (const auto& [name, where] : {std::pair{"norm statistics in bf16", NormStatistics::bf16},
                                      {"norm statistics in bf16 in the forward", NormStatistics::bf16_forward},
                                      {"norm statistics in bf16 in the backward", NormStatistics::bf16_backward}}) {
        TrainConfig rounded = small();
        rounded.model.bf16 = true;
        rounded.model.norm_statistics = where;
        all.push_back({name, rounded});
    }
    for (const Named& named : all) {
        SCOPED_TRACE(named);
        TrainConfig without_casts = named.config;
        without_casts.model.bf16 = false;
        without_casts.model.attention.clear();
        without_casts.model.norm_statistics = NormStatistics::fp32;
        const std::vector<float> weights = spread(named.config);
        const std::vector<double> exact = cpu_gradient<double>(without_casts, weights);
        const std::vector<double> cpu = cpu_gradient<float>(named.config, weights);
        const std::vector<double> device = device_gradient(named.config, weights);
        double most = 0;
        const ParameterLayout layout(named.config.model);
        for (const Parameter& p : layout.all()) {
            const double cost = distance(p, cpu, exact), gap = distance(p, device, cpu);
            EXPECT_LE(gap, cost) << p.name;
            most = std::max(most, gap / cost);
        }
        std::printf("%-50s gradients at most %.2f of what bf16 costs off the cpu's\n", named.name, most);
    }
}

/// Does everything that a hook may, at one step or another.
class Switches final : public StepHook {
  public:
    void before_step(std::int64_t step, const StepReport* last, StepControl& control) override {
        if (step == 2) {
            ASSERT_NE(last, nullptr);
            std::vector<double> scale;  // of the layer's heads, each its own
            for (int h = 0; h < control.heads(); ++h)
                scale.push_back(last->qk_rms[static_cast<std::size_t>(control.heads() + h)] /
                                std::sqrt(static_cast<double>(control.head_dim())));
            control.enable_qk_norm(1, scale);
        }
        if (step == 4) control.set_learning_rate_factor(0.5);
        if (step == 5) control.set_clip_factor(0.1);
        if (step == 6) control.reset_optimizer();
        if (step == 7) control.enable_qk_norm(0, {});
        if (step == 8) control.set_qk_clip(0.02);
        if (step == 9) first_weight = control.weight("layer1.w_k")(3, 5);
        state += static_cast<char>('a' + step);
    }
    void after_step(StepReport& report) override { report.extras = {{"twice", {2 * report.loss}}}; }
    [[nodiscard]] std::string save() const override { return state; }
    void load(std::string_view from) override { state = from; }
    std::string state;
    float first_weight = 0;
};

TrainConfig twelve_steps() {
    TrainConfig c = small();
    c.steps = 12;
    c.schedule.warmup = 3;
    return c;
}

/// Losses as near as LossesOf100StepsInFp32AreTheCpus asks for.
TEST(DeviceOptions, AStepHookDoesWhatItDoesOnTheCpu) {
    NEEDS_HOPPER();
    const TrainConfig c = twelve_steps();
    const WindowOrder order(c.seed);
    Switches of_cpu, of_device;
    Trainer cpu(c, text(), order, {.step = &of_cpu});
    DeviceTrainer device(c, text(), order, {}, {.step = &of_device});
    while (!cpu.finished()) {
        const StepReport a = cpu.step(), b = device.step();
        SCOPED_TRACE(a.step);
        ASSERT_FALSE(device.failure());
        EXPECT_NEAR(b.loss, a.loss, 1e-5);
        EXPECT_NEAR(b.grad_norm, a.grad_norm, 1e-4 * a.grad_norm);
        EXPECT_EQ(b.learning_rate, a.learning_rate);
        EXPECT_EQ(b.qk_normed, a.qk_normed);
        ASSERT_EQ(b.extras.size(), 1U);
        for (std::size_t i = 0; i < a.max_logit.size(); ++i) {
            EXPECT_NEAR(b.max_logit[i], a.max_logit[i], 1e-3 * std::abs(a.max_logit[i])) << i;
            EXPECT_NEAR(b.qk_rms[i], a.qk_rms[i], 1e-3 * a.qk_rms[i]) << i;
        }
    }
    EXPECT_EQ(of_device.state, of_cpu.state);
    EXPECT_NEAR(of_device.first_weight, of_cpu.first_weight, 1e-4);
    EXPECT_NEAR(device.validation_loss(), cpu.validation_loss(), 1e-5);
}

/// On the tensor cores a switched layer is launched head by head, each with its own scale; bf16 loses what it loses: the
/// device's numbers are off the CPU's by no more than the CPU's own are off its fp32 run's, four times over.
TEST(DeviceOptions, TheSwitchWorksOnTheTensorCores) {
    NEEDS_HOPPER();
    TrainConfig c = twelve_steps();
    c.model = {.layers = 2, .width = 128, .heads = 2, .context = 136, .vocabulary = 256, .bf16 = false};
    c.monitor_every = 1;
    const TrainConfig on_tensor_cores = with_tensor_kernel(c);
    const WindowOrder order(c.seed);
    Switches first, second, third;
    Trainer fp32(c, text(), order, {.step = &first}), cpu(on_tensor_cores, text(), order, {.step = &second});
    DeviceTrainer device(on_tensor_cores, text(), order, {}, {.step = &third});
    struct Apart {
        double cost = 0, gap = 0;
        void add(double exact, double of_cpu, double of_device) {
            cost = std::max(cost, std::abs(exact - of_cpu));
            gap = std::max(gap, std::abs(of_cpu - of_device));
        }
    } loss, logit, entropy;
    while (!cpu.finished()) {
        const StepReport a = fp32.step(), b = cpu.step(), d = device.step();
        loss.add(a.loss, b.loss, d.loss);
        for (std::size_t i = 0; i < a.max_logit.size(); ++i) {
            logit.add(a.max_logit[i], b.max_logit[i], d.max_logit[i]);
            entropy.add(a.entropy[i], b.entropy[i], d.entropy[i]);
        }
    }
    for (const auto& [name, of] : {std::pair{"loss", loss}, {"max_logit", logit}, {"entropy", entropy}}) {
        std::printf("switched on the tensor cores: %s %.1e off the cpu's, which is %.1e off fp32\n", name, of.gap,
                    of.cost);
        EXPECT_LE(of.gap, 4 * of.cost) << name;
    }
}

TEST(DeviceOptions, AHookedRunGoesOnFromItsCheckpointBitForBit) {
    NEEDS_HOPPER();
    const TrainConfig c = twelve_steps();
    const WindowOrder order(c.seed);
    for (const int at : {1, 3, 9}) {
        SCOPED_TRACE(at);
        const Folder folder;
        const std::string path = (folder.path() / "half.safetensors").string();
        Switches of_whole, of_first, of_second;
        DeviceTrainer whole(c, text(), order, {}, {.step = &of_whole}),
            first(c, text(), order, {}, {.step = &of_first}), second(c, text(), order, {}, {.step = &of_second});
        while (!whole.finished()) whole.step();
        for (int i = 0; i < at; ++i) first.step();
        first.save(path);
        second.restore(path);
        while (!second.finished()) second.step();
        EXPECT_EQ(second.weights(), whole.weights());
        EXPECT_EQ(second.report().zero_sum_total, whole.report().zero_sum_total);
        EXPECT_EQ(of_second.state, of_whole.state);
    }
}

TEST(DeviceOptions, QkClipIsTheCpus) {
    NEEDS_HOPPER();
    for (const bool bf16 : {false, true}) {
        TrainConfig c = twelve_steps();
        c.steps = 3;
        c.model.bf16 = bf16;
        c.model.output_gate = bf16;  // rows of another length
        c.qk_clip = 0.01;            // at the start logits reach some hundredths
        const WindowOrder order(c.seed);
        Trainer cpu(c, text(), order);
        DeviceTrainer device(c, text(), order);
        while (!cpu.finished()) {
            cpu.step();
            device.step();
        }
        const std::vector<float> weights = device.weights();
        TrainConfig unclipped = c;
        unclipped.qk_clip = 0;
        Trainer other(unclipped, text(), order);
        while (!other.finished()) other.step();
        const auto doubles = [](auto from) { return std::vector<double>(from.begin(), from.end()); };
        const std::vector<double> mine = doubles(weights), his = doubles(cpu.model().weights()),
                                  without = doubles(other.model().weights());
        const ParameterLayout layout(c.model);
        for (const Parameter& p : layout.all()) {
            if (p.role != Role::w_q && p.role != Role::w_k) continue;
            EXPECT_GT(distance(p, without, his), 0.05) << p.name;  // it does something
            EXPECT_LE(distance(p, mine, his), bf16 ? 0.02 : 1e-3) << p.name;
        }
    }
}

TEST(DeviceOptions, RefusesWhatItHasNot) {
    NEEDS_HOPPER();
    class WantsFp32 final : public StepHook {
        void before_step(std::int64_t, const StepReport*, StepControl& control) override { control.set_fp32_ffn(true); }
    } hook;
    const TrainConfig c = twelve_steps();
    const WindowOrder order(c.seed);
    DeviceTrainer trainer(c, text(), order, {}, {.step = &hook});
    try {
        trainer.step();
        FAIL();
    } catch (const RequestError& e) {
        EXPECT_THAT(e.what(), HasSubstr("fp32-ffn"));
    }
}

}  // namespace
}  // namespace faultline::gpt
