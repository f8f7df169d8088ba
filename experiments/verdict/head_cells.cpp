// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/head_cells.hpp>

#include <algorithm>
#include <cmath>

namespace faultline::verdict {
namespace {

/// rms error of each row over the runs, with the floor.
std::vector<double> row_sizes(const HeadValues& values, const std::vector<double>& floor,
                              std::vector<WideReal>& squared) {
    const Matrix& truth = *values.truth;
    const auto count = static_cast<double>(values.runs.size());
    std::vector<Norm> of_run(values.runs.size());
    std::vector<double> sigma;
    for (std::ptrdiff_t r = 0; r < truth.rows; ++r) {
        Norm errors;
        for (std::size_t run = 0; run < values.runs.size(); ++run)
            for (std::ptrdiff_t c = 0; c < truth.cols; ++c) {
                const double error = (*values.runs[run])(r, c) - truth(r, c);
                errors.add(error);
                of_run[run].add(error);
            }
        sigma.push_back(
            std::hypot(errors.rms(count * static_cast<double>(truth.cols)), floor[static_cast<std::size_t>(r)]));
    }
    for (const Norm& norm : of_run) squared.push_back(norm.squared());
    return sigma;
}

/// Variance that errors of the floor's size give a cell's signed sum: independent, or all with one sign.
double floor_variance(const Cell& cell, const std::vector<double>& sigma, const HeadLayout& layout) {
    double variance = 0, sum = 0;
    for (std::ptrdiff_t i = cell.extent == Extent::rows ? cell.index : 0, end = i + cell.rows; i < end; ++i) {
        const double size = sigma[static_cast<std::size_t>(i)];
        const double share = size > 0 ? layout.floor[static_cast<std::size_t>(i)] / size : 0;
        variance += share * share;
        sum += share;
    }
    const double per_row = cell.elements / static_cast<double>(cell.rows);
    return layout.common_floor ? sum * sum * per_row * per_row : variance * per_row;
}

bool is_kept(const Cell& cell, const HeadLayout& layout) {
    if (!layout.sizes_and_shift) return true;
    return cell.extent != Extent::feature && cell.direction != Direction::growth &&
           cell.direction != Direction::scatter;
}

Worst worst_of(const Cell& cell, const HeadValues& values, const std::vector<double>& sigma, double rms) {
    Worst worst;
    if (cell.direction != Direction::size && cell.direction != Direction::element) return worst;
    const Matrix &observed = *values.observed, &truth = *values.truth;
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

HeadCells head_cells(const HeadValues& values, const HeadLayout& layout) {
    HeadCells head;
    const Matrix &truth = *values.truth, &observed = *values.observed;
    const std::vector<double> sigma = row_sizes(values, layout.floor, head.run_squared);
    Norm of_truth;
    for (const double x : truth.values) of_truth.add(x);
    const double rms = of_truth.rms(static_cast<double>(truth.values.size()));
    const auto sums_of = [&](const Matrix& m) {
        return cell_sums(m.view(), truth.view(), sigma, layout.block, layout.direction);
    };
    std::vector<std::vector<double>> runs;
    for (const Matrix* run : values.runs) runs.push_back(sums_of(*run));
    const std::vector<double> kernel = sums_of(observed), plan = sums_of(*values.plan);
    const std::vector<Cell> cells = cells_of(truth.rows, truth.cols, layout.block, !layout.direction.empty());
    for (std::size_t c = 0; c < cells.size(); ++c) {
        const Cell& cell = cells[c];
        if (!is_kept(cell, layout)) continue;
        std::vector<double> of_cell;
        for (const std::vector<double>& s : runs) of_cell.push_back(s[c]);
        const CellNull null = null_of(cell, of_cell, floor_variance(cell, sigma, layout), layout.slack);
        head.cells.push_back(cell);
        head.null.push_back(null);
        head.observed_sums.push_back(kernel[c]);
        head.plan_sums.push_back(plan[c]);
        head.observed.push_back(null.t(kernel[c]));
        head.plan.push_back(null.t(plan[c]));
        head.worst.push_back(worst_of(cell, values, sigma, rms));
        if (cell.direction == Direction::size && cell.extent == Extent::head) head.run_sizes = of_cell;
    }
    for (std::size_t a = 0; a < observed.values.size(); ++a)
        if (!std::isfinite(observed.values[a]) && std::isfinite(truth.values[a])) {
            const double own = values.plan->values[a];
            ++head.nonfinite;
            head.nonfinite_of_plan += own == observed.values[a] || (std::isnan(own) && std::isnan(observed.values[a]));
        }
    return head;
}

}  // namespace faultline::verdict
