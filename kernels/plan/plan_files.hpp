// SPDX-License-Identifier: Apache-2.0
// Which files a plan is read from.
#pragma once

#include <filesystem>
#include <vector>

namespace faultline {

/// The file and those of its bases, in the order in which read_plan() reads them (plan_toml.hpp), without reading the plan: the
/// list ends before the first file that is not there or no TOML, and before one that is there twice. Nothing is thrown.
[[nodiscard]] std::vector<std::filesystem::path> plan_files(const std::filesystem::path& file);

}  // namespace faultline
