// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/statistics.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <faultline/verdict/student_t.hpp>

namespace faultline::verdict {
namespace {

// The logarithm of a sum of squares of a row-scaled error is never known better than this, whatever 32 runs say: 1%. A plan
// that only rounds its outputs has runs of equal size.
constexpr double least_log_spread = 0.01;
constexpr double smallest = std::numeric_limits<double>::min();

}  // namespace

CellNull null_of(const Cell& cell, const std::vector<double>& sums, double floor_variance, double slack) {
    CellNull null;
    null.direction = cell.direction;
    null.runs = static_cast<double>(sums.size());
    if (is_signed(cell.direction)) {
        double squares = 0;
        for (const double s : sums) squares += s * s;
        null.spread = std::sqrt(squares / null.runs + floor_variance);
        return null;
    }
    // Squares for size and scatter, magnitudes for element.
    const double power = cell.direction == Direction::element ? 1 : 2;
    null.slack = cell.direction == Direction::scatter ? 0 : power * std::log(slack);
    double squares = 0;
    null.exact = std::all_of(sums.begin(), sums.end(), [](double s) { return s == 0; });
    for (const double s : sums) null.center += std::log(std::max(s, smallest)) / null.runs;
    for (const double s : sums) {
        const double apart = std::log(std::max(s, smallest)) - null.center;
        squares += apart * apart;
    }
    null.spread = std::max(std::sqrt(squares / (null.runs - 1)), power * least_log_spread);
    return null;
}

double CellNull::t(double observed) const {
    if (is_signed(direction)) return spread > 0 ? observed / spread : 0;
    if (exact && observed > 0) return std::numeric_limits<double>::infinity();
    if (observed <= smallest) return -std::numeric_limits<double>::infinity();
    return (std::log(observed) - center - slack) / (spread * std::sqrt(1 + 1 / runs));
}

double CellNull::log10_p(double t) const {
    if (is_signed(direction)) return log10_two_sided_p(t, degrees());
    return t > 0 ? log10_two_sided_p(t, degrees()) - std::log10(2.0) : 0;
}

}  // namespace faultline::verdict
