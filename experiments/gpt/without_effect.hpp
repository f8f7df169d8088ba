// SPDX-License-Identifier: Apache-2.0
// Settings of a run that leave every bit of it as it is without them: commands refuse them, a trainer takes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <faultline/gpt/model_config.hpp>
#include <faultline/gpt/optimizer.hpp>

namespace faultline::gpt {

/// The first of model.attention, from `from` on, without which every head would run the same numerics: later choices overrule
/// it, or it says what holds anyway. Names of plans do not count. The choices must be in range (check).
[[nodiscard]] std::optional<std::size_t> choice_without_effect(const ModelConfig& model, std::size_t from = 0);

/// Whether a run of `steps` steps has one in which the cosine is below the rate that the warm-up ends with.
[[nodiscard]] bool cosine_falls(const ScheduleConfig& schedule, std::int64_t steps);

}  // namespace faultline::gpt
