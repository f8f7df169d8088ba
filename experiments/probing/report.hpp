// SPDX-License-Identifier: Apache-2.0
// What probes found, as data: a few lines of numbers for a person, and arrays with named dimensions for a plot.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <faultline/record/axes.hpp>
#include <faultline/record/manifest.hpp>

namespace faultline::probing {

/// One array of the file: dataset PLACE/PROBE/name, row-major over the axes. A NaN is what there was nothing to measure of.
struct Quantity {
    std::string name;
    About about;
    std::vector<Axis> axes;
    std::vector<double> values;
};

/// One line of the table: a number per column of its block.
struct Line {
    std::string name;
    std::string unit;
    std::vector<double> values;
};

/// What one probe says of one place.
struct Block {
    std::string place;  ///< "layer0", "layer0.w_q", "runs"
    std::string probe;
    std::string note;                  ///< how it was measured, in a line
    std::vector<std::string> columns;  ///< "head 0", …
    std::vector<Line> lines;
    std::vector<std::pair<std::string, std::vector<std::string>>> labels;  ///< names along a dimension
    std::vector<Quantity> quantities;
};

struct Report {
    std::string kind;  ///< "capture", "checkpoint", "run"
    std::vector<std::string> inputs;
    std::string plan;  ///< name; empty where none took part
    std::vector<Block> blocks;
};

/// The table: a block after the other, numbers per head; over eight columns least, median and largest.
[[nodiscard]] std::string table(const Report& report);
/// faultline.probe/1: {"schema", "kind", "inputs", "plan", "results": [{"place", "probe", "note", "columns",
/// "values": {NAME: {"unit", "values"}}}]}; NaN is null, infinities are "inf" and "-inf".
[[nodiscard]] std::string to_json(const Report& report);
/// kind "probe": every quantity with units and named dimensions. WorkError when the disk refuses.
void write_h5(const Report& report, const std::string& path, const Manifest& manifest);

}  // namespace faultline::probing
