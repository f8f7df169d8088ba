// SPDX-License-Identifier: Apache-2.0
// Zero-sum projections of the cast score gradient. In exact arithmetic sum_j ds_ij = 0 for every row (softmax does not
// change when a constant is added to its scores); after the cast the sum is r_i, and r_i times the mean key leaks into dq.
// Our readings of "project so that the sum is 0 again"; see docs/design.md for their names and what each leaves.
#pragma once

#include <vector>

#include <faultline/cpu/scores.hpp>

namespace faultline::cpu {

/// uniform, weighted: dq_i -= r_i sum_j w_ij k_j and dk_j -= sum_i r_i w_ij q_i, in fp32 beside the products, with
/// w_ij = 1/n_i over visible keys, or p_ij / sum_j p_ij. largest: -r_i goes onto the largest element before the products.
class ZeroSumProjection {
  public:
    ZeroSumProjection() = default;
    /// `exact`: in binary64, where the plan's own sums are.
    ZeroSumProjection(ZeroSum kind, const Mask& mask, bool exact);

    [[nodiscard]] bool active() const { return kind_ != ZeroSum::none; }

    /// First sweep: row sums of the cast score gradient `ds`, of p, and the place of the largest element.
    void collect(const TileAt& where, MatrixView<const double> p, MatrixView<const double> ds);
    void finish(MatrixView<const double> k);
    /// Second sweep, before the products: `largest` changes the tile.
    void adjust_tile(const TileAt& where, MatrixView<const double> p, MatrixView<double> ds) const;
    /// Second sweep, beside the products.
    void accumulate_rank_one(const TileAt& where, MatrixView<const double> p, MatrixView<const double> k,
                             MatrixView<const double> q);
    /// After the products.
    void apply_rank_one(MatrixView<const double> q, Matrix& dq, Matrix& dk) const;

  private:
    [[nodiscard]] double rounded(double x) const { return exact_ ? x : static_cast<double>(static_cast<float>(x)); }
    [[nodiscard]] double weight(std::ptrdiff_t query, std::ptrdiff_t key, double p) const;

    ZeroSum kind_ = ZeroSum::none;
    bool exact_ = false;
    Mask mask_{};
    std::vector<double> row_sum_;  ///< r_i
    std::vector<double> p_sum_;    ///< sum_j p_ij
    std::vector<double> largest_;  ///< largest |ds_ij|
    std::vector<std::ptrdiff_t> largest_key_;
    Matrix dq_part_, dk_part_;
};

}  // namespace faultline::cpu
