// SPDX-License-Identifier: Apache-2.0
// Faults of a training run that would be planted nowhere.
#pragma once

#include <cstdint>
#include <vector>

#include <faultline/gpt/model_config.hpp>
#include <faultline/injectors/fault.hpp>

namespace faultline {

/// RequestError where a fault names a layer or a head that a model of `layers` layers with `heads` heads each has not, one of
/// several too: "fault …: layer 7: expected a layer from 0 to 1". Layers are those of ModelAt: the logits stand behind the
/// last one, at the number of layers, and layer norms from 0 to there.
void expect_faults_in_model(const std::vector<Fault>& faults, std::int64_t layers, std::int64_t heads);

/// RequestError where no head that a fault of a kernel site stands in runs a kernel that passes the site ("merge" without
/// splits of the keys): "fault …: merge has nothing to do …". The kernels are emulated once for a plan and a shape.
void expect_faults_passed(const std::vector<Fault>& faults, const gpt::ModelConfig& model);

}  // namespace faultline
