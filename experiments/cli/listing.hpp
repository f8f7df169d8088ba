// SPDX-License-Identifier: Apache-2.0
// A list of named things with a few texts about each: what `sites`, `formats` and `plans` print, write as JSON, and put
// into a file.
#pragma once

#include <string>
#include <vector>

#include <faultline/cli/command.hpp>

namespace faultline::cli {

struct Column {
    std::string key;      ///< in JSON and HDF5
    std::string heading;  ///< in the table
    std::vector<std::string> values;
    bool wraps = false;  ///< broken over lines in the table; the last column
};

struct Listing {
    std::string kind;  ///< "sites": names the file's kind, the JSON schema faultline.sites/1, and the JSON array
    std::vector<Column> columns;
};

/// The table, no line over `width` columns.
[[nodiscard]] std::string text_of(const Listing& listing, std::size_t width = 110);
/// Prints it (table or JSON) and writes the file if one was asked for.
void present(const Listing& listing, const Invocation& call);
/// The same with this text in place of the table.
void present(const Listing& listing, const Invocation& call, const std::string& text);
/// A text broken into lines of at most `width` bytes: at spaces, and a word that is longer behind a slash, comma or semicolon.
[[nodiscard]] std::vector<std::string> wrapped(const std::string& text, std::size_t width);

}  // namespace faultline::cli
