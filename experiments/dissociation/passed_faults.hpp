// SPDX-License-Identifier: Apache-2.0
// Faults of a training run that would be planted nowhere.
#pragma once

#include <vector>

#include <faultline/gpt/model_config.hpp>
#include <faultline/injectors/fault.hpp>

namespace faultline {

/// RequestError where no head that a fault of a kernel site stands in runs a kernel that passes the site ("merge" without
/// splits of the keys): "fault …: merge has nothing to do …". The kernels are emulated once for a plan and a shape.
void expect_faults_passed(const std::vector<Fault>& faults, const gpt::ModelConfig& model);

}  // namespace faultline
