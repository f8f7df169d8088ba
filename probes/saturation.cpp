// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/saturation.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace faultline {

RowSaturation row_saturation(std::span<const double> scores, double tolerance, std::optional<double> sink) {
    RowSaturation r;
    r.keys = static_cast<int>(std::count_if(scores.begin(), scores.end(),
                                            [](double s) { return s != -std::numeric_limits<double>::infinity(); }));
    r.max_logit = -std::numeric_limits<double>::infinity();
    for (const double s : scores)
        if (!(s <= r.max_logit)) r.max_logit = s;
    if (std::isnan(r.max_logit)) {
        r.p_max = r.entropy = r.max_logit;
        return r;
    }
    if (r.max_logit == -std::numeric_limits<double>::infinity()) return r;
    double sum = 0, moment = 0;  // of e = exp(s - max), and of e (s - max)
    for (const double s : scores) {
        const double away = s - r.max_logit;
        const double e = std::exp(away);
        if (std::isnan(e)) {
            r.repeated = r.near = r.rounded_to_one = 0;
            r.max_logit = r.p_max = r.entropy = e;
            return r;
        }
        sum += e;
        if (e > 0) moment += e * away;
        r.repeated += away == 0;
        r.near += away >= -tolerance;
        r.rounded_to_one += e > rounds_to_one;
    }
    r.p_max = 1 / sum;
    r.entropy = std::log(sum) - moment / sum;
    if (!sink) return r;
    // The keys' part of the weight, 1 / (1 + w) with w the sink's weight over theirs; 1 - p_sink would cancel under a heavy
    // sink. Of p = share p', -sum p log p = share (H' - log share).
    const double w = std::exp(*sink - r.max_logit) / sum;
    const double share = 1 / (1 + w);
    r.p_max *= share;
    r.entropy = share > 0 ? share * (r.entropy + std::log1p(w)) : 0;
    return r;
}

std::vector<RowSaturation> saturation(const ScoreGradient& g, double tolerance, std::optional<double> sink) {
    std::vector<RowSaturation> rows;
    for (std::ptrdiff_t i = 0; i < g.s.rows; ++i)
        rows.push_back(row_saturation({g.s.view().row(i), static_cast<std::size_t>(g.s.cols)}, tolerance, sink));
    return rows;
}

KeyMoments key_moments(MatrixView<const double> k) {
    const auto n = static_cast<double>(k.rows);
    double mean_squared = 0, spread_squared = 0;
    for (std::ptrdiff_t c = 0; c < k.cols; ++c) {
        double mean = 0;
        for (std::ptrdiff_t j = 0; j < k.rows; ++j) mean += k(j, c) / n;
        mean_squared += mean * mean;
        for (std::ptrdiff_t j = 0; j < k.rows; ++j) spread_squared += (k(j, c) - mean) * (k(j, c) - mean) / n;
    }
    if (k.rows == 0) return {std::nan(""), std::nan("")};
    return {std::sqrt(mean_squared), std::sqrt(spread_squared)};
}

double key_mean_over_spread(MatrixView<const double> k) {
    const KeyMoments moments = key_moments(k);
    return moments.mean_norm / moments.spread;
}

double winner_exponent(double raw_max, double scale, bool fused) {
    const auto m = static_cast<float>(raw_max);
    const auto c = static_cast<float>(scale * std::numbers::log2e);
    const float rounded = m * c;
    return static_cast<double>(fused ? std::fma(m, c, -rounded) : rounded - rounded);
}

}  // namespace faultline
