// SPDX-License-Identifier: Apache-2.0
// How far two runs' weights have moved apart: arXiv 2405.02803 compares kernels by the Wasserstein distance of weights.
#pragma once

#include <span>

namespace faultline {

/// Between two weights of the same place in two runs, in the unit of the weight.
struct WeightDistance {
    double wasserstein = 0;  ///< Wasserstein-1 between the distributions of the entries
    double largest = 0;      ///< max |a_i - b_i|
    double rms = 0;          ///< sqrt(mean (a_i - b_i)^2)
    double relative = 0;     ///< |a - b| / |a|; NaN where a is 0
};
/// Of as many entries each (std::invalid_argument otherwise). All NaN where one is not finite; 0 where there are none.
[[nodiscard]] WeightDistance weight_distance(std::span<const float> a, std::span<const float> b);

/// Wasserstein-1 distance of two samples of any sizes: the integral over u in (0, 1) of |quantile_a(u) - quantile_b(u)|.
/// NaN where one is empty or holds what is not finite.
[[nodiscard]] double wasserstein(std::span<const double> a, std::span<const double> b);

}  // namespace faultline
