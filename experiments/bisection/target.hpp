// SPDX-License-Identifier: Apache-2.0
// What a set of repairs is to reach, as a person writes it:
//   layer1.dq.rel_error < 1e-2          LAYER.OUTPUT.MEASURE, < <= > >=, a number or a percentage
//   abs(layer1.dq.signed_bias) < 0.01
//   layer1.dq.rel_error                 a measure alone: within a tolerance of what the plan itself has
// A layer's name may hold dots; where the capture has one layer it may be left out: dq.rel_error < 1e-2.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/attribution/attribution.hpp>

namespace faultline {

/// Numbers of ErrorMeasure (plan's own run against truth), and one against the plan.
enum class Metric : unsigned char {
    rel_error,
    error_norm,
    signed_bias,
    t_statistic,
    gain,
    row_coherence,
    head_coherence,
    mean_key_share,
    mean_key_sign,
    nonfinite,
    plan_distance,  ///< |value - the plan's value| / |the plan's error|, Frobenius: 0 where a run has the plan's error,
                    ///< infinite where an element is finite in one of the two alone
};
[[nodiscard]] std::string_view name(Metric metric);

struct Target {
    enum class Relation : unsigned char { less, less_equal, greater, greater_equal, near_plan };

    std::string text;   ///< as given
    std::string layer;  ///< empty until it is settled with the layers of a capture
    Output output = Output::dq;
    Metric metric = Metric::rel_error;
    bool absolute = false;
    Relation relation = Relation::less;
    WideReal bound;        ///< for near_plan: the plan's own value, filled by bisect()
    double tolerance = 0;  ///< for near_plan: of the plan's value

    [[nodiscard]] bool met(const WideReal& value) const;
    /// How far a value is from the target: at most 0 where it is met, and the larger the farther; +inf for a NaN. In
    /// powers of two where value and bound are positive, else their difference.
    [[nodiscard]] double distance(const WideReal& value) const;
};

/// Reads a target and finds its layer among `layers`. `tolerance` is that of a measure alone; with nothing there, a measure
/// alone is refused, and so is a bound beyond all that the measure may be. RequestError, one sentence with the text, what is wrong
/// in it and what is expected: the grammar where it does not follow it.
[[nodiscard]] Target parse_target(std::string_view text, const std::vector<std::string>& layers,
                                  std::optional<double> tolerance);

/// RequestError, which names them, where no one value of a measure meets what is asked of it, or no output with elements that are
/// not finite, where some are asked for, what is asked of its error.
void expect_compatible(const std::vector<Target>& targets);

/// The value that the target is about. `plan_distance` is what ErrorMeasure does not have. Of an output with elements that
/// are not finite the size of the error is infinite, and what has a sign or a share is NaN, which meets no target.
[[nodiscard]] WideReal value_of(const Target& target, const ErrorMeasure& measure, double plan_distance);

}  // namespace faultline
