// SPDX-License-Identifier: Apache-2.0
// A bisection as a person reads it, as one JSON object (schema "faultline.bisection/1"), and as HDF5 (kind "bisection"):
// per answer a group `until` or `reproduce` with every set that was tried, in_set over (trial, site), and value over
// (trial, target).
#pragma once

#include <string>

#include <faultline/bisection/bisect.hpp>
#include <faultline/record/record_file.hpp>

namespace faultline {

/// Lines of at most 110 columns, each ended.
[[nodiscard]] std::string table(const Bisection& bisection);
[[nodiscard]] std::string to_json(const Bisection& bisection);
/// Into a file that is open; commit() is the caller's.
void write(const Bisection& bisection, RecordFile& file);

/// Whether every answer has a set that meets its targets.
[[nodiscard]] bool all_met(const Bisection& bisection);
/// What no set met, in a sentence; empty where all were.
[[nodiscard]] std::string unmet(const Bisection& bisection);

}  // namespace faultline
