// SPDX-License-Identifier: Apache-2.0
// Small drawings for the report: maps of a number over tiles, bars of a share.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace faultline::attribution {

/// Text for HTML and SVG: & < > " written as entities, what is not printable as \xNN.
[[nodiscard]] std::string html(std::string_view text);

/// "#rrggbb" from blue (-1) over white (0) to red (+1); grey for a NaN.
[[nodiscard]] std::string signed_color(double x);

/// One head's tiles, [rows][columns]: `value` in [-1, 1] gives the colour; `label` the tooltip of each cell. Cells whose value
/// is NaN (not visited) stay empty. At most some 64 x 64 cells: larger grids are averaged over blocks by the caller.
struct TileMap {
    int rows = 0, columns = 0;
    std::vector<double> value;
    std::vector<std::string> label;
    std::string title;
};
[[nodiscard]] std::string drawing(const TileMap& map);

/// A bar from 0: `share` 1 is the full width, negative shares go to the left, and what is beyond twice the width is cut.
[[nodiscard]] std::string bar(double share);

/// A row of cells, one for each number in [0, 1], white to dark: p_max over the rows of a head.
[[nodiscard]] std::string strip(const std::vector<double>& values, std::string_view title);

/// The legend of signed_color.
[[nodiscard]] std::string legend();

}  // namespace faultline::attribution
