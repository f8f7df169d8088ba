// SPDX-License-Identifier: Apache-2.0
// Whether the kernels of a capture are the plan that they are compared with: what attribution says of a plan's roundings is
// said of a kernel only as far as the plan reproduces it, and a preset may reproduce it better than the plan asked for.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <faultline/attribution/attribution.hpp>
#include <faultline/attribution/capture.hpp>
#include <faultline/identification/identify.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline {

/// `plan` and every preset, ranked on the heads asked for (AttributionOptions::heads; all without) of every layer: the same
/// ranking as identify()'s, so that the two never name different plans. `plan` comes first among equals. Of the options,
/// heads, threads, seed, backend, progress and cancelled are read. `kernel`: on it alone; empty: on all. No kernels where the
/// capture has no output of one, and when `cancelled` says so. RequestError where a layer has no such head, and where the
/// capture has no such kernel.
[[nodiscard]] Identification rank_presets(const Capture& capture, const RoundingPlan& plan,
                                          const AttributionOptions& options = {}, const std::string& kernel = {});

/// The kernel that a capture is attributed by where none is named: flash, or the first by name.
[[nodiscard]] std::string first_kernel(const Identification& ranked);

/// The preset that reproduces most elements of `kernel`, of those that round, over all layers; of those that
/// these do not tell apart the one whose lse is the kernel's (order_ranking). Nothing where the kernel was not ranked, or no preset has a tenth of its elements.
[[nodiscard]] std::optional<ChosenPlan> nearest_plan(const Identification& ranked, const std::string& kernel);

/// Whether no preset is nearer than the plan of this name to one of the kernels, in all layers that have it.
[[nodiscard]] bool is_nearest_to_some(const Identification& ranked, const std::string& plan);

/// For every kernel of which some preset leaves at most half as many elements different as the plan of this name, which is
/// among those ranked: the preset that leaves fewest, of those that round. `heads`: on which they were ranked; empty: all.
[[nodiscard]] std::vector<NearerPlan> nearer_plans(const Identification& ranked, const std::string& plan,
                                                   const std::vector<int>& heads);

}  // namespace faultline
