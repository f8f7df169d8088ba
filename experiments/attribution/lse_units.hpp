// SPDX-License-Identifier: Apache-2.0
// In which units a kernel left its log-sum-exp: natural ones are expected, and log2 is what kernels compute in.
#pragma once

#include <cmath>
#include <numbers>
#include <vector>

namespace faultline::attribution {

/// Whether the values are lse log2(e): far from the truth, and near it once multiplied by ln 2. Rows where either is not finite
/// say nothing.
[[nodiscard]] inline bool reads_as_log2(const std::vector<double>& observed, const std::vector<double>& truth) {
    constexpr double much_nearer = 1e-3;  // of the error's norm: a rounding beside log2(e) - 1 of the lse
    double as_is = 0, in_natural = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) {
        if (!std::isfinite(observed[i]) || !std::isfinite(truth[i])) continue;
        const double apart = observed[i] - truth[i];
        const double converted = observed[i] * std::numbers::ln2 - truth[i];
        as_is += apart * apart;
        in_natural += converted * converted;
    }
    return in_natural < much_nearer * much_nearer * as_is;
}

}  // namespace faultline::attribution
