// SPDX-License-Identifier: Apache-2.0
// Sums of products of doubles to about 100 bits at four or five operations per multiply-add.
//
// The accumulator starts at sigma = 1.5 * 2^e, with 2^e at least four times the sum of the |products|, so that it never
// leaves [2^e, 2^(e+1)] and its ulp is constant: t = fma(a, b, acc) moves it by h = t - acc, exactly; what was rounded
// away, r = fma(a, b, -h), goes into a second sum. Compensated accumulation by TwoSum (Ogita, Rump, Oishi 2005) takes
// eight to eleven operations for the same; it adapts to the terms, where this one needs a bound on them first, which
// norms and largest elements give for nothing. Error: docs/numerics-truth.md, lemma 1; a function of the count alone.
#pragma once

#include <cstddef>

#include <faultline/base/host_device.hpp>

namespace faultline::detail {

/// sum of count products, a_high + a_low times b, when |products| sum up to at most 2^(e-2) and |a_low| <= 2^-53 |a_high|:
/// the error is at most accumulation_error(count) * 2^e. Lemma 1.
FAULTLINE_HD constexpr double accumulation_error(std::ptrdiff_t count) {
    const auto n = static_cast<double>(count);
    return (0.5 * n * n + 4 * n + 4) * 0x1p-106;
}

/// acc_j, low_j <- acc_j, low_j + sum_k a_k b_kj for j < width, k < count, in the order of k; row k of b at b + k * stride.
void accumulate(const double* a, std::ptrdiff_t count, const double* b, std::ptrdiff_t stride, std::ptrdiff_t width,
                double* acc, double* low);
/// The same with factors a_high + a_low.
void accumulate(const double* a_high, const double* a_low, std::ptrdiff_t count, const double* b, std::ptrdiff_t stride,
                std::ptrdiff_t width, double* acc, double* low);

/// acc_j - sigma_j + low_j as an unevaluated sum high + low with |low| <= ulp(high) / 2, exactly. In place allowed.
void finish(const double* sigma, std::ptrdiff_t width, const double* acc, const double* low_sum, double* high,
            double* low);

}  // namespace faultline::detail
