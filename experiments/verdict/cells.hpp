// SPDX-License-Identifier: Apache-2.0
// Where an error could be biased or too large: sums of an output's errors over a head, over each feature of a head and over
// each block of its rows, each error in units of what the plan's rounding makes of its row.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <faultline/tensor/matrix.hpp>

namespace faultline::verdict {

/// What is summed over a cell.
enum class Direction : unsigned char {
    shift,     ///< e: towards larger values
    growth,    ///< sign(truth) e: away from zero
    mean_key,  ///< <e_i, mean key>, dq alone: where a broken zero-sum law of the score gradient puts its error
    size,      ///< e^2
    scatter,   ///< over features, the squared sum of e down the feature: biases of features that differ in sign
    element,   ///< the largest |e|
};
[[nodiscard]] const char* name(Direction direction);
/// Whether the sum is of signed errors, and 0 on average where signs are random.
constexpr bool is_signed(Direction d) {
    return d == Direction::shift || d == Direction::growth || d == Direction::mean_key;
}

enum class Extent : unsigned char { head, feature, rows };

struct Cell {
    Direction direction = Direction::shift;
    Extent extent = Extent::head;
    std::ptrdiff_t index = 0;                 ///< the feature, or the first row
    std::ptrdiff_t rows = 0;                  ///< of a block of rows
    double elements = 0;                      ///< summed up
    [[nodiscard]] std::string where() const;  ///< "all", "feature 29", "rows 64-127"
};

/// The cells of a [rows, cols] output, in a fixed order; blocks of `block` rows.
[[nodiscard]] std::vector<Cell> cells_of(std::ptrdiff_t rows, std::ptrdiff_t cols, std::ptrdiff_t block, bool mean_key);

/// (value - truth) / sigma of an element; a row of sigma 0 has no error by right: any is as large as one can be. Values that
/// are not finite count as 0.
[[nodiscard]] double scaled_error(double value, double truth, double sigma);

/// The sums in that order, of value - truth over sigma. `bound`: of the truth, certified; where it is as large as the truth
/// the sign is not known, and the element is in no growth. `direction`: unit vector [cols] along the mean key, or empty. A row
/// of sigma 0 has no error by right: any is as large as one can be. Values that are not finite count as 0, and must be
/// counted elsewhere.
[[nodiscard]] std::vector<double> cell_sums(MatrixView<const double> value, MatrixView<const double> truth,
                                            MatrixView<const double> bound, const std::vector<double>& sigma,
                                            std::ptrdiff_t block, const std::vector<double>& direction);

/// How far each sum may lie from what the exact truth would give, which `truth` is within `bound` of: of signed sums the most
/// that they move by, of a size or scatter the most that its root does, of an element the most that it does. In a row of
/// sigma 0 an error larger than the bound is one whatever the truth is; below it even a value that is the truth's middle is
/// in doubt, as far as can be.
[[nodiscard]] std::vector<double> cell_doubts(MatrixView<const double> value, MatrixView<const double> truth,
                                              MatrixView<const double> bound, const std::vector<double>& sigma,
                                              std::ptrdiff_t block, const std::vector<double>& direction);

}  // namespace faultline::verdict
