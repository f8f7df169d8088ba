// SPDX-License-Identifier: Apache-2.0
// Faults of the device's trainer against the CPU's: gradients, and what is recorded; on a card.
#include <faultline/gpt_device/device_trainer.hpp>

#include <gtest/gtest.h>

#include <cmath>

#include <faultline/gpt/trainer.hpp>
#include <faultline/tensor_kernel/backward_kernel.hpp>

#include "../../kernels/tensor_kernel/on_hopper.hpp"
#include "planted_runs.hpp"
#include "small_runs.hpp"

namespace faultline::gpt {
namespace {

struct Seen {
    std::vector<double> gradient;
    double loss = 0;
    FaultHooks::Step injected;
};

template <class T>
Seen on_cpu(const TrainConfig& c, const std::vector<std::string>& words) {
    Faults faults(c, words);
    Gpt<T> model(c.model, 0);
    const std::vector<float> weights = spread(c);
    std::copy(weights.begin(), weights.end(), model.weights().begin());
    model.prepare();
    model.clear_gradient();
    const WindowOrder order(c.seed);
    BatchStatistics statistics(static_cast<std::size_t>(c.model.layers * c.model.heads));
    double sum = 0;
    for (int m = 0; m < c.accumulate; ++m) {
        const Windows windows = training_windows(c, text(), order, 0, m);
        StepContext context;
        context.micro_step = m;
        context.attention = faults.on_cpu().attention;
        context.model = faults.on_cpu().model;
        context.loss_weight = 1.0 / c.tokens_of_step();
        sum += model.accumulate(context, {windows.tokens, windows.targets, c.batch, c.model.context}, statistics);
    }
    model.finish_gradient();
    return {{model.gradient().begin(), model.gradient().end()}, sum / c.tokens_of_step(), faults.hooks.take_step()};
}

Seen on_device(const TrainConfig& c, const std::vector<std::string>& words) {
    Faults faults(c, words);
    const WindowOrder order(c.seed);
    DeviceTrainer trainer(c, text(), order, {.faults = &faults.hooks});
    trainer.set_weights(spread(c));
    trainer.step();
    EXPECT_FALSE(trainer.failure());
    const std::vector<float> g = trainer.gradient();
    return {{g.begin(), g.end()}, trainer.report().loss, faults.hooks.take_step()};
}

/// Faults at every site that the device has, with every law between them; sizes that a training run has.
std::vector<std::vector<std::string>> planted(const std::string& held) {
    std::vector<std::vector<std::string>> all;
    const char* laws[] = {"fixed:2%",       "per_head:2%", "per_column:2%",       "random:2%",
                          "random_step:2%", "flip@2:2%",   "multiplicative:0.02", "fixed:0.02:shape=value"};
    int n = 0;
    for (const char* site : {"row_max", "row_sum", "p_cast", "pv_accumulate", "lse", "o_cast", "delta", "bwd_p_cast",
                             "dp_accumulate", "ds", "ds_cast", "dq_cast", "dk_cast", "dv_cast"})
        for (int k = 0; k < 2; ++k, ++n) all.push_back({std::string(site) + ":" + laws[n % 8]});
    for (const char* site : {"layer_norm_statistics", "attention_projection", "ffn_output", "residual_add", "logits",
                             "ffn_output_gradient", "ffn_activation_gradient"})
        for (int k = 0; k < 2; ++k, ++n) {
            const bool floats = std::string(site) == "layer_norm_statistics" || std::string(site) == "residual_add";
            all.push_back({std::string(site) + ":" + laws[n % 8] + (floats ? "" : held)});
        }
    all.push_back({"layer_norm_statistics:fixed:1%:column=1:layers=1"});
    all.push_back({"ffn_output:fixed:1%:column=3" + held});
    all.push_back({"ffn_output:random_step:2%:heads=1" + held});
    if (held.empty())  // hold=exact at p is no bf16
        all.push_back({"delta:multiplicative:0.1:heads=1:layers=0", "ds:fixed:1%", "ds:random:1%:seed=4",
                       "ds_cast:flip@2:1%", "dp_accumulate:multiplicative:-0.02", "lse:fixed:0.1%:hold=nearest",
                       "p_cast:random:1%:hold=exact", "p_cast:fixed:-1%", "dk_cast:random:1%",
                       "logits:random:1%" + held});
    return all;
}

/// Rounding in another order sets the two apart as it does without a fault: the device is within 4 times the CPU's distance
/// from the gradient in double, or 4 units of fp32 (device_trainer_test.cpp), so the two are within 5 of each other. What is
/// recorded are sums over values that agree so; a chain of 256 roundings is the longest, 2^-16 of the rms.
TEST(DeviceFaults, GradientsAndRecordsInFp32AreTheCpus) {
    NEEDS_HOPPER();
    const TrainConfig c = small_with_faults(false);
    const Seen exact = on_cpu<double>(c, {}), plain = on_cpu<float>(c, {});
    const ParameterLayout layout(c.model);
    for (const std::vector<std::string>& words : planted("")) {
        SCOPED_TRACE(testing::PrintToString(words));
        const Seen cpu = on_cpu<float>(c, words), device = on_device(c, words);
        double most = 0, moved = 0, records = 0;
        for (const Parameter& p : layout.all()) {
            const double bound = 5 * std::max(distance(p, plain.gradient, exact.gradient), 0x1p-24);
            const double apart = distance(p, device.gradient, cpu.gradient);
            EXPECT_LE(apart, bound) << p.name;
            most = std::max(most, apart / bound);
            moved = std::max(moved, distance(p, cpu.gradient, plain.gradient) / bound);
        }
        // What is added to a whole row of scores cancels, and what is constant over channels the next norm subtracts.
        const bool cancels =
            words[0].starts_with("row_max") || words[0] == "ffn_output:fixed:2%" || words[0] == "logits:flip@2:2%";
        EXPECT_EQ(moved > 20, !cancels) << "whether the fault does something";
        for (std::size_t h = 0; h < cpu.injected.realised.size(); ++h) {
            const Realised &a = device.injected.realised[h], &b = cpu.injected.realised[h];
            EXPECT_EQ(a.count, b.count) << h;
            const double rms = std::sqrt(b.value_squared), size = std::sqrt(b.value_squared * b.count);
            const auto close = [&](double x, double y, double unit, const char* what) {
                records = std::max(records, unit > 0 ? std::abs(x - y) / unit : 0);
                EXPECT_NEAR(x, y, 0x1p-16 * unit) << what << " " << h;
            };
            close(std::sqrt(a.value_squared), rms, rms, "values");
            close(std::sqrt(a.sum_squared), std::sqrt(b.sum_squared), rms, "errors");
            close(std::sqrt(a.asked_squared), std::sqrt(b.asked_squared), rms, "asked");
            close(a.sum, b.sum, size, "sum");
            close(a.sum_abs, b.sum_abs, size, "magnitudes");
            close(a.asked_sum, b.asked_sum, size, "sum asked");
        }
        std::printf("%-48s gradients apart by %.2f of the bound (fault moves %.0f), records by %.1e\n",
                    words[0].c_str(), most, moved, records);
    }
}

/// In bf16 two runs differ by the casts that a last bit tips over, and a fault that is drawn anew by the tipped value: by less
/// than bf16 costs at all (device_trainer_test.cpp). Values of the model are held in bf16 on the device; the CPU is told to.
TEST(DeviceFaults, GradientsInBf16DifferByLessThanBf16Costs) {
    NEEDS_HOPPER();
    const auto compare = [](const TrainConfig& c, const std::vector<std::vector<std::string>>& all) {
        TrainConfig without_casts = c;
        without_casts.model.bf16 = false;
        without_casts.model.attention.clear();
        const Seen exact = on_cpu<double>(without_casts, {}), plain = on_cpu<float>(c, {});
        const ParameterLayout layout(c.model);
        for (const std::vector<std::string>& words : all) {
            SCOPED_TRACE(testing::PrintToString(words));
            const Seen cpu = on_cpu<float>(c, words), device = on_device(c, words);
            double most = 0;
            for (const Parameter& p : layout.all()) {
                const double cost = distance(p, plain.gradient, exact.gradient);
                const double apart = distance(p, device.gradient, cpu.gradient);
                EXPECT_LE(apart, cost) << p.name;
                most = std::max(most, apart / cost);
            }
            for (std::size_t h = 0; h < cpu.injected.realised.size(); ++h) {
                const Realised &a = device.injected.realised[h], &b = cpu.injected.realised[h];
                EXPECT_EQ(a.count, b.count) << h;
                EXPECT_NEAR(a.relative_rms(), b.relative_rms(), 0x1p-8 * b.relative_rms()) << h;  // of bf16 inputs
            }
            std::printf("%-48s gradients apart by %.2f of what bf16 costs\n", words[0].c_str(), most);
        }
    };
    compare(small_with_faults(true), planted(":format=bf16"));
    TrainConfig c = small_with_faults(true);
    c.model = {.layers = 2, .width = 128, .heads = 2, .context = 200, .vocabulary = 256, .bias = true};
    c.batch = 2;
    c.model.attention = {{-1, {}, std::make_shared<RoundingPlan>(tensor_kernel::backward_plan(64))}};
    compare(c, {{"lse:fixed:0.5%"},
                {"o_cast:random:2%"},
                {"dq_cast:fixed:2%"},
                {"dk_cast:per_head:2%"},
                {"dv_cast:multiplicative:0.02"},
                {"row_max:multiplicative:0.01"},
                {"row_sum:random:0.02:shape=value"},
                {"pv_accumulate:multiplicative:0.02"},
                {"delta:multiplicative:0.1"},
                // In registers: every size, sign and hold that is there.
                {"p_cast:multiplicative:0.02"},
                {"p_cast:random:0.02:shape=value:hold=nearest"},
                {"dp_accumulate:multiplicative:-0.02"},
                {"dp_accumulate:per_head:0.02:shape=value:hold=exact"},
                {"ds:multiplicative:0.02"},
                {"ds:random:0.02:shape=value:hold=nearest"},
                {"bwd_p_cast:operand:1ulp"},
                {"bwd_p_cast:per_column:0.02:shape=value"},
                {"ds_cast:flip@2:1ulp:hold=nearest"},
                {"dp_accumulate:random:0.02:shape=value", "ds:multiplicative:0.02", "ds_cast:fixed:1ulp"}});
}

/// record=sample changes who multiplies and how much is recorded, and no bit of the run. The realised rms of one factor is its size
/// to fp32's rounding, in whichever elements.
TEST(DeviceFaults, WhatIsSampledIsTheSameFault) {
    NEEDS_HOPPER();
    TrainConfig c = small_with_faults(true);
    c.model = {.layers = 2, .width = 128, .heads = 2, .context = 200, .vocabulary = 256, .bias = true};
    c.batch = 3;
    c.steps = 4;
    c.model.attention = {{-1, {}, std::make_shared<RoundingPlan>(tensor_kernel::backward_plan(64))}};
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"ds:multiplicative:0.125:hold=nearest"},
          {"dp_accumulate:multiplicative:-0.25:hold=nearest:heads=1", "ds:flip@2:0.5:shape=value:hold=nearest:from=1"},
          {"row_sum:multiplicative:0.125:hold=nearest"},
          {"row_max:multiplicative:0.125:hold=nearest"},
          {"pv_accumulate:multiplicative:0.125:hold=nearest"},
          {"bwd_p_cast:multiplicative:0.125:hold=nearest"},
          {"ds_cast:multiplicative:0.125:hold=nearest"},
          {"ds:multiplicative:0.25:hold=nearest", "ds_cast:multiplicative:-0.125:hold=nearest:heads=0"},
          {"o_cast:multiplicative:0.125:hold=nearest"},
          {"o_cast:per_head:2%", "dq_cast:fixed:2%:heads=1:from=1"},
          {"p_cast:flip@2:0.125:shape=value:hold=nearest:heads=1",
           "row_sum:multiplicative:-0.25:hold=nearest:from=1"}}) {
        SCOPED_TRACE(testing::PrintToString(words));
        const auto run = [&](const TrainConfig& of, const std::string& record, std::vector<Realised>& did) {
            std::vector<std::string> all = words;
            for (std::string& word : all) word += record;
            Faults faults(of, all);
            const WindowOrder order(1);
            DeviceTrainer trainer(of, text(), order, {.faults = &faults.hooks});
            while (!trainer.finished()) {
                (void)trainer.step();
                const FaultHooks::Step step = faults.hooks.take_step();
                did.insert(did.end(), step.realised.begin(), step.realised.end());
            }
            return trainer.weights();
        };
        std::vector<Realised> all, sampled;
        EXPECT_EQ(run(c, ":record=sample", sampled), run(c, "", all));
        ASSERT_EQ(sampled.size(), all.size());
        for (std::size_t i = 0; i < all.size(); ++i) {
            EXPECT_EQ(sampled[i].count * c.batch, all[i].count) << i;  // every sequence has as many
            if (words.size() > 1 || all[i].count == 0) continue;       // of two faults the sizes mix by sequence
            // bf16 rounds the products of a cast: by half an ulp, 2^-8 of it, at most.
            const double rounding = words.front().find("_cast:") != std::string::npos ? 0x1p-8 : 1e-6;
            EXPECT_NEAR(sampled[i].relative_rms(), 0.125, rounding) << i;
            EXPECT_NEAR(all[i].relative_rms(), 0.125, rounding) << i;
        }
    }
}

TEST(DeviceFaults, MagnitudeZeroChangesNoBit) {
    NEEDS_HOPPER();
    for (const bool low : {false, true}) {
        const TrainConfig c = small_with_faults(low);
        const WindowOrder order(1);
        DeviceTrainer plain(c, text(), order);
        (void)losses(plain);
        std::vector<std::string> words;
        for (const char* site : {"row_max",
                                 "p_cast",
                                 "row_sum",
                                 "pv_accumulate",
                                 "lse",
                                 "o_cast",
                                 "delta",
                                 "dp_accumulate",
                                 "ds",
                                 "bwd_p_cast",
                                 "ds_cast",
                                 "dq_cast",
                                 "dk_cast",
                                 "dv_cast",
                                 "layer_norm_statistics",
                                 "attention_projection",
                                 "ffn_output",
                                 "residual_add",
                                 "logits",
                                 "ffn_output_gradient",
                                 "ffn_activation_gradient",
                                 "optimizer_update"})
            words.push_back(std::string(site) + ":random:0");
        Faults faults(c, words);
        DeviceTrainer with(c, text(), order, {.faults = &faults.hooks});
        (void)losses(with);
        EXPECT_EQ(with.weights(), plain.weights());
    }
    TrainConfig c = small_with_faults(true);
    c.model.heads = 1;
    c.model.attention = {{-1, {}, std::make_shared<RoundingPlan>(tensor_kernel::backward_plan(64))}};
    const WindowOrder order(1);
    DeviceTrainer plain(c, text(), order);
    (void)losses(plain);
    for (const std::vector<std::string>& sites :
         {std::vector<std::string>{"row_max", "p_cast", "row_sum", "pv_accumulate", "dp_accumulate", "ds", "bwd_p_cast",
                                   "ds_cast", "lse"},
          {"delta"}}) {
        std::vector<std::string> words;
        for (const std::string& site : sites) words.push_back(site + ":multiplicative:0");
        Faults faults(c, words);
        DeviceTrainer with(c, text(), order, {.faults = &faults.hooks});
        (void)losses(with);
        EXPECT_EQ(with.weights(), plain.weights());
    }
}

}  // namespace
}  // namespace faultline::gpt
