// SPDX-License-Identifier: Apache-2.0
// Spectra of the QK weights.
#pragma once

#include <vector>

#include <faultline/tensor/matrix_view.hpp>

namespace faultline::gpt {

/// The `count` largest singular values of W, falling; 0 for those that it does not have. From the eigenvalues of the
/// smaller of W^T W and W W^T in double: the largest is good to some 2^-50, one that is r times smaller to r^2 2^-50. NaN
/// where an element is not finite.
[[nodiscard]] std::vector<double> singular_values(MatrixView<const float> w, int count);

/// Those of W_Q W_K^T, both [width, head_dim], without forming the product: of (W_Q^T W_Q)^(1/2) (W_K^T W_K)^(1/2).
[[nodiscard]] std::vector<double> product_singular_values(MatrixView<const float> w_q, MatrixView<const float> w_k,
                                                          int count);

}  // namespace faultline::gpt
