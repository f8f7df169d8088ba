// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/coherence.hpp>

#include <algorithm>
#include <bit>
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

namespace {

/// Part of the 2^n choices of signs whose sum is as large as that of the elements as they are: all are counted, in Gray's
/// order, one sign after the other. By symmetry the first element may keep its sign.
double counted_sum_p(const std::vector<double>& e, double sum, double magnitude) {
    // What changing signs 2^15 times rounds off at most, so that equal sums count as equal.
    const double enough = std::abs(sum) - magnitude * 0x1p-36;
    std::vector<bool> flipped(e.size(), false);
    const std::size_t choices = std::size_t{1} << (e.size() - 1);
    double now = sum;
    std::size_t as_large = 1;
    for (std::size_t i = 1; i < choices; ++i) {
        const std::size_t at = 1 + static_cast<std::size_t>(std::countr_zero(i));
        now += flipped[at] ? 2 * e[at] : -2 * e[at];
        flipped[at] = !flipped[at];
        as_large += std::abs(now) >= enough;
    }
    return static_cast<double>(as_large) / static_cast<double>(choices);
}

double lag1(const std::vector<int>& signs, double mean) {
    double neighbours = 0, squares = 0;
    for (std::size_t i = 0; i < signs.size(); ++i) {
        const double here = signs[i] - mean;
        squares += here * here;
        if (i > 0) neighbours += here * (signs[i - 1] - mean);
    }
    return neighbours / squares;  // NaN: 0/0
}

}  // namespace

Coherence coherence(std::span<const double> errors) {
    Coherence c;
    double largest = 0;
    for (const double e : errors)
        if (std::isfinite(e)) largest = std::max(largest, std::abs(e));
    // Squares are formed of elements over a power of two near the largest: none overflows, and none vanishes that counts.
    const int exponent = largest > 0 ? std::ilogb(largest) : 0;
    double sum = 0, magnitude = 0, squares = 0;
    std::size_t positive = 0, negative = 0;
    std::vector<double> nonzero;
    std::vector<int> signs;
    for (const double error : errors) {
        if (!std::isfinite(error)) {
            ++c.nonfinite;
            continue;
        }
        const double e = std::scalbn(error, -exponent);
        ++c.count;
        sum += e;
        magnitude += std::abs(e);
        squares += e * e;
        positive += error > 0;
        negative += error < 0;
        signs.push_back((error > 0) - (error < 0));
        if (e != 0 && nonzero.size() <= sum_p_counted) nonzero.push_back(e);
    }
    if (c.count == 0) {
        c.mean_sign = c.sum_coherence = c.mean = c.rms = c.sign_p = c.sum_p = c.sign_lag1 =
            std::numeric_limits<double>::quiet_NaN();
        return c;
    }
    const auto n = static_cast<double>(c.count);
    c.mean_sign = (static_cast<double>(positive) - static_cast<double>(negative)) / n;
    c.sum_coherence = magnitude > 0 ? sum / magnitude : 0;
    c.mean = std::scalbn(sum / n, exponent);
    c.rms = std::scalbn(std::sqrt(squares / n), exponent);
    c.sign_lag1 = lag1(signs, c.mean_sign);
    if (positive + negative > 0) c.sign_p = binomial_two_sided(positive, positive + negative);
    if (nonzero.empty()) return c;
    c.sum_p = nonzero.size() <= sum_p_counted ? counted_sum_p(nonzero, sum, magnitude)
                                              : std::erfc(std::abs(sum) / std::sqrt(2 * squares));
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
