// SPDX-License-Identifier: Apache-2.0
// A problem's inputs laid out for the fast path, with the sizes that its error bounds are made of.
#pragma once

#include <vector>

#include <faultline/truth/aligned.hpp>
#include <faultline/truth/double_double.hpp>
#include <faultline/truth/softcap_element.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline::detail {

/// Whether all inputs lie in the range in which no step of the fast path can underflow or overflow.
[[nodiscard]] bool fast_path_applies(const TruthProblem& problem);

/// A matrix whose rows enter dot products.
struct DotSide {
    AlignedVector power;  // [rows, padded]: a power of two, at least the Euclidean norm of the row
    double largest_power = 0;
    double widest = 0;  // largest of log2(power_i) - log2(unit of row i); every element is a multiple of its unit
    std::vector<double> width;  // per row, that difference
};

/// A matrix that is multiplied from the left: what bounds its columns.
struct ColumnSide {
    AlignedVector power;  // [cols, padded]: a power of two, at least the largest magnitude in the column
    /// Row r: the largest magnitudes among the rows that are summed when r is the last key (k, v: rows up to r) or the
    /// first query (q, dout: rows from r on, of all heads) seen. Not those of all rows: a sum over zeros must be exactly 0.
    AlignedMatrix running;
};

struct FastInputs {
    explicit FastInputs(const TruthProblem& problem);

    const TruthProblem& problem;
    std::ptrdiff_t n_q, n_k, d, d_v;
    AlignedMatrix k, v;  // [n_k, d], [n_k, d_v]
    AlignedMatrix k_transposed, v_transposed;
    std::vector<AlignedMatrix> q, dout;  // per head
    DotSide k_dot, v_dot;
    std::vector<DotSide> q_dot, dout_dot;                      // per head
    ColumnSide k_columns, v_columns, q_columns, dout_columns;  // the last two over all heads
    std::vector<std::ptrdiff_t> constant_keys;  // per column of k: how many leading keys have the first one's value
    DoubleDouble scale;
    double scale_error = 0;  // relative
    double scale_size = 0;   // upper bound of |scale|
    DoubleDouble inverse_keep{1, 0};
    double inverse_keep_error = 0;  // relative
    Softcap softcap;
};

}  // namespace faultline::detail
