// SPDX-License-Identifier: Apache-2.0
// What the words of a matrix ask for twice, in whichever words, or for nothing. The matrix itself (runs_of) merges the one and
// leaves out the other, so commands ask here first.
#pragma once

#include <string>
#include <vector>

#include <faultline/gpt/training.hpp>

namespace faultline {

/// RequestError where two sources are one in a run of this configuration, however they are written: "\"ds:fixed:30%\": is there
/// twice, as \"ds:fixed:0.3\" too". `folder`: as of parse_source. Faults at different sites, or in different layers or heads, may
/// stand in either order.
void expect_different_sources(const std::vector<std::string>& sources, const gpt::TrainConfig& config,
                              const std::string& folder = "");

/// RequestError where a fault of a source has the magnitude 0 and no other source is the same but for its magnitudes: it is
/// the control's run then, and not the zero of a series.
void expect_magnitudes_met(const std::vector<std::string>& sources, const gpt::TrainConfig& config,
                           const std::string& folder = "");

/// The same of interventions, or of controls.
void expect_different_interventions(const std::vector<std::string>& interventions);

/// RequestError where one of the controls, the runs without a fault, would end the faults of its run.
void expect_controls_met(const std::vector<std::string>& controls);

/// RequestError where there is no source but "none" and an intervention is not among the controls, the runs without a fault: it
/// would be in no run; and where an intervention ends faults and no source has one that is at work
/// then.
void expect_interventions_met(const std::vector<std::string>& sources, const std::vector<std::string>& interventions,
                              const std::vector<std::string>& controls, int head_dim, const std::string& folder = "");

}  // namespace faultline
