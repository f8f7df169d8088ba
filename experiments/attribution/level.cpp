// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/level.hpp>

#include <cmath>

namespace faultline {

std::optional<Format> stored_format(const RoundingPlan& plan, Output output) {
    constexpr std::array<Site, 4> casts{Site::o_cast, Site::dq_cast, Site::dk_cast, Site::dv_cast};
    const Format format = plan[casts[static_cast<std::size_t>(output)]].format;
    if (is_exact(format)) return std::nullopt;
    return format;
}

double level_of(const Format& format) { return std::ldexp(1.0, -(format.precision + 1)); }

bool below_range(const WideReal& truth_norm, const Format& format) {
    // Half the smallest subnormal, 2^(emin - p + 1), still rounds to zero (a tie goes to the even zero).
    const WideReal half_smallest(1.0, format.emin - format.precision);
    return truth_norm > WideReal(0.0) && truth_norm <= half_smallest;
}

bool at_level(const ErrorMeasure& error, const std::optional<Format>& format) {
    return format && error.nonfinite == 0 && error.rel_error <= WideReal(level_of(*format));
}

}  // namespace faultline
