// SPDX-License-Identifier: Apache-2.0
// The row sums of a plan's score gradient, 0 by the law of softmax (softmax does not change when a constant is added to a
// row of scores). One reading for the recorder, the probes and training.
#pragma once

#include <vector>

#include <faultline/cpu/instrument.hpp>
#include <faultline/plan/schedule.hpp>

namespace faultline {

/// Where a kernel shows the tensor that the law speaks of, and what a value there has to be divided by to be in nat/logit.
struct ScoreGradientSite {
    Site site = Site::ds_cast;
    double unit = 1;  ///< the softmax scale where the plan puts it in before this site, else 1
};
/// The last site of ds before the products. Under a softcap Site::ds, the gradient of the capped score before the slope of
/// the cap and the cast: behind the slope there is no law.
[[nodiscard]] ScoreGradientSite score_gradient_site(const Schedule& schedule, double scale, bool softcap);

/// Of one query head, nat/logit.
struct RowSums {
    std::vector<double> sum;        ///< [n_q] sum_j ds_ij
    std::vector<double> magnitude;  ///< [n_q] sum_j |ds_ij|
    explicit RowSums(std::size_t rows = 0) : sum(rows, 0.0), magnitude(rows, 0.0) {}
    /// A tile of the site.
    void add(const TileAt& where, MatrixView<const double> tile, double unit);
    /// One more column of the row, as a sink's -p_sink delta, in nat/logit.
    void add_column(std::size_t row, double ds);
};

}  // namespace faultline
