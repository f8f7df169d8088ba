// SPDX-License-Identifier: Apache-2.0
// Small runs with faults, for tests of the device's trainer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <faultline/dissociation/fault_hooks.hpp>
#include <faultline/gpt/fast_attention.hpp>
#include <faultline/gpt/training.hpp>

namespace faultline::gpt {

/// Two layers of width 64, an odd context, two micro-batches.
inline TrainConfig small_with_faults(bool bf16) {
    TrainConfig c;
    c.model = {.layers = 2, .width = 64, .heads = 2, .context = 100, .vocabulary = 256, .bias = true, .bf16 = bf16};
    c.batch = 5;
    c.accumulate = 2;
    c.steps = 20;
    c.schedule = {.learning_rate = 3e-3, .warmup = 50};
    c.clip = 0;
    c.monitor_every = c.validate_every = 0;
    return c;
}

/// A run's faults, with the plan that they are held in.
struct Faults {
    RoundingPlan plan;
    FaultHooks hooks;
    Faults(const TrainConfig& c, const std::vector<std::string>& words)
        : plan(c.model.plan(0, 0) != nullptr ? *c.model.plan(0, 0) : fast_plan(c.model.bf16)),
          hooks(parsed(words), c.model.layers, c.model.heads, [this](int, int) { return &plan; }) {}
    static std::vector<Fault> parsed(const std::vector<std::string>& words) {
        std::vector<Fault> all;
        for (const std::string& word : words) all.push_back(parse_fault(word));
        return all;
    }
    [[nodiscard]] Hooks on_cpu() {
        Hooks h;
        if (hooks.any_attention()) h.attention = &hooks;
        if (hooks.any_model()) h.model = &hooks;
        return h;
    }
};

/// Of all steps that are left.
inline std::vector<double> losses(Training& trainer) {
    std::vector<double> all;
    while (!trainer.finished()) all.push_back(trainer.step().loss);
    return all;
}

}  // namespace faultline::gpt
