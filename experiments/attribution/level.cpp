// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/level.hpp>

#include <cmath>
#include <limits>

#include <faultline/attribution/group_run.hpp>
#include <faultline/format/bulk.hpp>
#include <faultline/format/names.hpp>
#include <faultline/tensor/matrix.hpp>

namespace faultline {

std::optional<Format> stored_at(const RoundingPlan& plan, std::size_t place, bool grouped) {
    constexpr std::array<Site, 5> casts{Site::o_cast, Site::dq_cast, Site::dk_cast, Site::dv_cast, Site::lse};
    const bool of_keys = casts[place] == Site::dk_cast || casts[place] == Site::dv_cast;
    const bool summed = grouped && of_keys && plan.schedule.group_reduce == GroupReduce::after_cast;
    const Format format = plan[summed ? Site::kv_group_reduce : casts[place]].format;
    if (is_exact(format)) return std::nullopt;
    return format;
}

std::optional<Format> stored_format(const RoundingPlan& plan, Output output, bool grouped) {
    return stored_at(plan, static_cast<std::size_t>(output), grouped);
}

std::optional<Format> stored_format(const RoundingPlan& plan, const OutputAttribution& output) {
    return stored_at(plan, output.lse ? attribution::lse_place : static_cast<std::size_t>(output.output),
                     output.grouped);
}

std::string type_name(const Format& format) {
    for (const NamedFormat& known : all_formats())
        if (with_saturation(format, known.format.saturates) == known.format) return std::string(known.name);
    return name(format);
}

const std::optional<WideReal>& level_of(const ObservedOutput& seen, const OutputAttribution& output) {
    return seen.level ? seen.level : output.level;
}

const ErrorMeasure& plan_in_type_of(const ObservedOutput& seen, const OutputAttribution& output) {
    return seen.plan ? *seen.plan : output.plan;
}

WideReal rounding_error(const CertifiedMatrix& truth, const Format& format) {
    Matrix stored(truth.rows, truth.cols);
    truth.copy_to(stored.view());
    round_bulk(stored.values, format);
    for (const double x : stored.values)
        if (std::isinf(x)) return {std::numeric_limits<double>::infinity()};
    return frobenius_distance(stored.view(), truth);
}

double typical_level(const Format& format) { return std::ldexp(1.0 / std::sqrt(7.0), -format.precision); }

bool below_range(const WideReal& truth_norm, const Format& format) {
    // Half the smallest subnormal, 2^(emin - p + 1), still rounds to zero (a tie goes to the even zero).
    const WideReal half_smallest(1.0, format.emin - format.precision);
    return truth_norm > WideReal(0.0) && truth_norm <= half_smallest;
}

bool at_level(const ErrorMeasure& error, const std::optional<WideReal>& level) {
    return level && error.nonfinite == 0 && error.rel_error <= WideReal(level_allowance) * *level;
}

bool lse_shows(const ErrorMeasure& error, std::size_t rows, const RoundingPlan& plan) {
    if (plan.schedule.p_saved) return false;
    if (error.nonfinite > 0) return true;
    if (rows == 0) return false;
    Format stored = plan[Site::bwd_p_cast].format;
    if (is_exact(stored)) stored = fp32;
    const double limit = 2 * typical_level(stored) * std::sqrt(static_cast<double>(rows));
    return error.error_norm > WideReal(limit);
}

bool truth_is_resolved(const WideReal& bound, const WideReal& truth_norm) {
    return bound == WideReal(0) || bound <= WideReal(0x1p-20) * truth_norm;
}

bool truth_is_resolved(const OutputAttribution& output) {
    return truth_is_resolved(output.truth_bound, output.truth_norm);
}

}  // namespace faultline
