// SPDX-License-Identifier: Apache-2.0
// Opening a file that is there.
#pragma once

#include <string>

#include <faultline/record/h5.hpp>

namespace faultline::h5 {

/// The file for reading. One that says of itself that it is being written (a run at work, or killed) is opened as a
/// reader beside the writer: every flushed step is there. RequestError when it is missing, not HDF5, or exclusively
/// locked. `path` is used in messages, escaped.
[[nodiscard]] Handle open_for_reading(const std::string& path);

/// Whether the file says of itself that it is being written: a run at work, or one that was killed. False of a file that
/// is missing or no HDF5.
[[nodiscard]] bool says_being_written(const std::string& path);

}  // namespace faultline::h5
