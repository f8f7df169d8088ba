// SPDX-License-Identifier: Apache-2.0
// Loops over one row of scores, vectorised over its keys. Arrays are 64-byte aligned with `count` a positive multiple of
// 8; the entries of keys that the row does not see (padding, masked) hold p = 0 with exponent no_exponent. Loops work
// element by element and sums are trees over a fixed order, so that all clones give the same bits.
#pragma once

#include <cstddef>

#include <faultline/truth/double_double.hpp>
#include <faultline/truth/wide_elements.hpp>

namespace faultline::detail {

/// high + low times 2^exponent, one per key.
struct WideRow {
    double* high;
    double* low;
    double* exponent;
};

/// The largest of x.
double largest(const double* x, std::ptrdiff_t count);
/// The largest exponent; none_exponent when there is nothing.
double largest_exponent(const double* exponent, std::ptrdiff_t count);
/// sum_j a_j; a is overwritten. Relative to sum |a_j| the error is at most tree_depth(count) * 3.01 u^2.
DoubleDouble tree_sum(double* high, double* low, std::ptrdiff_t count);
/// sum_j a_j for a_j >= 0, rounded up; a is overwritten.
double upper_sum(double* a, std::ptrdiff_t count);

/// x_j <- scale (s_j - s_w) + (bias_j - bias_w), -inf from key `seen` on and where bias_j is -inf; bias may be null.
/// Returns an upper bound of |scale (s_j - s_w)| over the keys with x_j >= exp_lowest.
double subtract_pivot(const double* s_high, const double* s_low, const double* bias, DoubleDouble scale,
                      std::ptrdiff_t w, std::ptrdiff_t seen, std::ptrdiff_t count, double* x_high, double* x_low,
                      double* scratch);

/// out_j <- p_j 2^-reference, 0 below the flush threshold; returns how many p_j other than 0 that left out.
double scale_row(const WideRow& p, double reference, std::ptrdiff_t count, double* out_high, double* out_low);

/// p_j <- p_j factor.
void multiply(double* high, double* low, DoubleDouble factor, std::ptrdiff_t count);
/// d_j <- d_j - pivot.
void subtract(double* high, double* low, DoubleDouble pivot, std::ptrdiff_t count);

/// sum_j p_j d_j, where d_j is known to within 3.01 u^2 |d_j| + d_error. Three arrays of scratch.
WideSum weighted_sum(const WideRow& p, RelativeError p_error, const double* d_high, const double* d_low, double d_error,
                     std::ptrdiff_t count, double* const scratch[3]);

/// ds_j <- p_j (d_j - rest) and error_j, both times 2^ds.exponent_j. Where d_j is exactly 0 what is left is -p_j rest,
/// which may be far below its neighbours and so has an exponent of its own.
void softmax_gradient(const WideRow& p, RelativeError p_error, const double* d_high, const double* d_low,
                      double d_error, const WideSum& rest, std::ptrdiff_t count, const WideRow& ds, double* error);

/// The largest exponent of an |a_j| or error_j. Scratch as long as the row.
double largest_exponent(const WideRow& a, const double* error, std::ptrdiff_t count, double* scratch);

/// out_j <- a_j 2^-reference, 0 below the flush threshold. Upper bounds of sum |out_j| and of sum |out_j - exact|.
struct ScaledRow {
    double magnitude = 0;
    double error = 0;
};
ScaledRow scale_row(const WideRow& a, const double* error, double reference, std::ptrdiff_t count, double* out_high,
                    double* out_low, double* const scratch[2]);

/// sum_j a_j (column_j - pivot), where `error` bounds the errors of a_j. Three arrays of scratch.
WideSum centred_sum(const WideRow& a, const double* error, const double* column, double pivot, std::ptrdiff_t count,
                    double* const scratch[3]);

}  // namespace faultline::detail
