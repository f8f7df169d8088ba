// SPDX-License-Identifier: Apache-2.0
// Plans as TOML 1.0 files: a new kernel's numerics without compiling anything.
//
//   name = "mine"
//   base = "fa2"                  # optional: start from this preset, then change; in a file also another plan's file
//                                 #   ("identified.toml"), its path from the folder of this one
//   description = "one line"
//   source = "file and lines of the kernel"
//   [schedule]                    # fields of Schedule, enumerators by their names; what is left out keeps its default
//   block_q = 128                 #   (or what the base has)
//   key_order = "descending"
//   [[tiles]]                     # optional, in order; the first that fits the head replaces the schedule's tile sizes
//   head_dim = 64
//   block_k = 128
//   [sites.s_accumulate]          # a site that is left out is exact (or what the base has)
//   accumulation = "hopper-mma-bf16"
//   [sites.p_cast]
//   format = "bf16"               # or { precision = 5, emin = -14, emax = 15 }
//   rounding = "nearest_even"
//
// What changes nothing that the plan computes (plan/effect.hpp) is refused where the file says it: a field of the schedule that
// nothing reads, a rule for a site that is never reached. What a base has of these is dropped. A default may be written out
// where there is no base.
//
// An accumulation is a name of lib/tensor_core or a table with the numbers of a matrix unit:
//   accumulation = { terms = 16, fraction_bits = 20, output = "f32_rz" }
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include <faultline/plan/plan.hpp>

namespace faultline {

/// Reads a plan file, and the files that it names as its base. Throws RequestError: one sentence with the file, line and column,
/// the field and what was expected; also where a base is not there, or comes back to the file that names it.
[[nodiscard]] RoundingPlan read_plan(const std::filesystem::path& file);

/// The same from text, whose base is a preset: no file is read. `source_name` stands for the file in errors, and gives the plan its name where the text has none
/// (last path component, without .toml).
[[nodiscard]] RoundingPlan parse_plan(std::string_view toml, std::string_view source_name);

/// The same, where `base` names one of these plans in place of a preset.
[[nodiscard]] RoundingPlan parse_plan(std::string_view toml, std::string_view source_name,
                                      std::span<const RoundingPlan> bases);

/// The whole plan but for what changes nothing: every field of the schedule that is read and every site that is not exact and is
/// reached. parse_plan(to_toml(p), …) gives without_idle(p) back, the names included.
[[nodiscard]] std::string to_toml(const RoundingPlan& plan);

}  // namespace faultline
