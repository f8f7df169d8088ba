// SPDX-License-Identifier: Apache-2.0
// Names that come out of files are printed in messages: what they hold must not reach the terminal as a command.
#pragma once

#include <string>
#include <string_view>

namespace faultline {

/// The text with everything that is not printable written as \xNN, \n, \t, \\ or \": control characters (C0, DEL, C1),
/// bytes that are not UTF-8, noncharacters, and the bidirectional overrides that can make a name read as another. Cut after
/// `longest` bytes of the input, at a character, with "…".
[[nodiscard]] std::string escaped(std::string_view text, std::size_t longest = 200);
/// escaped() between double quotes.
[[nodiscard]] std::string in_quotes(std::string_view text);
/// Length of the well-formed UTF-8 character at the start of the text (Unicode 15, table 3-7), 0 if there is none.
[[nodiscard]] std::size_t utf8_character(std::string_view text);

}  // namespace faultline
