// SPDX-License-Identifier: Apache-2.0
// The parts of a transformer that work row by row, forward and backward, for float (vectorised) and double (for checks).
// Gradients that flow into a parameter or into the residual stream are added (+=), everything else is assigned. Rows are
// tokens; sums over a row have the order of vector_math.hpp, sums over rows are in ascending order.
#pragma once

#include <cstdint>
#include <span>

#include <faultline/tensor/matrix_view.hpp>

namespace faultline::gpt {

/// statistics(i) = (mean, 1/sqrt(variance + epsilon)) of row i: [rows, 2].
void norm_statistics(MatrixView<const float> x, float epsilon, MatrixView<float> statistics);
void norm_statistics(MatrixView<const double> x, double epsilon, MatrixView<double> statistics);

/// y = (x - mean) rstd gain + bias; bias may be null.
void norm_apply(MatrixView<const float> x, MatrixView<const float> statistics, const float* gain, const float* bias,
                MatrixView<float> y);
void norm_apply(MatrixView<const double> x, MatrixView<const double> statistics, const double* gain, const double* bias,
                MatrixView<double> y);

/// dx += what flows to x from dy; dgain += , dbias += (if not null). rstd and mean as the forward used them.
void norm_backward(MatrixView<const float> x, MatrixView<const float> statistics, const float* gain,
                   MatrixView<const float> dy, MatrixView<float> dx, float* dgain, float* dbias);
void norm_backward(MatrixView<const double> x, MatrixView<const double> statistics, const double* gain,
                   MatrixView<const double> dy, MatrixView<double> dx, double* dgain, double* dbias);

/// GELU in the form with tanh (arXiv 1606.08415; GPT-2's), as x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
void gelu(MatrixView<const float> x, MatrixView<float> y);
void gelu(MatrixView<const double> x, MatrixView<double> y);
/// dx = dy gelu'(x); dx may be dy.
void gelu_backward(MatrixView<const float> x, MatrixView<const float> dy, MatrixView<float> dx);
void gelu_backward(MatrixView<const double> x, MatrixView<const double> dy, MatrixView<double> dx);

/// y = x sigmoid(g), and backward: dx = dy sigmoid(g), dg = dy x sigmoid'(g).
void gate(MatrixView<const float> x, MatrixView<const float> g, MatrixView<float> y);
void gate(MatrixView<const double> x, MatrixView<const double> g, MatrixView<double> y);
void gate_backward(MatrixView<const float> x, MatrixView<const float> g, MatrixView<const float> dy,
                   MatrixView<float> dx, MatrixView<float> dg);
void gate_backward(MatrixView<const double> x, MatrixView<const double> g, MatrixView<const double> dy,
                   MatrixView<double> dx, MatrixView<double> dg);

/// Cross-entropy of rows of logits against targets, in nats. Logits become the gradient of
/// weight (sum of losses + z_loss sum of log-sum-exp^2), z-loss of arXiv 2204.02311. Returns the sum of the losses
/// without the z-loss, added in row order in double. A logit that is not finite gives NaN.
double cross_entropy(MatrixView<float> logits, std::span<const std::int32_t> targets, double weight, double z_loss);
double cross_entropy(MatrixView<double> logits, std::span<const std::int32_t> targets, double weight, double z_loss);
/// The same without the gradient.
double cross_entropy_loss(MatrixView<const float> logits, std::span<const std::int32_t> targets);
double cross_entropy_loss(MatrixView<const double> logits, std::span<const std::int32_t> targets);

/// y = x / rms(x) per head of `head_dim` columns, times gain[head_dim] where it is not null; inverse(i, h) = 1/rms. rms has
/// `epsilon` under the root, relative to 1.
void rms_norm_heads(MatrixView<const float> x, std::ptrdiff_t head_dim, const float* gain, float epsilon,
                    MatrixView<float> y, MatrixView<float> inverse);
void rms_norm_heads(MatrixView<const double> x, std::ptrdiff_t head_dim, const double* gain, double epsilon,
                    MatrixView<double> y, MatrixView<double> inverse);
/// dy becomes dx; dgain += where it is not null.
void rms_norm_heads_backward(MatrixView<const float> x, MatrixView<const float> inverse, std::ptrdiff_t head_dim,
                             const float* gain, MatrixView<float> dy, float* dgain);
void rms_norm_heads_backward(MatrixView<const double> x, MatrixView<const double> inverse, std::ptrdiff_t head_dim,
                             const double* gain, MatrixView<double> dy, double* dgain);

/// y += x; row sums: y(i) = sum over rows.
void add(MatrixView<const float> x, MatrixView<float> y);
void add(MatrixView<const double> x, MatrixView<double> y);
/// Every row of y += bias.
void add_bias(const float* bias, MatrixView<float> y);
void add_bias(const double* bias, MatrixView<double> y);
/// dbias += the sum of the rows of dy.
void add_rows(MatrixView<const float> dy, float* dbias);
void add_rows(MatrixView<const double> dy, double* dbias);

/// Every element to bf16, nearest even, as round_bulk: here for rows with a stride, which are as short as a head.
void round_bf16(MatrixView<float> x);

}  // namespace faultline::gpt
