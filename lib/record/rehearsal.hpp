// SPDX-License-Identifier: Apache-2.0
// HDF5 1.10 trusts what it reads: a damaged file can make the library itself free what it never allocated, or run round a
// circle (CVE lists have dozens). No check of ours comes before that, since only the library can parse its format. So a
// file of unknown origin is first read by a child process, and a crash there is a sentence here.
#pragma once

#include <string>

namespace faultline {

/// How much of the file is read: names, shapes and attributes, or the values too.
enum class Rehearsal { structure, values };

/// Reads the file in a child process as a RecordReader would. RequestError when the child crashes or runs longer than
/// any whole file takes; what the reader refuses by itself is left to the reader's sentence. The parent then reads the file
/// itself, as the child did; this stops what a damaged file does, not an attack. Forks: to be called while no other thread
/// uses HDF5.
void rehearse_reading(const std::string& path, Rehearsal what);

}  // namespace faultline
