// SPDX-License-Identifier: Apache-2.0
// Runs with faults on the device: laws of time, interventions, checkpoints, and what is refused.
#include <faultline/gpt_device/device_trainer.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include <faultline/base/error.hpp>
#include <faultline/dissociation/channel.hpp>
#include <faultline/gpt/trainer.hpp>
#include <faultline/tensor_kernel/backward_kernel.hpp>

#include "../../kernels/tensor_kernel/on_hopper.hpp"
#include "../../lib/tensor/support.hpp"
#include "planted_runs.hpp"
#include "small_runs.hpp"

namespace faultline::gpt {
namespace {

using testing::HasSubstr;

/// Laws of time, faults that begin and end, and the update: the losses of 20 steps are the CPU's as those of a run without
/// faults are (device_trainer_test.cpp: 1e-5 over 100 steps).
TEST(DeviceFaults, RunsGoTheCpusWay) {
    NEEDS_HOPPER();
    const TrainConfig c = small_with_faults(false);
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"delta:flip@3:5%", "ffn_output:random_step:2%:from=4:until=15"},
          {"optimizer_update:fixed:5%"},
          {"optimizer_update:random:2%:layers=1", "ds:per_head:2%:from=2"}}) {
        SCOPED_TRACE(testing::PrintToString(words));
        const WindowOrder order(1);
        Faults of_cpu(c, words), of_device(c, words);
        Trainer cpu(c, text(), order, of_cpu.on_cpu());
        DeviceTrainer device(c, text(), order, {.faults = &of_device.hooks});
        for (int step = 0; step < c.steps; ++step) {
            EXPECT_NEAR(device.step().loss, cpu.step().loss, 1e-5) << step;
            const FaultHooks::Step a = of_device.hooks.take_step(), b = of_cpu.hooks.take_step();
            for (std::size_t h = 0; h < a.realised.size(); ++h) {
                EXPECT_EQ(a.realised[h].count, b.realised[h].count) << step;
                EXPECT_NEAR(a.realised[h].relative_rms(), b.realised[h].relative_rms(), 1e-3) << step;
                if (!std::isnan(b.step_coherence[h])) {
                    EXPECT_EQ(a.step_coherence[h], b.step_coherence[h]) << step;
                }
            }
        }
    }
}

/// An intervention at the updates and a guard's actions do on the device what they do on the CPU.
TEST(DeviceFaults, InterventionsAreTheCpus) {
    NEEDS_HOPPER();
    const TrainConfig c = small_with_faults(false);
    for (const char* word : {"project", "project:sides=either:k=2", "project:sides=left:k=1", "project:sides=right:k=4",
                             "project:removal=shrink", "project:removal=elsewhere", "repair:from=6",
                             "guard:monitor=grad_norm:threshold=0.01:action=lower_rate",
                             "guard:monitor=grad_norm:threshold=0.01:action=tighter_clip",
                             "guard:monitor=grad_norm:threshold=0.01:action=reset_optimizer",
                             "guard:monitor=grad_norm:threshold=0.01:action=repair"}) {
        SCOPED_TRACE(word);
        TrainConfig clipped = c;
        clipped.clip = 1;
        const WindowOrder order(1);
        Faults of_cpu(clipped, {"delta:multiplicative:0.2"}), of_device(clipped, {"delta:multiplicative:0.2"});
        const Intervention intervention = parse_intervention(word);
        Channel a(intervention, 2, 2, 7, &of_cpu.hooks), b(intervention, 2, 2, 7, &of_device.hooks);
        Hooks on_cpu = of_cpu.on_cpu(), on_device;
        on_cpu.step = &a;
        on_cpu.update = &a;
        on_device.step = &b;
        // Projections but for "elsewhere" are the device's own, the others a hook.
        const bool by_itself =
            intervention.kind == Intervention::Kind::project && intervention.removal != Removal::elsewhere;
        ASSERT_TRUE(!by_itself || device_projects(b.projection(), clipped.model.width));
        if (!by_itself) on_device.update = &b;
        Trainer cpu(clipped, text(), order, on_cpu);
        DeviceTrainer device(clipped, text(), order,
                             {.faults = &of_device.hooks, .projection = by_itself ? &b : nullptr}, on_device);
        for (int step = 0; step < clipped.steps; ++step) {
            const StepReport& from = device.step();
            EXPECT_NEAR(from.loss, cpu.step().loss, 1e-5) << step;
            const StepReport& wanted = cpu.report();
            ASSERT_EQ(from.extras.size(), wanted.extras.size());
            for (std::size_t i = 0; i < wanted.extras.size(); ++i) {
                EXPECT_EQ(from.extras[i].name, wanted.extras[i].name);
                for (std::size_t j = 0; j < wanted.extras[i].values.size(); ++j)
                    if (!std::isnan(wanted.extras[i].values[j])) {
                        EXPECT_NEAR(from.extras[i].values[j], wanted.extras[i].values[j], 1e-3)
                            << wanted.extras[i].name;
                    }
            }
        }
        EXPECT_EQ(a.triggered_at(), b.triggered_at());
    }
}

TEST(DeviceFaults, GoOnFromACheckpoint) {
    NEEDS_HOPPER();
    const TrainConfig c = small_with_faults(true);
    const test::Folder folder;
    const std::string path = (folder.path() / "half.safetensors").string();
    const WindowOrder order(1);
    for (const char* word :
         {"guard:monitor=grad_norm:threshold=0.01:action=reset_optimizer", "project", "project:k=2"}) {
        SCOPED_TRACE(word);
        const Intervention intervention = parse_intervention(word);
        const bool projects = intervention.kind == Intervention::Kind::project;
        const auto run = [&](auto&& use) {
            Faults faults(c, {"ds:random_step:5%"});
            Channel channel(intervention, 2, 2, 7, &faults.hooks);
            Hooks hooks;
            hooks.step = &channel;
            if (!projects) hooks.update = &channel;
            DeviceTrainer trainer(c, text(), order,
                                  {.faults = &faults.hooks, .projection = projects ? &channel : nullptr}, hooks);
            use(trainer);
            return trainer.weights();
        };
        const std::vector<float> whole = run([&](DeviceTrainer& t) { (void)losses(t); });
        (void)run([&](DeviceTrainer& t) {
            for (int i = 0; i < 7; ++i) t.step();
            t.save(path);
        });
        const std::vector<float> resumed = run([&](DeviceTrainer& t) {
            t.restore(path);
            (void)losses(t);
        });
        EXPECT_EQ(resumed, whole);
    }
}

TEST(DeviceFaults, WhatCannotStandIsRefused) {
    if (!device_trainer_is_built()) GTEST_SKIP() << "this build has no device";
    const auto why = [](const TrainConfig& c, const std::vector<std::string>& words) -> std::string {
        const WindowOrder order(0);
        try {
            Faults faults(c, words);
            DeviceTrainer trainer(c, text(), order, {.faults = &faults.hooks});
        } catch (const RequestError& e) {
            return e.what();
        } catch (const WorkError&) {
            return "taken";  // and there is no card
        }
        return "taken";
    };
    TrainConfig c = small_with_faults(true);
    EXPECT_EQ(why(c, {"ds:fixed:1%"}), "taken");
    EXPECT_THAT(why(c, {"exp:multiplicative:0.1"}),
                HasSubstr("the device's kernel has no site exp: expected one of row_max"));
    EXPECT_THAT(why(c, {"o_cast:fixed:1%:hold=exact"}), HasSubstr("o_cast stands in memory as bf16"));
    EXPECT_THAT(why(c, {"logits:fixed:1%:format=fp32"}), HasSubstr("logits stands in memory as bf16"));
    EXPECT_THAT(why(c, {"row_max:operand:1ulp"}), HasSubstr("expected a magnitude relative to the rms"));
    EXPECT_THAT(why(c, {"ffn_output:fixed:1%:column=64"}), HasSubstr("column 64: expected less than the 64 columns"));
    EXPECT_THAT(why(c, std::vector<std::string>(5, "ds:fixed:1%")), HasSubstr("is the fifth inside one kernel"));
    EXPECT_EQ(why(c, std::vector<std::string>(4, "ds:fixed:1%")), "taken");
    c.model.heads = 1;
    c.model.attention = {{-1, {}, std::make_shared<RoundingPlan>(tensor_kernel::backward_plan(64))}};
    EXPECT_THAT(why(c, {"ds:fixed:1%"}),
                HasSubstr("is a part of a tile's rms, which the tensor cores' kernel does not know"));
    for (const char* site : {"row_max", "row_sum", "pv_accumulate", "delta"})
        EXPECT_EQ(why(c, {std::string(site) + ":multiplicative:0.1"}), "taken") << site;
    EXPECT_THAT(why(c, {"exp:multiplicative:0.1"}), HasSubstr("the device's kernel has no site exp"));
    EXPECT_THAT(why(c, {"ds_cast:multiplicative:0.1:hold=exact"}), HasSubstr("ds_cast is an operand in bf16"));
    EXPECT_EQ(why(c, {"ds:multiplicative:0.1"}), "taken");
    EXPECT_EQ(why(c, {"lse:fixed:1%"}), "taken");
    EXPECT_EQ(why(c, {"ds:multiplicative:0.125:hold=nearest:record=sample",
                      "dp_accumulate:multiplicative:0.5:hold=nearest:record=sample"}),
              "taken");
    EXPECT_EQ(why(c, {"p_cast:multiplicative:0.125:hold=nearest:record=sample",
                      "row_sum:multiplicative:0.5:hold=nearest:record=sample"}),
              "taken");
    EXPECT_THAT(
        why(c, {"p_cast:multiplicative:0.02:hold=nearest:record=sample"}),
        HasSubstr("a magnitude between -1 and 1 such as 0.019989013671875, that 1 plus or minus it has 16 bits"));
    EXPECT_THAT(why(c, {"ds:multiplicative:0.1:hold=nearest:record=sample"}),
                HasSubstr("a magnitude between -1 and 1 such as 0.10000002384185791"));
    EXPECT_THAT(why(c, {"ds:multiplicative:0.125:record=sample"}), HasSubstr("hold=nearest"));
    for (const char* site : {"row_max", "pv_accumulate", "bwd_p_cast", "ds_cast"})
        EXPECT_EQ(why(c, {std::string(site) + ":multiplicative:0.125:hold=nearest:record=sample"}), "taken") << site;
    EXPECT_THAT(why(c, {"ds_cast:multiplicative:0.02:hold=nearest:record=sample"}),
                HasSubstr("such as 0.019989013671875, that 1 plus or minus it has 16 bits"));
    EXPECT_THAT(why(c, {"delta:multiplicative:0.125:hold=nearest:record=sample"}),
                HasSubstr("delta, which stands in memory, is recorded whole"));
    EXPECT_THAT(why(c, {"o_cast:random:2%:record=sample"}), HasSubstr("expected one sign for a head"));
    EXPECT_EQ(why(c, {"o_cast:fixed:2%:record=sample", "dq_cast:multiplicative:0.1:record=sample"}), "taken");
    EXPECT_THAT(why(c, {"ds:multiplicative:0.125:hold=nearest:record=sample", "delta:multiplicative:0.1"}),
                HasSubstr("stands in one kernel of a layer with others"));
}

}  // namespace
}  // namespace faultline::gpt
