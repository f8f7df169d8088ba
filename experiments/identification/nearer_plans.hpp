// SPDX-License-Identifier: Apache-2.0
// Whether the kernels of a capture are the plan that they are compared with: what attribution says of a plan's roundings is
// said of a kernel only as far as the plan reproduces it, and a preset may reproduce it better than the plan asked for.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <faultline/attribution/attribution.hpp>
#include <faultline/attribution/capture.hpp>
#include <faultline/cpu/backend.hpp>
#include <faultline/identification/identify.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline {

/// `plan` and every preset, ranked on one key head of every layer, that of query head `head`. No kernels where the capture
/// has no output of one, and when `cancelled` says so. RequestError where a layer has no such head.
[[nodiscard]] Identification rank_presets(const Capture& capture, const RoundingPlan& plan, int head, int threads = 0,
                                          const std::function<bool()>& cancelled = {},
                                          const AttentionBackend& backend = cpu_backend());

/// For every kernel of which some preset leaves at most half as many elements different as the plan of this name, which is
/// among those ranked: the preset that leaves fewest, of those that round.
[[nodiscard]] std::vector<NearerPlan> nearer_plans(const Identification& ranked, const std::string& plan, int head);

/// Both.
[[nodiscard]] std::vector<NearerPlan> nearer_plans(const Capture& capture, const RoundingPlan& plan, int head,
                                                   int threads = 0, const std::function<bool()>& cancelled = {},
                                                   const AttentionBackend& backend = cpu_backend());

}  // namespace faultline
