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

namespace {

/// One number a cell, in the order of cells_of, from sums over blocks of rows and over features.
class BlockSums {
  public:
    BlockSums(std::ptrdiff_t rows, std::size_t cols, std::ptrdiff_t block, bool mean_key)
        : block_(block),
          mean_key_(mean_key),
          shift(static_cast<std::size_t>((rows + block - 1) / block)),
          growth(shift.size()),
          key(shift.size()),
          size(shift.size()),
          feature_shift(cols),
          feature_growth(cols) {}

    [[nodiscard]] std::size_t block_of(std::ptrdiff_t row) const { return static_cast<std::size_t>(row / block_); }
    /// `finish` makes of a sum of squares what is wanted of it.
    template <class Finish>
    [[nodiscard]] std::vector<double> in_order(Finish finish) const {
        std::vector<double> sums;
        const auto put = [&](const std::vector<double>& by_block, auto made) {
            double all = 0;
            for (const double x : by_block) all += x;
            sums.push_back(made(all));
            if (by_block.size() < 2) return;
            for (const double x : by_block) sums.push_back(made(x));
        };
        const auto as_is = [](double x) { return x; };
        put(shift, as_is);
        sums.insert(sums.end(), feature_shift.begin(), feature_shift.end());
        put(growth, as_is);
        sums.insert(sums.end(), feature_growth.begin(), feature_growth.end());
        if (mean_key_) put(key, as_is);
        put(size, finish);
        double scatter = 0;
        for (const double x : feature_shift) scatter += x * x;
        sums.push_back(finish(scatter));
        sums.push_back(largest);
        return sums;
    }

  private:
    std::ptrdiff_t block_;
    bool mean_key_;

  public:
    std::vector<double> shift, growth, key, size, feature_shift, feature_growth;
    double largest = 0;
};

}  // namespace

std::vector<double> cell_sums(MatrixView<const double> value, MatrixView<const double> truth,
                              MatrixView<const double> bound, const std::vector<double>& sigma, std::ptrdiff_t block,
                              const std::vector<double>& direction) {
    const auto cols = static_cast<std::size_t>(value.cols);
    BlockSums sums(value.rows, cols, block, !direction.empty());
    for (std::ptrdiff_t i = 0; i < value.rows; ++i) {
        const std::size_t b = sums.block_of(i);
        const double size_of_row = sigma[static_cast<std::size_t>(i)];
        double row_shift = 0, row_growth = 0, row_key = 0, row_size = 0;
        for (std::size_t j = 0; j < cols; ++j) {
            const double t = truth.row(i)[j];
            const double e = scaled_error(value.row(i)[j], t, size_of_row);
            const double away = std::abs(t) <= bound.row(i)[j] ? 0 : t > 0 ? e : -e;
            row_shift += e;
            row_growth += away;
            row_size += e * e;
            sums.feature_shift[j] += e;
            sums.feature_growth[j] += away;
            if (!direction.empty()) row_key += e * direction[j];
            sums.largest = std::max(sums.largest, std::abs(e));
        }
        sums.shift[b] += row_shift, sums.growth[b] += row_growth, sums.key[b] += row_key, sums.size[b] += row_size;
    }
    return sums.in_order([](double x) { return x; });
}

std::vector<double> cell_doubts(MatrixView<const double> value, MatrixView<const double> truth,
                                MatrixView<const double> bound, const std::vector<double>& sigma, std::ptrdiff_t block,
                                const std::vector<double>& direction) {
    const auto cols = static_cast<std::size_t>(value.cols);
    BlockSums sums(value.rows, cols, block, !direction.empty());
    for (std::ptrdiff_t i = 0; i < value.rows; ++i) {
        const std::size_t b = sums.block_of(i);
        const double size_of_row = sigma[static_cast<std::size_t>(i)];
        for (std::size_t j = 0; j < cols; ++j) {
            const double known_to = bound.row(i)[j], apart = std::abs(value.row(i)[j] - truth.row(i)[j]);
            double doubt = 0;
            if (size_of_row > 0)
                doubt = std::min(known_to / size_of_row, farthest);
            else if (known_to > 0 && apart <= known_to)
                doubt = farthest;
            sums.shift[b] += doubt;
            sums.growth[b] += doubt;
            sums.size[b] += doubt * doubt;
            sums.feature_shift[j] += doubt;
            sums.feature_growth[j] += doubt;
            if (!direction.empty()) sums.key[b] += doubt * std::abs(direction[j]);
            sums.largest = std::max(sums.largest, doubt);
        }
    }
    return sums.in_order([](double x) { return std::sqrt(x); });
}

}  // namespace faultline::verdict
