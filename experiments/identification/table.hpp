// SPDX-License-Identifier: Apache-2.0
// An identification as a person reads it: the plans that come nearest to each kernel, the plan found, what differs still.
#pragma once

#include <string>
#include <string_view>

#include <faultline/identification/identify.hpp>

namespace faultline {

/// Lines of at most 110 columns, each ended. `full`: every plan of the ranking and every change tried.
[[nodiscard]] std::string table(const Identification& identification, bool full = false);

/// "100%" only where every element is equal: a share that would be rounded to it gets the digits that keep it apart.
[[nodiscard]] std::string share_percent(const Match& match);
/// Of the outputs of which the plan found has too few elements to be the kernel, the one with the least share: "52.91% of o",
/// after `before`; else "".
[[nodiscard]] std::string lacking_text(const KernelIdentification& k, std::string_view before);

}  // namespace faultline
