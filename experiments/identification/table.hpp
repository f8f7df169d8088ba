// SPDX-License-Identifier: Apache-2.0
// An identification as a person reads it: the plans that come nearest to each kernel, the plan found, what differs still.
#pragma once

#include <string>

#include <faultline/identification/identify.hpp>

namespace faultline {

/// Lines of at most 110 columns, each ended. `full`: every plan of the ranking and every change tried.
[[nodiscard]] std::string table(const Identification& identification, bool full = false);

/// "100%" only where every element is equal: a share that would be rounded to it gets the digits that keep it apart.
[[nodiscard]] std::string share_percent(const Match& match);

}  // namespace faultline
