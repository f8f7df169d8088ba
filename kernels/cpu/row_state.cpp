// SPDX-License-Identifier: Apache-2.0
#include <faultline/cpu/row_state.hpp>

namespace faultline::cpu {
namespace {

/// Algorithm 1 of arXiv 2510.04212 with its tolerance: a repeated maximum of a tile is moved off the scores, so that no
/// probability is exactly 1.
double stable_maximum(const double* s, std::ptrdiff_t count, double tile_maximum, const Schedule& schedule,
                      const Scales& scales) {
    const double tolerance = schedule.stable_tolerance / scales.logit_per_score(schedule);
    std::ptrdiff_t repeats = 0;
    for (std::ptrdiff_t j = 0; j < count; ++j) repeats += s[j] >= tile_maximum - tolerance;
    if (repeats < 2) return tile_maximum;
    if (tile_maximum > 0) return schedule.stable_beta * tile_maximum;
    if (tile_maximum < 0) return 0;
    return tile_maximum;
}

}  // namespace

double next_maximum(const double* s, std::ptrdiff_t count, double old_maximum, const Schedule& schedule,
                    const Scales& scales) {
    double tile_maximum = -infinity;
    for (std::ptrdiff_t j = 0; j < count; ++j) tile_maximum = std::max(tile_maximum, s[j]);
    if (schedule.max_policy == MaxPolicy::stable && tile_maximum > -infinity)
        tile_maximum = stable_maximum(s, count, tile_maximum, schedule, scales);
    const double maximum = std::max(old_maximum, tile_maximum);
    // FlashAttention-4: keep the old maximum while the rescale that the new one asks for is small.
    if (schedule.max_policy == MaxPolicy::lazy && old_maximum > -infinity &&
        (maximum - old_maximum) * scales.exponent <= schedule.max_threshold)
        return old_maximum;
    return maximum;
}

}  // namespace faultline::cpu
