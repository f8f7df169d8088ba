// SPDX-License-Identifier: Apache-2.0
// What faultline train says of a run: in a line while it goes on, and at its end.
#pragma once

#include <cstdint>
#include <string>

#include <faultline/gpt/run.hpp>

namespace faultline::cli {

/// Loss in nat per token, norm of the gradient and largest scaled score of one step, in a line without its end.
std::string step_text(const gpt::StepReport& report);

/// The last step's numbers and the rate of the `steps_done` steps that this call made, as a table, or as the JSON object
/// `faultline.training/1`, in which a number that there is not is null.
std::string summary(const gpt::Training& trainer, const gpt::RunOutcome& outcome, std::int64_t steps_done, bool json);

}  // namespace faultline::cli
