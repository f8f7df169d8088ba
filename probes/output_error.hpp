// SPDX-License-Identifier: Apache-2.0
// The error of a stored output by feature, and how a row's output gathers its error along the keys: the figures of
// arXiv 2510.04212 (v2, figures 5b, 5c and 6).
#pragma once

#include <span>
#include <vector>

#include <faultline/format/format.hpp>
#include <faultline/tensor/matrix_view.hpp>

namespace faultline {

/// Over the rows of one feature (column). Rows where value or truth is not finite take no part.
struct FeatureError {
    double mean_ulp = 0;  ///< mean of (value - truth) / ulp: signed, in ulps of the format; NaN without rows
    double rms_ulp = 0;
    double t = 0;  ///< mean over its standard error, rows as samples; NaN for fewer than two rows or no scatter
    double count = 0;
};
/// `value`, `truth` [n, d]. The ulp is that, in `format`, of the truth or of the rms of the truth's column, whichever is more:
/// an element that cancels to nearly 0 has errors of its terms' size, and in its own ulps it would outweigh all others.
[[nodiscard]] std::vector<FeatureError> ulp_error_by_feature(MatrixView<const double> value,
                                                             MatrixView<const double> truth, const Format& format);

/// The output of one row and feature while keys are added: sum_{t' <= t} pbar_t' v_t', stored after each key.
struct RunningOutput {
    std::vector<double> sum;    ///< [n_k] in binary64, in the order of the keys
    std::vector<double> error;  ///< [n_k] round(sum, stored) - sum, what a store there would be off by
    std::vector<int> event;     ///< [n_k] 1 where pbar rounds to 1 in `weights` (a repeated maximum where several do)
};
/// `pbar` [n_k]: weights before they are normalised, exp(s - max). They are cast to `weights` first, as P is; the sum would
/// be stored in `stored`.
[[nodiscard]] RunningOutput running_output(std::span<const double> pbar, std::span<const double> v,
                                           const Format& weights, const Format& stored);

}  // namespace faultline
