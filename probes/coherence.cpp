// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/coherence.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <stdexcept>

namespace faultline {

double binomial_two_sided(std::size_t k, std::size_t n) {
    const std::size_t tail = std::min(k, n - k);
    if (2 * tail == n) return 1;
    // The tail from its largest term down: terms fall by i/(n-i+1), so that what is left soon adds nothing.
    const auto real = [](std::size_t x) { return static_cast<double>(x); };
    const double log_term = std::lgamma(real(n) + 1) - std::lgamma(real(tail) + 1) - std::lgamma(real(n - tail) + 1) -
                            real(n) * std::numbers::ln2;
    double sum = 0, term = 1;
    for (std::size_t i = tail;; --i) {
        sum += term;
        if (i == 0 || term < sum * 0x1p-60) break;
        term *= real(i) / real(n - i + 1);
    }
    return std::min(1.0, 2 * sum * std::exp(log_term));
}

Coherence coherence(std::span<const double> errors) {
    Coherence c;
    double sum = 0, magnitude = 0, squares = 0;
    std::size_t positive = 0, negative = 0;
    for (const double e : errors) {
        if (!std::isfinite(e)) {
            ++c.nonfinite;
            continue;
        }
        ++c.count;
        sum += e;
        magnitude += std::abs(e);
        squares += e * e;
        positive += e > 0;
        negative += e < 0;
    }
    if (c.count == 0) {
        c.mean = c.rms = std::numeric_limits<double>::quiet_NaN();
        return c;
    }
    const auto n = static_cast<double>(c.count);
    c.mean_sign = (static_cast<double>(positive) - static_cast<double>(negative)) / n;
    c.sum_coherence = magnitude > 0 ? sum / magnitude : 0;
    c.mean = sum / n;
    c.rms = std::sqrt(squares / n);
    if (positive + negative > 0) c.sign_p = binomial_two_sided(positive, positive + negative);
    if (squares > 0) c.sum_p = std::erfc(std::abs(sum) / std::sqrt(2 * squares));
    return c;
}

std::vector<Coherence> windowed_coherence(std::span<const double> errors, std::size_t window, std::size_t stride) {
    if (window == 0 || stride == 0)
        throw std::invalid_argument("windowed_coherence: window and stride must be positive");
    std::vector<Coherence> all;
    for (std::size_t at = 0; at + window <= errors.size(); at += stride)
        all.push_back(coherence(errors.subspan(at, window)));
    return all;
}

}  // namespace faultline
