// SPDX-License-Identifier: Apache-2.0
// The TOML of a sweep: [matrix] says what is crossed, [train] the recipe, [[recipe]] and [vary] how the recipe changes
// (docs/sweeps.md). And that of one run of it, which its process reads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <faultline/dissociation/matrix.hpp>
#include <faultline/dissociation/single_run.hpp>
#include <faultline/sweep/cell.hpp>

namespace faultline::cli {

/// Of all recipes together.
inline constexpr int most_runs_of_a_sweep = 100'000;

struct SweepRecipe {
    std::string name;      ///< empty: the only one
    std::string settings;  ///< [train] with all settings in force
    MatrixConfig config;   ///< with trainers where device = "cuda"
    std::shared_ptr<const gpt::TokenData> data;
};

struct SweepFile {
    std::vector<SweepRecipe> recipes;
    std::int64_t checkpoint_every = default_checkpoint_every;
};

/// Reads the sweep and the data of its recipes; files that it names are found from `folder`, "": the one that it stands in.
/// RequestError, "FILE: matrix.source: …".
[[nodiscard]] SweepFile read_sweep(const std::string& path, const std::string& folder = "");

/// Its runs, by recipe in the order of runs_of. RequestError where one of them is no run, or is there twice.
[[nodiscard]] std::vector<sweep::Cell> cells_of(const SweepFile& file, const std::string& path);

/// The file of one run's settings, and what it says.
[[nodiscard]] std::string cell_toml(const SweepFile& file, const SweepRecipe& recipe, const sweep::Cell& cell);
struct SweepCell {
    SweepRecipe recipe;
    RunPlan plan;
    std::int64_t checkpoint_every = default_checkpoint_every;
};
[[nodiscard]] SweepCell read_cell(const std::string& path);

}  // namespace faultline::cli
