// SPDX-License-Identifier: Apache-2.0
// What every file of ours has at its root, on the HDF5 level.
#pragma once

#include <string>

#include <faultline/record/h5.hpp>
#include <faultline/record/manifest.hpp>

namespace faultline::h5 {

/// A new, empty file that newer and older readers open from HDF5 1.10 on; fails if `path` is locked or unwritable.
[[nodiscard]] Handle create_file(const std::string& path, const std::string& file_name);
/// The manifest as root attributes.
void write_manifest(hid_t file, const Manifest& manifest, const std::string& file_name);

}  // namespace faultline::h5
