// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/head_cells.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace faultline::verdict {
namespace {

bool is_kept(const Cell& cell, const HeadLayout& layout) {
    if (!layout.sizes_and_shift) return true;
    return cell.extent != Extent::feature && cell.direction != Direction::growth &&
           cell.direction != Direction::scatter;
}

Worst worst_of(const Cell& cell, const HeadValues& values, const std::vector<double>& sigma, double rms) {
    Worst worst;
    if (cell.direction != Direction::size && cell.direction != Direction::element) return worst;
    const Matrix &observed = values.observed, &truth = values.truth;
    double largest = 0, sum = 0;
    for (std::ptrdiff_t i = cell.extent == Extent::rows ? cell.index : 0, end = i + cell.rows; i < end; ++i) {
        double row = 0;
        std::ptrdiff_t at = 0;
        double element = -1;
        for (std::ptrdiff_t j = 0; j < truth.cols; ++j) {
            const double e = scaled_error(observed(i, j), truth(i, j), sigma[static_cast<std::size_t>(i)]);
            row += e * e;
            if (std::abs(e) > element) {
                element = std::abs(e);
                at = j;
            }
        }
        sum += row;
        const double size = cell.direction == Direction::size ? row : element;
        if (size <= largest) continue;
        largest = size;
        worst.row = i;
        worst.feature = cell.direction == Direction::size || truth.cols == 1 ? -1 : at;
        worst.share = row;
    }
    if (worst.row < 0) return worst;
    worst.share = sum > 0 ? worst.share / sum : 0;
    Norm norm;
    for (std::ptrdiff_t j = 0; j < truth.cols; ++j) norm.add(truth(worst.row, j));
    worst.truth = rms > 0 ? norm.rms(static_cast<double>(truth.cols)) / rms : 0;
    return worst;
}

NotFinite not_finite(const Matrix& values, const Matrix& beside, const Matrix& truth) {
    NotFinite found;
    for (std::ptrdiff_t i = 0; i < truth.rows; ++i) {
        bool some = false;
        for (std::ptrdiff_t j = 0; j < truth.cols; ++j) {
            if (std::isfinite(values(i, j)) || !std::isfinite(truth(i, j))) continue;
            some = true;
            if (found.elements++ > 0) continue;
            found.row = i;
            found.feature = truth.cols == 1 ? -1 : j;
            found.value = values(i, j);
            found.beside = beside(i, j);
        }
        found.rows += some;
    }
    return found;
}

}  // namespace

void Norm::add(double x) {
    x = std::abs(x);
    if (x == 0 || !std::isfinite(x)) return;
    if (x > scale_) {
        sum_ *= (scale_ / x) * (scale_ / x);
        scale_ = x;
    }
    sum_ += (x / scale_) * (x / scale_);
}

double Norm::rms(double count) const { return scale_ * std::sqrt(sum_ / count); }

WideReal Norm::squared() const { return WideReal(scale_) * WideReal(scale_) * WideReal(sum_); }

HeadTest::HeadTest(HeadValues values, HeadLayout layout)
    : values_(std::move(values)),
      layout_(std::move(layout)),
      row_errors_(static_cast<std::size_t>(values_.truth.rows)),
      cells_(cells_of(values_.truth.rows, values_.truth.cols, layout_.block, !layout_.direction.empty())) {
    count_nonfinite();
    for (const Cell& cell : cells_) of_runs_.emplace_back(cell.direction);
}

void HeadTest::count_nonfinite() {
    const Matrix &truth = values_.truth, &plan = values_.plan;
    Matrix& observed = values_.observed;
    head_.nonfinite = not_finite(observed, plan, truth);
    head_.plan_nonfinite = not_finite(plan, observed, truth);
    for (std::size_t a = 0; a < truth.values.size(); ++a) {
        const double value = observed.values[a], own = plan.values[a];
        if (!std::isfinite(truth.values[a]) || std::isfinite(own)) continue;
        if (std::isfinite(value)) {
            ++head_.unpredicted;
            observed.values[a] = truth.values[a];
        } else {
            head_.nonfinite_of_plan += own == value || (std::isnan(own) && std::isnan(value));
        }
    }
}

void HeadTest::add_size(const Matrix& run) {
    const Matrix& truth = values_.truth;
    Norm of_run;
    bool finite = true;
    for (std::ptrdiff_t r = 0; r < truth.rows; ++r)
        for (std::ptrdiff_t c = 0; c < truth.cols; ++c) {
            const double error = run(r, c) - truth(r, c);
            row_errors_[static_cast<std::size_t>(r)].add(error);
            of_run.add(error);
            finite = finite && (std::isfinite(error) || !std::isfinite(truth(r, c)));
        }
    head_.run_squared.push_back(finite ? of_run.squared() : WideReal(std::numeric_limits<double>::infinity()));
    ++runs_;
}

void HeadTest::sizes_are_whole() {
    const double elements = runs_ * static_cast<double>(values_.truth.cols);
    for (std::size_t r = 0; r < row_errors_.size(); ++r)
        sigma_.push_back(std::hypot(row_errors_[r].rms(elements), layout_.floor[r]));
}

std::vector<double> HeadTest::sums_of(const Matrix& values) const {
    return cell_sums(values.view(), values_.truth.view(), values_.bound.view(), sigma_, layout_.block,
                     layout_.direction);
}

void HeadTest::add_sums(const Matrix& run) {
    const std::vector<double> sums = sums_of(run);
    for (std::size_t c = 0; c < sums.size(); ++c) {
        of_runs_[c].add(sums[c]);
        if (cells_[c].direction == Direction::size && cells_[c].extent == Extent::head)
            head_.run_sizes.push_back(sums[c]);
    }
}

/// Variance that errors of the floor's size give a cell's signed sum, independent or all with one sign, or their square in
/// the root of its size, whatever their signs; of an element the largest.
double HeadTest::floor_variance(const Cell& cell) const {
    double variance = 0, sum = 0, largest = 0;
    for (std::ptrdiff_t i = cell.extent == Extent::rows ? cell.index : 0, end = i + cell.rows; i < end; ++i) {
        const double size = sigma_[static_cast<std::size_t>(i)];
        const double share = size > 0 ? layout_.floor[static_cast<std::size_t>(i)] / size : 0;
        variance += share * share;
        sum += share;
        largest = std::max(largest, share);
    }
    if (cell.direction == Direction::element) return largest * largest;
    const double per_row = cell.elements / static_cast<double>(cell.rows);
    return is_signed(cell.direction) && layout_.common_floor ? sum * sum * per_row * per_row : variance * per_row;
}

HeadCells HeadTest::result() && {
    const Matrix &truth = values_.truth, &observed = values_.observed;
    Norm of_truth;
    for (const double x : truth.values) of_truth.add(x);
    const double rms = of_truth.rms(static_cast<double>(truth.values.size()));
    const std::vector<double> kernel = sums_of(observed), plan = sums_of(values_.plan);
    const std::vector<double> doubt =
        cell_doubts(observed.view(), truth.view(), values_.bound.view(), sigma_, layout_.block, layout_.direction);
    for (std::size_t c = 0; c < cells_.size(); ++c) {
        const Cell& cell = cells_[c];
        if (!is_kept(cell, layout_)) continue;
        const CellNull null = of_runs_[c].null(floor_variance(cell), layout_.slack);
        head_.cells.push_back(cell);
        head_.null.push_back(null);
        head_.observed_sums.push_back(kernel[c]);
        head_.plan_sums.push_back(plan[c]);
        head_.observed.push_back(null.t(kernel[c]));
        head_.plan.push_back(null.t(plan[c]));
        head_.doubt.push_back(doubt[c]);
        head_.worst.push_back(worst_of(cell, values_, sigma_, rms));
    }
    return std::move(head_);
}

}  // namespace faultline::verdict
