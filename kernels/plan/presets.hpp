// SPDX-License-Identifier: Apache-2.0
// The plans of real kernels, compiled in from presets/*.toml, and plans by name or file.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include <faultline/plan/plan.hpp>

namespace faultline {

/// All presets, in the order in which `faultline plans` lists them; the first is `exact`.
[[nodiscard]] std::span<const RoundingPlan> presets();

/// Their names.
[[nodiscard]] std::vector<std::string_view> preset_names();

/// The text of the preset's file, with a comment on every site that says where the kernel rounds. Throws RequestError for
/// a name that is none.
[[nodiscard]] std::string_view preset_toml(std::string_view name);

/// The preset of that name, also as stored_as() names it ("fa2-fp16", "fa2-fp32-dq"), or the plan in the file where the name ends in ".toml".
/// Throws RequestError, which suggests the
/// nearest name. The plan has its list of tile sizes still to be settled: see for_head_dim.
[[nodiscard]] RoundingPlan plan(std::string_view name_or_path);

}  // namespace faultline
