// SPDX-License-Identifier: Apache-2.0
// The level of an output: the error that storing its truth costs, rounded once to the format it is stored in. It is
// computed from the truth itself. It cannot be said from the format alone: with p significant bits and every element a
// significand m in [1, 2) times one power of two, the error of a rounding to nearest is uniform in +-2^-p, rms 2^-p / sqrt(3),
// and the norm's relative error 2^-p / sqrt(3 mean(m^2)): 0.378 2^-p for uniform m (mean(m^2) = 7/3), 0.392 2^-p for
// log-uniform m (3 / (2 ln 2)), between 0.29 2^-p (all near 2) and 0.58 2^-p (all near 1) for others, 0 where the elements
// are in the format, and up to 1 where they lie below its range. In bf16 2^-p is 0.391%.
#pragma once

#include <optional>

#include <faultline/attribution/attribution.hpp>
#include <faultline/format/format.hpp>

namespace faultline {

/// The format in which a plan stores an output: that of its last rounding, nothing where that is exact. `grouped`: several query
/// heads share a key head, so that dk and dv are summed, behind their cast where the plan does so (group_reduce).
[[nodiscard]] std::optional<Format> stored_format(const RoundingPlan& plan, Output output, bool grouped);

/// The same by place (attribution/group_run.hpp), and of an output or the lse.
[[nodiscard]] std::optional<Format> stored_at(const RoundingPlan& plan, std::size_t place, bool grouped);
[[nodiscard]] std::optional<Format> stored_format(const RoundingPlan& plan, const OutputAttribution& output);

/// "bf16": the type whatever it does with what overflows, since a file only holds the result.
[[nodiscard]] std::string type_name(const Format& format);

/// What a kernel's output is judged by: the level in the type of its file, and the plan's own run rounded to that. The plan's where
/// the type is not known.
[[nodiscard]] const std::optional<WideReal>& level_of(const ObservedOutput& seen, const OutputAttribution& output);
[[nodiscard]] const ErrorMeasure& plan_in_type_of(const ObservedOutput& seen, const OutputAttribution& output);

/// |round(truth) - truth|, Frobenius, each element rounded to nearest even: what the best kernel leaves. Infinite where an
/// element overflows the format.
[[nodiscard]] WideReal rounding_error(const CertifiedMatrix& truth, const Format& format);

/// 2^-p / sqrt(7): the level of a tensor whose significands fill [1, 2) evenly.
[[nodiscard]] double typical_level(const Format& format);

/// Whether every element of that norm rounds to zero in the format: 0 is then what a perfect kernel stores, with error 100%.
[[nodiscard]] bool below_range(const WideReal& truth_norm, const Format& format);

/// An error is at its level while at least half of its square is the rounding into the stored format: up to sqrt(2) times
/// the level, since an error before the cast and the cast's own are independent and add in squares.
inline constexpr double level_allowance = 1.41421356237309504880;
/// Whether an error is finite and at most level_allowance times `level` (relative to the truth, as the error is); false
/// where the plan stores no format.
[[nodiscard]] bool at_level(const ErrorMeasure& error, const std::optional<WideReal>& level);

/// Whether an lse is so far off that the backward's P shows it: P = exp(s - lse), so that an lse that is off by e nats makes
/// every P of its row wrong by e of itself, and P is stored in the plan's format (bwd_p_cast), whose own
/// rounding is typical_level of it. Compares the rms error of the rows with twice that; elements that are not finite are.
/// Never where P is saved: that backward does not use the lse.
[[nodiscard]] bool lse_shows(const ErrorMeasure& error, std::size_t rows, const RoundingPlan& plan);

/// Whether the truth's bound is far enough below the truth for an error of it to be told from 0: 2^-20 of its norm, which
/// leaves three digits of the level of bf16 (2^-9).
[[nodiscard]] bool truth_is_resolved(const WideReal& bound, const WideReal& truth_norm);
[[nodiscard]] bool truth_is_resolved(const OutputAttribution& output);

}  // namespace faultline
