// SPDX-License-Identifier: Apache-2.0
// The leading singular directions of a weight that changes a little at each step: block power iteration (orthogonal
// iteration with Rayleigh-Ritz, Golub and Van Loan, Matrix Computations, 8.2.4), started from the directions of the step
// before. A decomposition from nothing costs fifty times as much at width 64 and thousands of times at 768.
#pragma once

#include <cstdint>

#include <Eigen/Core>

#include <faultline/tensor/matrix_view.hpp>

namespace faultline {

/// The matrix as Eigen has it, in binary64.
[[nodiscard]] Eigen::MatrixXd to_eigen(MatrixView<const float> w);

class LeadingDirections {
  public:
    static constexpr int extra_by_default = 3;
    /// `k` directions (fewer where the matrix has fewer), followed in a block of k + `extra`: the iteration converges by
    /// the gap between sigma_k and the first singular value outside the block.
    explicit LeadingDirections(int k, int extra = extra_by_default) : k_(k), extra_(extra) {}

    /// Follows W to its current value: iterates until |W^T u_i - sigma_i v_i| <= tolerance sigma_1 for i < k, or
    /// max_iterations are done. A cold start takes a fixed pseudo-random block. Returns the iterations. The residual proves
    /// singular directions, not that they are the leading ones: a direction that becomes large from one update to the next
    /// and is orthogonal to the whole block is found by what little of it the block holds, which is the rounding of 2^-53 at
    /// least and grows by (sigma_new/sigma_k)^2 an update; training's own noise of 1e-5 finds it in the same update.
    /// W with an element that is not finite has none: sigma and directions are NaN.
    int update(const Eigen::MatrixXd& w, double tolerance = 1e-6, int max_iterations = 200);
    /// The same of W = A B^T from the factors A [rows, d] and B [cols, d], without forming the product: W_Q W_K^T of a head.
    int update_product(const Eigen::MatrixXd& a, const Eigen::MatrixXd& b, double tolerance = 1e-6,
                       int max_iterations = 200);

    /// [rows, k] and [cols, k], orthonormal columns in descending order of sigma.
    [[nodiscard]] const Eigen::MatrixXd& left() const { return left_; }
    [[nodiscard]] const Eigen::MatrixXd& right() const { return right_; }
    [[nodiscard]] const Eigen::VectorXd& sigma() const { return sigma_; }
    /// max_i |W^T u_i - sigma_i v_i| / sigma_1 of the last update.
    [[nodiscard]] double residual() const { return residual_; }

    /// State for a checkpoint: the block that the next update starts from. A run that resumes from it goes on bit by bit.
    [[nodiscard]] const Eigen::MatrixXd& block() const { return block_; }
    /// The block that a weight with so many columns (and rows) starts from where there is none.
    [[nodiscard]] Eigen::MatrixXd cold_start(Eigen::Index columns) const;
    void set_block(Eigen::MatrixXd block) { block_ = std::move(block); }

  private:
    template <class Apply, class ApplyTransposed>
    int iterate(Eigen::Index rows, Eigen::Index cols, Eigen::Index rank, const Apply& apply,
                const ApplyTransposed& apply_transposed, double tolerance, int max_iterations);
    int k_, extra_;
    Eigen::MatrixXd block_;  ///< [cols, k + extra]
    Eigen::MatrixXd left_, right_;
    Eigen::VectorXd sigma_;
    double residual_ = 0;
};

}  // namespace faultline
