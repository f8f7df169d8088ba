// SPDX-License-Identifier: Apache-2.0
// All runs of a sweep as one dissociation file, and as the tables that faultline dissociate prints.
#pragma once

#include <string>
#include <vector>

#include <faultline/dissociation/matrix.hpp>
#include <faultline/record/record_file.hpp>
#include <faultline/sweep/cell_state.hpp>

namespace faultline::sweep {

/// One recipe's runs, in the order of runs_of.
struct Merged {
    std::string recipe;
    RunMatrix matrix;
    std::vector<Cell> cells;
};

/// What a run has come to: of one that is done, from its record; else it is not finished. Nor is one whose record cannot be
/// read or is another run's, as `trouble` says, and how it is made anew; else `trouble` is empty.
struct Outcome {
    RunResult result;
    std::string trouble;
};
[[nodiscard]] Outcome outcome_of(const std::string& folder, const Cell& cell, const CellState& state);

/// The results of `cells`, which are those of `config` under that recipe.
[[nodiscard]] Merged collect(const std::string& folder, const std::string& recipe, const MatrixConfig& config,
                             const std::vector<Cell>& cells);

/// Into a file that stands in `folder`: what `faultline dissociate` writes (below recipes/NAME/ where there are several
/// recipes), and `steps/…` over (run, step, …): the series of all records, run by run, as virtual datasets on runs/NAME.h5.
void write(const std::vector<Merged>& all, RecordFile& file, const std::string& folder);

/// The table of `faultline dissociate`, one for each recipe; the same as JSON (schema faultline.sweep/1).
[[nodiscard]] std::string table(const std::vector<Merged>& all);
[[nodiscard]] std::string to_json(const std::vector<Merged>& all);

}  // namespace faultline::sweep
