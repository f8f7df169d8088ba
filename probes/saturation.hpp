// SPDX-License-Identifier: Apache-2.0
// Saturation of softmax rows: the state in which a kernel's roundings cease to be random. A weight above 1 - 2^-9 is 1 in
// bf16, and two of them make P V a sum of few equal terms whose rounding is biased (arXiv 2510.04212, section 3.3).
#pragma once

#include <span>
#include <vector>

#include <faultline/probes/conservation.hpp>
#include <faultline/tensor/matrix_view.hpp>

namespace faultline {

/// A weight above it rounds to 1 in bf16: the neighbour of 1 below is 1 - 2^-8, half way is 1 - 2^-9.
inline constexpr double rounds_to_one = 1.0 - 0x1p-9;

struct RowSaturation {
    double max_logit = 0;    ///< largest visible score, logit; -inf where the row sees no key
    double p_max = 0;        ///< its weight; 0 where the row sees no key
    double entropy = 0;      ///< -sum p log p over the keys, nat
    int repeated = 0;        ///< keys whose score equals the maximum exactly, as binary64 has it
    int near = 0;            ///< keys whose score lies within `tolerance` of it
    int rounded_to_one = 0;  ///< keys with exp(s - max) above rounds_to_one: ones in a bf16 P before it is normalised
    [[nodiscard]] bool saturated() const { return p_max > rounds_to_one; }
};
/// Of the scores of one row, -inf where masked. `tolerance` in logits (1e-3 in the code of arXiv 2510.04212). A NaN makes
/// max_logit, p_max and entropy NaN and counts nothing.
[[nodiscard]] RowSaturation row_saturation(std::span<const double> scores, double tolerance = 1e-3);
/// Of every row of a head.
[[nodiscard]] std::vector<RowSaturation> saturation(const ScoreGradient& g, double tolerance = 1e-3);

/// |mean key| and rms |key - mean key|, in the keys' unit. k [n_k, d]; NaN where there is no key.
struct KeyMoments {
    double mean_norm = 0, spread = 0;
};
[[nodiscard]] KeyMoments key_moments(MatrixView<const double> k);
/// |mean key| over rms |key - mean key|: how much further a broken zero sum reaches than the keys' own spread. k [n_k, d].
/// 0/0 is NaN (no key, or all 0); infinite where all keys are one.
[[nodiscard]] double key_mean_over_spread(MatrixView<const double> k);

/// The exponent, in log2 units, that a kernel gives its winner: 0 in exact arithmetic. `raw_max` is the largest q.k before the
/// scale, fp32. Fused: fma(m, c, -round(m c)), c = float(scale log2 e) (FlashAttention-2, softmax.h); up to half an ulp of
/// m c. Unfused it is round(m c) - round(m c) = 0, and NaN where m c overflows.
[[nodiscard]] double winner_exponent(double raw_max, double scale, bool fused);

}  // namespace faultline
