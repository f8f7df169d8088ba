// SPDX-License-Identifier: Apache-2.0
// What a streaming softmax carries from key tile to key tile: the running row maximum and row sum.
#pragma once

#include <vector>

#include <faultline/cpu/scores.hpp>

namespace faultline::cpu {

/// The partial sums of each row. A `quad` sum has four lanes, which meet only when the row is read.
class RowSums {
  public:
    RowSums(std::ptrdiff_t rows, RowSumOrder order)
        : lanes_(order == RowSumOrder::quad ? 4 : 1),
          sums_(static_cast<std::size_t>(rows) * static_cast<std::size_t>(lanes_), 0.0) {}

    [[nodiscard]] int lanes() const { return lanes_; }
    [[nodiscard]] double* row(std::ptrdiff_t i) { return sums_.data() + i * lanes_; }
    /// The row's sum as the kernel joins it, each addition rounded by `rounded`.
    template <class Round>
    [[nodiscard]] double joined(std::ptrdiff_t i, Round&& rounded) const {
        const double* s = sums_.data() + i * lanes_;
        if (lanes_ == 1) return s[0];
        return rounded(rounded(s[0] + s[2]) + rounded(s[1] + s[3]));  // shuffle by 2, then by 1
    }

  private:
    int lanes_;
    std::vector<double> sums_;
};

/// lanes <- lanes alpha + sum_j p[j] in the kernel's order, every operation rounded by `rounded`.
template <class Round>
void add_row(const double* p, std::ptrdiff_t count, RowSumOrder order, double alpha, double* lanes, Round&& rounded) {
    if (order != RowSumOrder::quad) lanes[0] = rounded(lanes[0] * alpha);
    switch (order) {
        case RowSumOrder::sequential:
            for (std::ptrdiff_t j = 0; j < count; ++j) lanes[0] = rounded(lanes[0] + p[j]);
            return;
        case RowSumOrder::quad:
            for (std::ptrdiff_t t = 0; t < 4; ++t) {
                const std::ptrdiff_t first = 2 * t;
                // lane and alpha are floats, so their product is exact in binary64 and this is one fma.
                lanes[t] = rounded(lanes[t] * alpha + (first < count ? p[first] : 0.0));
                for (std::ptrdiff_t j = first + 1; j < count; j += (j % 2 == 1) ? 7 : 1)
                    lanes[t] = rounded(lanes[t] + p[j]);
            }
            return;
        case RowSumOrder::warp_of_32:
            for (std::ptrdiff_t block = 0; block < count; block += 32) {
                double lane[4] = {0, 0, 0, 0};
                for (std::ptrdiff_t j = block; j < std::min(block + 32, count); ++j) {
                    double& sum = lane[(j % 8) / 2];
                    sum = rounded(sum + p[j]);
                }
                lanes[0] = rounded(lanes[0] + rounded(rounded(lane[0] + lane[1]) + rounded(lane[2] + lane[3])));
            }
            return;
        case RowSumOrder::pairwise: {
            std::vector<double> level(p, p + count);
            while (level.size() > 1) {
                std::size_t half = (level.size() + 1) / 2;
                for (std::size_t j = 0; j < half; ++j)
                    if (2 * j + 1 < level.size())
                        level[j] = rounded(level[2 * j] + level[2 * j + 1]);
                    else
                        level[j] = level[2 * j];
                level.resize(half);
            }
            if (!level.empty()) lanes[0] = rounded(lanes[0] + level[0]);
            return;
        }
    }
}

/// The maximum that a tile's scores lead to from the old one, before the row_max site rounds it.
double next_maximum(const double* s, std::ptrdiff_t count, double old_maximum, const Schedule& schedule,
                    const Scales& scales);

}  // namespace faultline::cpu
