// SPDX-License-Identifier: Apache-2.0
// Sign coherence: whether an error keeps its sign. Random errors of n steps add up to sqrt(n) of one, coherent ones to n
// (arXiv 2510.04212, section 3; arXiv 2608.02091, abstract: entry into collapse follows coherence, not deviation).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace faultline {

/// Of a series of signed errors e_1 … e_n, in the unit of e where it has one. Elements that are not finite take no part.
struct Coherence {
    std::size_t count = 0;      ///< finite elements
    std::size_t nonfinite = 0;  ///< the others
    double mean_sign = 0;       ///< mean of sign(e), zeros count as 0: in [-1, 1]; |mean_sign| is the sign coherence
    double sum_coherence = 0;   ///< sum e / sum |e|: in [-1, 1], weighted by size; 0 where all are 0
    double mean = 0;            ///< in the unit of e
    double rms = 0;             ///< the deviation, in the unit of e
    /// Chance of as uneven a number of signs, two-sided, if each nonzero element had either sign with probability 1/2,
    /// independently: exact binomial. 1 where nothing is nonzero.
    double sign_p = 1;
    /// Chance of |sum e| as large, two-sided, if each element had either sign with probability 1/2, independently of its
    /// size: by counting all signs of up to sum_p_counted elements that are not 0, of more by the normal approximation of
    /// |sum e| / sqrt(sum e^2).
    double sum_p = 1;
    /// Correlation of the signs of neighbours, sum (s_i - s)(s_i+1 - s) / sum (s_i - s)^2, s their mean: where it is above
    /// 0, fewer elements than count are independent, and both chances are too small. NaN where all signs are one.
    double sign_lag1 = 0;
};
inline constexpr std::size_t sum_p_counted = 16;
/// Without a finite element all fields but the counts are NaN. Sizes may be any that binary64 holds.
[[nodiscard]] Coherence coherence(std::span<const double> errors);

/// Of each window of `window` elements, each beginning `stride` after the last one's; the last may not be short: what does
/// not fill a window is left out. window and stride at least 1 (std::invalid_argument).
[[nodiscard]] std::vector<Coherence> windowed_coherence(std::span<const double> errors, std::size_t window,
                                                        std::size_t stride);

/// P(|X - n/2| >= |k - n/2|) of X ~ Binomial(n, 1/2). k <= n. The logarithms of three factorials cancel: good to some
/// 1e-14 n of itself, 1e-9 at n = 10^5 (tests).
[[nodiscard]] double binomial_two_sided(std::size_t k, std::size_t n);

}  // namespace faultline
