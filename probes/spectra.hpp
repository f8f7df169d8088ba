// SPDX-License-Identifier: Apache-2.0
// Spectra of the QK weights, and what an update or an error does along their leading directions.
// Leading three directions as the channel of collapse: arXiv 2608.02091, abstract; effective and stable rank as monitors:
// arXiv 2606.28116 (effective rank: Roy and Vetterli, EUSIPCO 2007, here with p ~ sigma^2).
#pragma once

#include <span>
#include <vector>

#include <faultline/tensor/matrix_view.hpp>

namespace faultline {

/// The `count` largest singular values of W, falling; 0 for those that it does not have. From the eigenvalues of the
/// smaller of W^T W and W W^T in double: the largest is good to some 2^-50, one that is r times smaller to r^2 2^-50. NaN
/// where an element is not finite.
[[nodiscard]] std::vector<double> singular_values(MatrixView<const float> w, int count);

/// Those of W_Q W_K^T, both [width, head_dim], without forming the product: of R_Q R_K^T, the triangular factors of their QR
/// decompositions (Q is orthogonal). sigma_i is good to some 2^-50 |W_Q| |W_K| / sigma_1 times (sigma_1 / sigma_i)^2, also
/// where the two weights have different leading directions and sigma_1 is far below |W_Q| |W_K|.
[[nodiscard]] std::vector<double> product_singular_values(MatrixView<const float> w_q, MatrixView<const float> w_k,
                                                          int count);

/// exp(-sum p log p) of p_i = energies_i / sum: the number of directions that share the energy; 1 for one, n for n equal
/// ones. `energies` are squared singular values; negative ones (roundings of 0) count as 0. NaN without any energy, or
/// where one is not finite.
[[nodiscard]] double effective_rank(std::span<const double> energies);
/// sum / largest: |W|_F^2 / sigma_1^2. NaN as above.
[[nodiscard]] double stable_rank(std::span<const double> energies);

/// What part of an update's energy |dW|_F^2 lies along the leading directions U [rows, k], V [cols, k] of a weight. In
/// [0, 1]; NaN where dW is 0 or not finite, or U or V is not finite. Isotropic dW has k^2/(rows cols), k/rows, k/cols.
struct Alignment {
    double two_sided = 0;  ///< |U^T dW V|_F^2: what dW <- dW - U U^T dW V V^T removes
    double left = 0;       ///< |U^T dW|_F^2
    double right = 0;      ///< |dW V|_F^2
    double one_sided = 0;  ///< left + right - two_sided: what (I - U U^T) dW (I - V V^T) removes
};
/// U and V have orthonormal columns.
[[nodiscard]] Alignment alignment(MatrixView<const double> dw, MatrixView<const double> u, MatrixView<const double> v);

}  // namespace faultline
