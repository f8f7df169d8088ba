// SPDX-License-Identifier: Apache-2.0
// Saturation of softmax rows: the state in which a kernel's roundings cease to be random. A weight above 1 - 2^-9 is 1 in
// bf16, and two of them make P V a sum of few equal terms whose rounding is biased (arXiv 2510.04212, section 3.3).
#pragma once

#include <optional>
#include <span>
#include <vector>

#include <faultline/probes/conservation.hpp>
#include <faultline/tensor/matrix_view.hpp>

namespace faultline {

/// A weight above it rounds to 1 in bf16: the neighbour of 1 below is 1 - 2^-8, half way is 1 - 2^-9.
inline constexpr double rounds_to_one = 1.0 - 0x1p-9;
/// Logits within which a maximum counts as repeated, where nobody says otherwise (the code of arXiv 2510.04212).
inline constexpr double repeated_within = 1e-3;

struct RowSaturation {
    double max_logit = 0;    ///< largest visible score, logit; -inf where the row sees no key
    double p_max = 0;        ///< its weight; 0 where the row sees no key
    double entropy = 0;      ///< -sum p log p over the keys, nat
    int keys = 0;            ///< keys that the row sees: scores other than -inf
    int repeated = 0;        ///< keys whose score equals the maximum exactly, as binary64 has it
    int near = 0;            ///< keys whose score lies within `tolerance` of it
    int rounded_to_one = 0;  ///< keys with exp(s - max) above rounds_to_one: ones in a bf16 P before it is normalised
    /// Whether there was something to choose from. A row of one key has p = 1 by being one (with a sink, what it leaves):
    /// fractions and means over rows are over those of two keys and more, in training, probe and attribute alike.
    [[nodiscard]] bool chooses() const { return keys >= 2; }
    [[nodiscard]] bool saturated() const { return p_max > rounds_to_one; }
};
/// Of the scores of one row, -inf where masked. `tolerance` in logits. A NaN makes
/// max_logit, p_max and entropy NaN and counts nothing but keys. With a sink, a column of that score and value 0, p_max and
/// entropy are of the weights that it leaves; they keep their digits however heavy it is.
[[nodiscard]] RowSaturation row_saturation(std::span<const double> scores, double tolerance = repeated_within,
                                           std::optional<double> sink = {});
/// Of every row of a head, `sink` that of its inputs.
[[nodiscard]] std::vector<RowSaturation> saturation(const ScoreGradient& g, double tolerance = repeated_within,
                                                    std::optional<double> sink = {});

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
