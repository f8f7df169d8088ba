// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/without_effect.hpp>

#include <algorithm>
#include <vector>

namespace faultline::gpt {
namespace {

bool same(const RoundingPlan* a, const RoundingPlan* b, int head_dim) {
    if (a == nullptr || b == nullptr) return a == b;
    return a == b || for_head_dim(*a, head_dim).same_numerics(for_head_dim(*b, head_dim));
}

}  // namespace

std::optional<std::size_t> choice_without_effect(const ModelConfig& model, std::size_t from) {
    for (std::size_t i = from; i < model.attention.size(); ++i) {
        ModelConfig without = model;
        without.attention.erase(without.attention.begin() + static_cast<std::ptrdiff_t>(i));
        bool acts = false;
        for (int layer = 0; layer < model.layers && !acts; ++layer)
            for (int head = 0; head < model.heads && !acts; ++head)
                acts = !same(model.plan(layer, head), without.plan(layer, head), model.head_dim());
        if (!acts) return i;
    }
    return std::nullopt;
}

bool cosine_falls(const ScheduleConfig& schedule, std::int64_t steps) {
    // The step behind the warm-up has the whole rate still.
    return schedule.cosine && steps - std::min(schedule.warmup, steps) > 1 &&
           schedule.final_rate != schedule.learning_rate;
}

}  // namespace faultline::gpt
