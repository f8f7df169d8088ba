// SPDX-License-Identifier: Apache-2.0
// The row operations of fast attention on a block of scores [rows, keys], of which row i sees the first `first + i + 1`
// keys. Private to this folder.
#pragma once

#include <faultline/tensor/matrix_view.hpp>

namespace faultline::gpt {

/// s <- cap tanh(scale s / cap), or scale s where cap is 0; row_max(i) over what the row sees.
void scale_scores(MatrixView<float> s, std::ptrdiff_t first, float scale, float cap, float* row_max);
void scale_scores(MatrixView<double> s, std::ptrdiff_t first, double scale, double cap, double* row_max);

/// s <- exp(s - reference(i)), 0 where unseen; row_sum(i) of it, if not null.
void exponentials(MatrixView<float> s, std::ptrdiff_t first, const float* reference, float* row_sum);
void exponentials(MatrixView<double> s, std::ptrdiff_t first, const double* reference, double* row_sum);

/// sum_j p_ij log p_ij of row i, p = e / sum: minus the entropy; e holds exp(s - max).
double negative_entropy(const float* e, std::ptrdiff_t seen, float sum);
double negative_entropy(const double* e, std::ptrdiff_t seen, double sum);

/// sum_j a_ij b_ij.
void row_dots(MatrixView<const float> a, MatrixView<const float> b, float* dots);
void row_dots(MatrixView<const double> a, MatrixView<const double> b, double* dots);

/// dp <- p (dp - delta(i)).
void score_gradient(MatrixView<const float> p, const float* delta, MatrixView<float> dp);
void score_gradient(MatrixView<const double> p, const double* delta, MatrixView<double> dp);
/// ds <- ds (1 - (s/cap)^2): through the cap.
void through_cap(MatrixView<const float> s, float cap, MatrixView<float> ds);
void through_cap(MatrixView<const double> s, double cap, MatrixView<double> ds);

/// Sum of all elements, and of their magnitudes, added to `sum` and `magnitude`.
void add_sums(MatrixView<const float> x, double& sum, double& magnitude);
void add_sums(MatrixView<const double> x, double& sum, double& magnitude);

/// to <- from factor, any strides.
void scaled_copy(MatrixView<const float> from, float factor, MatrixView<float> to);
void scaled_copy(MatrixView<const double> from, double factor, MatrixView<double> to);
/// Row i of x over divisor(i).
void divide_rows(MatrixView<float> x, const float* divisor);
void divide_rows(MatrixView<double> x, const double* divisor);

}  // namespace faultline::gpt
