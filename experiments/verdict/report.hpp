// SPDX-License-Identifier: Apache-2.0
// A verdict as a person reads it, as one JSON object (schema "faultline.check/1"), as JUnit XML (one test suite per layer,
// one test case per output, an error where the truth decides nothing, skipped where the gradient at the output is not there:
// what CI systems show), and as HDF5 (kind "check"): per layer and output t over (head, cell).
#pragma once

#include <string>

#include <faultline/record/record_file.hpp>
#include <faultline/verdict/check.hpp>

namespace faultline {

/// Lines of at most 110 columns, each ended. `full`: every finding.
[[nodiscard]] std::string table(const Check& check, bool full = false);
[[nodiscard]] std::string to_json(const Check& check);
[[nodiscard]] std::string to_junit(const Check& check);
/// Into a file that is open; commit() is the caller's.
void write(const Check& check, RecordFile& file);

/// A finding in a clause: "head 0, feature 29: shifted by +0.086 of its rounding, t +8.8 (p 4e-10)".
[[nodiscard]] std::string text(const Finding& finding);
/// Where the truth is not known well enough for the errors, or for a test: what that is, in a clause; else "".
[[nodiscard]] std::string truth_text(const OutputCheck& output);
/// Where the plan's own run is not finite and the kernel is, or runs with random signs are not: where, and what that leaves of the verdict, in a
/// clause; else "".
[[nodiscard]] std::string plan_text(const OutputCheck& output);
/// Which outputs of a layer that has some are not judged, and why: "dq, dk not judged: there is no layer0.do, …".
[[nodiscard]] std::string unjudged_text(const LayerCheck& layer);

}  // namespace faultline
