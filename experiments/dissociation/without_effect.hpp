// SPDX-License-Identifier: Apache-2.0
// Interventions that leave every bit of a run as it is, or that the run's settings contradict.
#pragma once

#include <string>
#include <vector>

#include <faultline/dissociation/intervention.hpp>
#include <faultline/gpt/training.hpp>
#include <faultline/injectors/fault.hpp>

namespace faultline {

/// RequestError where the intervention can do nothing in a run of this configuration (as it is without the intervention) with these
/// faults, whatever the data, or where the run has QK-clip by its settings already. `word`: the intervention as asked for. Which
/// faults a repair ends is expect_interventions_met's (matrix_words.hpp): it may be meant for another source.
void expect_intervention_acts(const Intervention& intervention, const std::string& word, const gpt::TrainConfig& config,
                              const std::vector<Fault>& faults);

}  // namespace faultline
