// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/cells.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace faultline::verdict {

const char* name(Direction direction) {
    switch (direction) {
        case Direction::shift:
            return "shift";
        case Direction::growth:
            return "growth";
        case Direction::mean_key:
            return "mean_key";
        case Direction::size:
            return "size";
        case Direction::scatter:
            return "scatter";
        case Direction::element:
            return "element";
    }
    return "";
}

namespace {

// Stands for an error of any size beyond it, and for one in a row where no rounding makes any (sigma 0): its square, summed
// over any output and squared again, is a double.
constexpr double farthest = 0x1p200;

}  // namespace

double scaled_error(double value, double truth, double sigma) {
    // A value that is not finite counts elsewhere; a finite one however far off counts here.
    return std::isfinite(value) && value != truth ? std::clamp((value - truth) / sigma, -farthest, farthest) : 0;
}

std::string Cell::where() const {
    if (extent == Extent::feature) return fmt::format("feature {}", index);
    if (extent == Extent::rows) return fmt::format("rows {}-{}", index, index + rows - 1);
    return "all";
}

std::vector<Cell> cells_of(std::ptrdiff_t rows, std::ptrdiff_t cols, std::ptrdiff_t block, bool mean_key) {
    std::vector<Cell> cells;
    const auto n = static_cast<double>(rows), d = static_cast<double>(cols);
    for (const Direction direction : {Direction::shift, Direction::growth, Direction::mean_key, Direction::size}) {
        if (direction == Direction::mean_key && !mean_key) continue;
        const double per_row = direction == Direction::mean_key ? 1 : d;
        cells.push_back({direction, Extent::head, 0, rows, n * per_row});
        // One block is the head itself: the same sum a second time would be a second test of one thing.
        for (std::ptrdiff_t first = 0; block < rows && first < rows; first += block) {
            const std::ptrdiff_t count = std::min(block, rows - first);
            cells.push_back({direction, Extent::rows, first, count, static_cast<double>(count) * per_row});
        }
        if (direction == Direction::mean_key || direction == Direction::size) continue;
        for (std::ptrdiff_t j = 0; j < cols; ++j) cells.push_back({direction, Extent::feature, j, rows, n});
    }
    cells.push_back({Direction::scatter, Extent::head, 0, rows, n * d});
    cells.push_back({Direction::element, Extent::head, 0, rows, n * d});
    return cells;
}

std::vector<double> cell_sums(MatrixView<const double> value, MatrixView<const double> truth,
                              const std::vector<double>& sigma, std::ptrdiff_t block,
                              const std::vector<double>& direction) {
    const auto blocks = static_cast<std::size_t>((value.rows + block - 1) / block);
    const auto cols = static_cast<std::size_t>(value.cols);
    std::vector<double> shift(blocks), growth(blocks), key(blocks), size(blocks);
    std::vector<double> feature_shift(cols), feature_growth(cols);
    double largest = 0;
    for (std::ptrdiff_t i = 0; i < value.rows; ++i) {
        const auto b = static_cast<std::size_t>(i / block);
        const double size_of_row = sigma[static_cast<std::size_t>(i)];
        double row_shift = 0, row_growth = 0, row_key = 0, row_size = 0;
        for (std::size_t j = 0; j < cols; ++j) {
            const double t = truth.row(i)[j];
            const double e = scaled_error(value.row(i)[j], t, size_of_row);
            const double away = t > 0 ? e : t < 0 ? -e : 0;
            row_shift += e;
            row_growth += away;
            row_size += e * e;
            feature_shift[j] += e;
            feature_growth[j] += away;
            if (!direction.empty()) row_key += e * direction[j];
            largest = std::max(largest, std::abs(e));
        }
        shift[b] += row_shift, growth[b] += row_growth, key[b] += row_key, size[b] += row_size;
    }
    std::vector<double> sums;
    const auto put = [&](const std::vector<double>& by_block) {
        double all = 0;
        for (const double x : by_block) all += x;
        sums.push_back(all);
        if (blocks > 1) sums.insert(sums.end(), by_block.begin(), by_block.end());
    };
    put(shift);
    sums.insert(sums.end(), feature_shift.begin(), feature_shift.end());
    put(growth);
    sums.insert(sums.end(), feature_growth.begin(), feature_growth.end());
    if (!direction.empty()) put(key);
    put(size);
    double scatter = 0;
    for (const double x : feature_shift) scatter += x * x;
    sums.push_back(scatter);
    sums.push_back(largest);
    return sums;
}

}  // namespace faultline::verdict
