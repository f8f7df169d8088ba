// SPDX-License-Identifier: Apache-2.0
// The settings that the state of a run depends on, as text: what a checkpoint must have been made with to be taken up.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace faultline::gpt {

struct TrainConfig;

/// (key, value) for every setting that changes a later step; not the number of steps (but with a cosine schedule) or
/// threads.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> fingerprint(const TrainConfig& config);

}  // namespace faultline::gpt
