// SPDX-License-Identifier: Apache-2.0
// What the words of a matrix ask for twice, in whichever words, or for nothing. The matrix itself (runs_of) merges the one and
// leaves out the other, so commands ask here first.
#pragma once

#include <string>
#include <vector>

namespace faultline {

/// RequestError where two sources are one, however they are written: "\"ds:fixed:30%\": is there twice, as \"ds:fixed:0.3\" too".
/// `head_dim`, `folder`: as of parse_source.
void expect_different_sources(const std::vector<std::string>& sources, int head_dim, const std::string& folder = "");

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
