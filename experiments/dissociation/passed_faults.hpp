// SPDX-License-Identifier: Apache-2.0
// Faults of a training run that would be planted nowhere, and the words for one that are the same.
#pragma once

#include <cstdint>
#include <vector>

#include <faultline/dissociation/source.hpp>
#include <faultline/gpt/model_config.hpp>
#include <faultline/injectors/fault.hpp>

namespace faultline {

/// RequestError where a fault names a layer, a head or a column that the model has not, one of several too, or begins behind
/// the last of `steps`: "fault …: layer 7: expected a layer from 0 to 1". Layers are those of ModelAt: the logits stand behind
/// the last one, at the number of layers, and layer norms from 0 to there. A column, or
/// heads' blocks of columns, have to be in every parameter whose update the fault stands in.
void expect_faults_in_run(const std::vector<Fault>& faults, const gpt::ModelConfig& model, std::int64_t steps);

/// RequestError where no head that a fault of a kernel site stands in runs a kernel that passes the site ("merge" without
/// splits of the keys): "fault …: merge has nothing to do …". The kernels are emulated once for a plan and a shape.
void expect_faults_passed(const std::vector<Fault>& faults, const gpt::ModelConfig& model);

/// The same of exact=SITE of a source's plans, which would repair nothing there.
void expect_repairs_passed(const Source& source, const gpt::ModelConfig& model);

/// RequestError where a fault of a single run has the magnitude 0: it would change nothing.
void expect_magnitudes(const std::vector<Fault>& faults);

/// The same fault in this run with lists in order, those that name all layers or heads left out, and no end where that is behind
/// the run's.
[[nodiscard]] Fault in_fewest_words(const Fault& fault, const gpt::ModelConfig& model, std::int64_t steps);

}  // namespace faultline
