// SPDX-License-Identifier: Apache-2.0
// The level of a format: the error that rounding an output once to the format it is stored in can cost.
#pragma once

#include <optional>

#include <faultline/attribution/attribution.hpp>
#include <faultline/format/format.hpp>

namespace faultline {

/// The format in which a plan stores an output; nothing where the plan leaves it exact.
[[nodiscard]] std::optional<Format> stored_format(const RoundingPlan& plan, Output output);

/// 2^-(p+1) for a format of p significant bits: bf16 2^-9 = 0.195%. One rounding to nearest of values whose significands m
/// are spread log-uniformly over [1, 2) costs 2^-p / sqrt(3 mean(m^2)) = 0.39 2^-p in Frobenius norm (mean(m^2) = 3 / (2 ln 2)),
/// and 0.5 2^-p leaves room for significands that crowd near 1 (the most that it can cost is 2^-p).
[[nodiscard]] double level_of(const Format& format);

/// Whether every element of that norm rounds to zero in the format: 0 is then what a perfect kernel stores, with error 100%.
[[nodiscard]] bool below_range(const WideReal& truth_norm, const Format& format);

/// Whether an error is no larger than level_of the stored format.
[[nodiscard]] bool at_level(const ErrorMeasure& error, const std::optional<Format>& format);

}  // namespace faultline
