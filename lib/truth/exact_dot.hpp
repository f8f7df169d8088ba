// SPDX-License-Identifier: Apache-2.0
// Dot products of numbers in low formats as sums of integers, exactly and without any error analysis, for the judge: a
// row is integers times a unit of its own, their products add up in 128 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <faultline/tensor/matrix_view.hpp>
#include <faultline/truth/mpfr_real.hpp>

namespace faultline::detail {

/// The rows of a matrix as integers: element (i, c) = integer(i, c) 2^unit(i) where has(i).
class IntegerRows {
  public:
    explicit IntegerRows(MatrixView<const double> a);

    /// Whether the row's integers stay below 2^62.
    [[nodiscard]] bool has(std::ptrdiff_t i) const { return bits_[static_cast<std::size_t>(i)] <= most_bits; }
    [[nodiscard]] const std::int64_t* row(std::ptrdiff_t i) const { return integers_.data() + i * cols_; }
    [[nodiscard]] int unit(std::ptrdiff_t i) const { return units_[static_cast<std::size_t>(i)]; }
    [[nodiscard]] int bits(std::ptrdiff_t i) const { return bits_[static_cast<std::size_t>(i)]; }  ///< of the largest

  private:
    static constexpr int most_bits = 62;
    std::ptrdiff_t cols_;
    std::vector<std::int64_t> integers_;
    std::vector<int> units_, bits_;
};

/// sum <- sum_c a_ic b_jc rounded once, size <- sum_c |a_ic b_jc| rounded up. False where 128 bits might not hold the
/// sums: then nothing is done. Both have as many columns.
bool exact_dot(const IntegerRows& a, std::ptrdiff_t i, const IntegerRows& b, std::ptrdiff_t j, std::ptrdiff_t count,
               Real& sum, Real& size);

}  // namespace faultline::detail
