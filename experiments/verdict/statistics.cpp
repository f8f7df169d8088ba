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

/// Squares for size and scatter, magnitudes for element.
double power_of(Direction direction) { return direction == Direction::element ? 1 : 2; }

}  // namespace

void NullSums::add(double sum) {
    ++runs_;
    if (is_signed(direction_)) {
        squares_ += sum * sum;
        return;
    }
    all_zero_ = all_zero_ && sum == 0;
    const double logarithm = std::log(std::max(sum, smallest)), away = logarithm - mean_;
    mean_ += away / runs_;
    squares_ += away * (logarithm - mean_);
}

CellNull NullSums::null(double floor_variance, double slack) const {
    CellNull null;
    null.direction = direction_;
    null.runs = runs_;
    if (is_signed(direction_)) {
        null.spread = std::sqrt(squares_ / runs_ + floor_variance);
        return null;
    }
    const double power = power_of(direction_);
    null.slack = direction_ == Direction::scatter ? 0 : power * std::log(slack);
    null.exact = all_zero_;
    null.floor = std::sqrt(floor_variance);
    null.center = mean_;
    null.spread = std::max(std::sqrt(squares_ / (runs_ - 1)), power * least_log_spread);
    return null;
}

double CellNull::t(double observed) const {
    if (is_signed(direction)) return spread > 0 ? observed / spread : 0;
    const double power = power_of(direction);
    if (exact) return observed > 0 ? std::pow(observed, 1 / power) / floor : 0;  // infinite where there is no floor
    if (observed <= smallest) return -std::numeric_limits<double>::infinity();
    const double away = std::log(observed) - center - slack, deviation = spread * std::sqrt(1 + 1 / runs);
    if (away <= 0 || floor == 0) return away / deviation;
    // The runs are deviation apart in logarithms, and what they leave out moves the root by floor for each standard
    // deviation: away = t deviation + power log(1 + t floor / middle), whose right side increases with t.
    const double of_middle = floor / std::exp(center / power);
    double least = 0, most = away / deviation;
    for (int i = 0; i < 60; ++i) {
        const double t = (least + most) / 2;
        (t * deviation + power * std::log1p(t * of_middle) < away ? least : most) = t;
    }
    return (least + most) / 2;
}

CellNull::Range CellNull::t_range(double observed, double doubt) const {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const double as_is = t(observed);
    if (doubt == 0) return {as_is, as_is};
    if (is_signed(direction)) {
        // A truth that moves the observed sum moves those of the runs by as much: the root mean square of theirs is within
        // doubt of what it was.
        const double size = std::abs(observed), narrow = spread - doubt;
        return {std::max(size - doubt, 0.0) / (spread + doubt), narrow > 0 ? (size + doubt) / narrow : infinity};
    }
    const double power = power_of(direction), root = std::pow(observed, 1 / power);
    // A kernel that has what every run has, where the truth is known to within the rounding's size, has no error to speak of.
    if (exact && floor == 0)
        return {root > doubt ? infinity : -infinity, root > 0 || doubt >= 1 ? infinity : -infinity};
    if (exact) return {std::max(root - doubt, 0.0) / floor, (root + doubt) / floor};
    // The spread of the runs' logarithms is taken as it is, their middle as it may be.
    const double middle = std::exp(center / power);
    const auto against = [&](double of_kernel, double of_runs) {
        CellNull moved = *this;
        moved.center = power * std::log(std::max(of_runs, smallest));
        return moved.t(std::pow(std::max(of_kernel, 0.0), power));
    };
    return {against(root - doubt, middle + doubt), against(root + doubt, middle - doubt)};
}

double CellNull::log10_p(double t) const {
    if (is_signed(direction)) return log10_two_sided_p(t, degrees());
    return t > 0 ? log10_two_sided_p(t, degrees()) - std::log10(2.0) : 0;
}

}  // namespace faultline::verdict
