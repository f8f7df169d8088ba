// SPDX-License-Identifier: Apache-2.0
// Whether the kernels of a capture are the plan that they are compared with: what attribution says of a plan's roundings is
// said of a kernel only as far as the plan reproduces it, and a preset may reproduce it better than the plan asked for.
#pragma once

#include <functional>
#include <vector>

#include <faultline/attribution/attribution.hpp>
#include <faultline/attribution/capture.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline {

/// For every observed kernel of which some preset leaves at most half as many elements different as `plan` does: the preset
/// that leaves fewest. Compared on one key head of every layer, that of query head `head`. Empty where the capture has no
/// output of a kernel, and when `cancelled` says so. RequestError where a layer has no such head.
[[nodiscard]] std::vector<NearerPlan> nearer_plans(const Capture& capture, const RoundingPlan& plan, int head,
                                                   int threads = 0, const std::function<bool()>& cancelled = {});

}  // namespace faultline
