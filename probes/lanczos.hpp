// SPDX-License-Identifier: Apache-2.0
// The leading singular values alone, to a bound that the iteration itself gives: Golub-Kahan-Lanczos bidiagonalisation (Golub and
// Van Loan, Matrix Computations, 10.4) in binary64, with right vectors reorthogonalised and left ones by their recurrence (Barlow,
// Numerische Mathematik 124, 2013: the bidiagonal matrix is then that of a matrix within rounding of W). W is read once a step.
#pragma once

#include <vector>

#include <faultline/tensor/matrix_view.hpp>

namespace faultline {

/// Leading singular values, and how many steps they took.
struct LeadingValues {
    std::vector<double> values;  ///< falling; 0 for those that there are not; NaN where an element is not finite
    int steps = 0;
};

/// How far a value may be off, relative to the largest: min(r, r^2 / gap) of its residual r and the distance to its neighbours.
inline constexpr double lanczos_error = 0x1p-38;

/// The `count` (1 to 3) largest singular values of W: each within lanczos_error of the first of one. A value that is there twice to
/// the last bit counts once. The same bits on every processor.
[[nodiscard]] LeadingValues leading_singular_values(MatrixView<const float> w, int count);

/// Those of W_Q W_K^T, both [width, head_dim], without forming the product; off by rounding of |W_Q| |W_K| besides.
[[nodiscard]] LeadingValues leading_product_singular_values(MatrixView<const float> w_q, MatrixView<const float> w_k,
                                                            int count);

}  // namespace faultline
