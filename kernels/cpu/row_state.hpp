// SPDX-License-Identifier: Apache-2.0
// What a streaming softmax carries from key tile to key tile: the running row maximum and row sum.
#pragma once

#include <vector>

#include <faultline/cpu/row_arithmetic.hpp>
#include <faultline/cpu/scores.hpp>

namespace faultline::cpu {

/// The partial sums of each row. A `quad` sum has four lanes, which meet only when the row is read.
class RowSums {
  public:
    RowSums(std::ptrdiff_t rows, RowSumOrder order)
        : order_(order),
          lanes_(lanes_of(order)),
          sums_(static_cast<std::size_t>(rows) * static_cast<std::size_t>(lanes_), 0.0) {}

    [[nodiscard]] int lanes() const { return lanes_; }
    [[nodiscard]] double* row(std::ptrdiff_t i) { return sums_.data() + i * lanes_; }
    /// The row's sum as the kernel joins it, each addition rounded by `rounded`.
    template <class Round>
    [[nodiscard]] double joined(std::ptrdiff_t i, Round&& rounded) const {
        return joined_lanes(sums_.data() + i * lanes_, order_, rounded);
    }

  private:
    RowSumOrder order_;
    int lanes_;
    std::vector<double> sums_;
};

}  // namespace faultline::cpu
