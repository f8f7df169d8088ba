// SPDX-License-Identifier: Apache-2.0
// Errors of an output summed up so that heads can be computed in any order and joined in one: size, sign, coherence.
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include <faultline/tensor/matrix_view.hpp>
#include <faultline/truth/certified.hpp>
#include <faultline/truth/wide_real.hpp>

namespace faultline {

/// What is said of an error e = value - truth over all elements of an output.
struct ErrorMeasure {
    WideReal error_norm;  ///< Frobenius
    WideReal
        rel_error;  ///< error_norm / truth_norm; inf where an element is NaN or infinite, or the truth is 0 and the
                    ///< error is not; 0 where both are
    double signed_bias = 0;  ///< mean(e) / rms(e), in [-1, 1]: 0 for noise, +-1 for a constant shift
    double t_statistic =
        std::numeric_limits<double>::quiet_NaN();  ///< mean of the rows' mean errors over its standard error: rows, not
    ///< elements, are the independent samples, since a row's errors share
    ///< its delta and its row sum. NaN where that is undefined: fewer than
    ///< two rows, or rows whose means do not differ at all; and for dk and dv, whose rows
    ///< are keys: each query's error enters the rows of all keys
    double gain =
        0;  ///< <e, truth> / <truth, truth>: -1 means that the output is not there, 0 none of the error lies along it
    double row_coherence = 0;   ///< |sum over rows of the rows' mean errors| / sum of |rows' mean errors|, 0..1; n rows
                                ///< without bias give some 1/sqrt(n), more where few of them are much larger; NaN for
                                ///< dk and dv
    double head_coherence = 0;  ///< the same over heads; NaN where there is one
    double mean_key_share = 0;  ///< dq only: share of the error's energy along the mean key, 0..1; NaN elsewhere
    double mean_key_sign =
        0;  ///< dq only: coherence with sign of the rows' coefficients along the mean key, -1..1; NaN elsewhere
    std::size_t nonfinite =
        0;  ///< elements that are NaN or infinite; they are left out of the sums above, and make rel_error infinite
};

/// Sums of one head, joined over heads in order. Values whose truth does not fit a double are taken in wide range.
class ErrorSums {
  public:
    ErrorSums() = default;
    /// `direction`: unit vector [cols] along the mean key, or null.
    ErrorSums(MatrixView<const double> value, const CertifiedMatrix& truth, const double* direction);
    void join(const ErrorSums& next_head);
    /// The rows are no independent samples (dk, dv): what takes them as such is undefined.
    void rows_are_keys() { rows_independent_ = false; }
    [[nodiscard]] ErrorMeasure measure() const;

  private:
    WideReal error_squared_, truth_squared_, error_dot_truth_;
    WideReal sum_;
    std::size_t count_ = 0, nonfinite_ = 0, rows_ = 0, heads_ = 0;  // heads_: with a finite element
    bool rows_independent_ = true;
    WideReal row_mean_sum_, row_mean_abs_;
    WideReal row_mean_, row_spread_;  ///< mean of the rows' means, and the sum of squared distances from it
    WideReal head_mean_sum_, head_mean_abs_;
    bool has_direction_ = false;
    WideReal along_squared_, along_sum_, along_abs_;
};

}  // namespace faultline
