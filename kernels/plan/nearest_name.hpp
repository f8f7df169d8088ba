// SPDX-License-Identifier: Apache-2.0
// What an error says about a name that is not known: the nearest known one, and what could have been written.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace faultline {

/// The candidate with the fewest edits (insertion, deletion, substitution, swap of neighbours: optimal string alignment
/// distance), the first of several; empty if even that one takes more than a third of the letters of the longer name,
/// rounded up.
[[nodiscard]] std::string_view nearest_name(std::string_view wanted, std::span<const std::string_view> candidates);

/// `expected one of a, b, c (did you mean "b"?)`; where b is near and the list has more than 12 names,
/// `expected a known name (did you mean "b"?)`.
[[nodiscard]] std::string expected_one_of(std::string_view wanted, std::span<const std::string_view> candidates);

}  // namespace faultline
