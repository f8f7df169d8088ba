// SPDX-License-Identifier: Apache-2.0
// From the steps of a run to its result: of a run at work, or of its record.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include <faultline/dissociation/outcome.hpp>
#include <faultline/gpt/hooks.hpp>

namespace faultline {

/// What a result needs of a step: the largest over layers and heads, or their mean where it is a fraction.
struct StepSample {
    std::int64_t step = 0;
    double loss = 0, validation_loss = std::numeric_limits<double>::quiet_NaN();
    double sigma_q = std::numeric_limits<double>::quiet_NaN(), sigma_k = sigma_q;  ///< NaN: not due
    double max_logit = 0;
    double injected_rms = 0, injected_asked_rms = 0;                   ///< means over heads that had any
    double step_coherence = std::numeric_limits<double>::quiet_NaN();  ///< mean over heads that had an error so far
    double removed_fraction = 0, leading_fraction = 0, missing_fraction = 0;
    bool intervention_active = false;
};
[[nodiscard]] StepSample sample_of(const gpt::StepReport& report);
/// The steps of a run's record. RequestError where it is none.
[[nodiscard]] std::vector<StepSample> samples_of(const std::string& record);

/// Fills the series and means of a result from its steps, in order.
void collect(const std::vector<StepSample>& samples, RunResult& result);

}  // namespace faultline
