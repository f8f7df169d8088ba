// SPDX-License-Identifier: Apache-2.0
// What a matrix says: for each source and intervention, over the seeds. As a table, as JSON (schema
// faultline.dissociation/1), as HDF5 (kind dissociation).
#pragma once

#include <string>
#include <vector>

#include <faultline/dissociation/matrix.hpp>
#include <faultline/record/record_file.hpp>

namespace faultline {

/// One source under one intervention, over the seeds that are done.
struct Cell {
    std::string source, intervention;
    std::vector<const RunResult*> runs;
    std::vector<RunVerdict> verdicts;  ///< parallel; of a control without a control, ratios of 1
    [[nodiscard]] int runaways() const;
    [[nodiscard]] int losses() const;
    [[nodiscard]] Spread over(double (*value)(const RunResult&)) const;
};
/// Cells in the order of the runs; those without a finished run are left out.
[[nodiscard]] std::vector<Cell> cells(const RunMatrix& matrix);

/// For people: one line for each cell, grouped by source.
[[nodiscard]] std::string table(const RunMatrix& matrix);
[[nodiscard]] std::string to_json(const RunMatrix& matrix);
/// Datasets over (source, intervention, seed), NaN where there was no run; series over (run, monitor); links runs/N to the
/// records in `folder`, a path relative to the file's own folder (empty: none). All of it below the group `prefix`, where one
/// is given ("recipes/small/"); the root's attributes are the caller's then.
void write(const RunMatrix& matrix, RecordFile& file, const std::string& folder, const std::string& prefix = "");

}  // namespace faultline
