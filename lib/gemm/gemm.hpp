// SPDX-License-Identifier: Apache-2.0
// Matrix products whose every bit is specified: each element of C is one chain of fused multiply-adds over k in ascending
// order, c <- fma(a_ik, b_kj, c), whatever the machine, the blocking and the number of threads.
//
// Why not a BLAS: its order of summation differs between machines and between versions, and the OpenBLAS of Debian 12
// (0.3.21) takes processors newer than itself for a Prescott (30 GFLOP/s here, against 160 for these kernels); Eigen
// without -march has SSE2 alone. docs/training.md has the figures.
#pragma once

#include <faultline/tensor/matrix_view.hpp>

namespace faultline {

enum class Transpose : bool { no, yes };

/// C <- op(A) op(B), or C <- C + op(A) op(B) with `accumulate`, where op transposes on request. Shapes [m, k] [k, n] [m, n]
/// after op; C must not overlap A or B. std::invalid_argument where they do not fit. Single-threaded; may be called from
/// several threads at once. A k of 0 gives zeros, or C unchanged.
void gemm(Transpose a_transposed, MatrixView<const float> a, Transpose b_transposed, MatrixView<const float> b,
          MatrixView<float> c, bool accumulate = false);
void gemm(Transpose a_transposed, MatrixView<const double> a, Transpose b_transposed, MatrixView<const double> b,
          MatrixView<double> c, bool accumulate = false);

}  // namespace faultline
