// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/trajectory.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

namespace faultline {

double wasserstein(std::span<const double> a, std::span<const double> b) {
    const auto finite = [](double v) { return std::isfinite(v); };
    if (a.empty() || b.empty() || !std::ranges::all_of(a, finite) || !std::ranges::all_of(b, finite))
        return std::numeric_limits<double>::quiet_NaN();
    std::vector<double> x(a.begin(), a.end()), y(b.begin(), b.end());
    std::ranges::sort(x);
    std::ranges::sort(y);
    // Quantile functions are steps at i/n and j/m; between two neighbouring steps both are constant.
    const auto n = static_cast<double>(x.size()), m = static_cast<double>(y.size());
    double sum = 0, at = 0;
    for (std::size_t i = 0, j = 0; i < x.size() && j < y.size();) {
        const double x_ends = static_cast<double>(i + 1) / n, y_ends = static_cast<double>(j + 1) / m;
        const double next = std::min(x_ends, y_ends);
        sum += (next - at) * std::abs(x[i] - y[j]);
        at = next;
        if (x_ends <= next) ++i;
        if (y_ends <= next) ++j;
    }
    return sum;
}

WeightDistance weight_distance(std::span<const float> a, std::span<const float> b) {
    if (a.size() != b.size()) throw std::invalid_argument("weight_distance: two weights of different sizes");
    WeightDistance d;
    if (a.empty()) return d;
    const std::vector<double> x(a.begin(), a.end()), y(b.begin(), b.end());
    d.wasserstein = wasserstein(x, y);
    if (std::isnan(d.wasserstein)) return {d.wasserstein, d.wasserstein, d.wasserstein, d.wasserstein};
    double squares = 0, size = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
        d.largest = std::max(d.largest, std::abs(x[i] - y[i]));
        squares += (x[i] - y[i]) * (x[i] - y[i]);
        size += x[i] * x[i];
    }
    d.rms = std::sqrt(squares / static_cast<double>(x.size()));
    d.relative = size > 0 ? std::sqrt(squares / size) : std::numeric_limits<double>::quiet_NaN();
    return d;
}

}  // namespace faultline
