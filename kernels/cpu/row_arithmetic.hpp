// SPDX-License-Identifier: Apache-2.0
// What a streaming softmax does with one row of a tile: its maximum and its sum. Compiles for host and device, so that both
// add in the same order.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <faultline/base/host_device.hpp>
#include <faultline/plan/schedule.hpp>
#include <faultline/random/bits_as.hpp>

namespace faultline {

/// Partial sums of a row in this order, which meet only when the row is read.
FAULTLINE_HD constexpr int lanes_of(RowSumOrder order) { return order == RowSumOrder::quad ? 4 : 1; }

/// The row's sum as the kernel joins its lanes, each addition rounded by `rounded`.
template <class Round>
[[nodiscard]] FAULTLINE_HD double joined_lanes(const double* lanes, RowSumOrder order, Round&& rounded) {
    if (lanes_of(order) == 1) return lanes[0];
    return rounded(rounded(lanes[0] + lanes[2]) + rounded(lanes[1] + lanes[3]));  // shuffle by 2, then by 1
}

/// The tree of neighbours over leaf(0), …, leaf(count - 1), an odd one moving up unchanged, every addition rounded by
/// `rounded`: like a binary counter, a finished subtree of 2^l leaves waits until its neighbour is finished; those left over
/// join from the smallest up. count > 0.
template <class Leaf, class Round>
[[nodiscard]] FAULTLINE_HD auto tree_of_neighbours(std::ptrdiff_t count, Leaf&& leaf, Round&& rounded) {
    using T = decltype(leaf(count));
    T waiting[64];
    int level[64];
    int depth = 0;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        T sum = leaf(j);
        int l = 0;
        while (depth > 0 && level[depth - 1] == l) {
            sum = rounded(waiting[--depth] + sum);
            ++l;
        }
        waiting[depth] = sum;
        level[depth++] = l;
    }
    T sum = waiting[--depth];
    while (depth > 0) sum = rounded(waiting[--depth] + sum);
    return sum;
}

/// Lane t of RowSumOrder::quad with its part of the row.
template <class Round>
[[nodiscard]] FAULTLINE_HD double added_to_quad_lane(const double* p, std::ptrdiff_t count, double alpha, double lane,
                                                     std::ptrdiff_t t, Round&& rounded) {
    const std::ptrdiff_t first = 2 * t;
    // lane and alpha are floats, so their product is exact in binary64 and this is one fma.
    lane = rounded(lane * alpha + (first < count ? p[first] : 0.0));
    for (std::ptrdiff_t j = first + 1; j < count; j += (j % 2 == 1) ? 7 : 1) lane = rounded(lane + p[j]);
    return lane;
}

/// Eight sums by index mod 8 over added(sum, j), each from zero, then joined: neighbours, then halves (four threads that have
/// two columns of eight each; within a thread first, then shuffles by 2 and by 1).
template <class Add, class Round>
[[nodiscard]] FAULTLINE_HD double sum_mod_8(std::ptrdiff_t count, Add&& added, Round&& rounded) {
    double part[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (std::ptrdiff_t j = 0; j < count; ++j) part[j % 8] = rounded(added(part[j % 8], j));
    for (int t = 0; t < 4; ++t) part[t] = rounded(part[2 * t] + part[2 * t + 1]);
    return rounded(rounded(part[0] + part[2]) + rounded(part[1] + part[3]));
}

/// lanes <- lanes alpha + sum_j p[j] in the kernel's order, every operation rounded by `rounded`.
template <class Round>
FAULTLINE_HD void add_row(const double* p, std::ptrdiff_t count, RowSumOrder order, double alpha, double* lanes,
                          Round&& rounded) {
    if (order != RowSumOrder::quad && order != RowSumOrder::mod_8) lanes[0] = rounded(lanes[0] * alpha);
    switch (order) {
        case RowSumOrder::sequential:
            for (std::ptrdiff_t j = 0; j < count; ++j) lanes[0] = rounded(lanes[0] + p[j]);
            return;
        case RowSumOrder::quad:
            for (std::ptrdiff_t t = 0; t < 4; ++t) lanes[t] = added_to_quad_lane(p, count, alpha, lanes[t], t, rounded);
            return;
        case RowSumOrder::warp_of_32:
            for (std::ptrdiff_t block = 0; block < count; block += 32) {
                double lane[4] = {0, 0, 0, 0};
                for (std::ptrdiff_t j = block; j < count && j < block + 32; ++j) {
                    double& sum = lane[(j % 8) / 2];
                    sum = rounded(sum + p[j]);
                }
                lanes[0] = rounded(lanes[0] + rounded(rounded(lane[0] + lane[1]) + rounded(lane[2] + lane[3])));
            }
            return;
        case RowSumOrder::mod_8: {
            const auto added = [p](double sum, std::ptrdiff_t j) { return sum + p[j]; };
            // lane and alpha are floats, so their product is exact in binary64 and this is one fma.
            lanes[0] = rounded(lanes[0] * alpha + sum_mod_8(count, added, rounded));
            return;
        }
        case RowSumOrder::pairwise:
            if (count > 0) {
                const auto leaf = [p](std::ptrdiff_t j) { return p[j]; };
                lanes[0] = rounded(lanes[0] + tree_of_neighbours(count, leaf, rounded));
            }
            return;
    }
}

/// c (m_old - m_new) in the form of the schedule, all but its last rounding. c is 1 where the scores are scaled already.
/// `rounded`: an intermediate rounding of the site; `in_fp32`: whether that is fp32.
template <class Round>
[[nodiscard]] FAULTLINE_HD double rescale_argument(ArgumentForm form, double old_maximum, double maximum, double c,
                                                   bool in_fp32, Round&& rounded) {
    constexpr double none = detail::bits_as<double>(std::uint64_t{0xFFF} << 52);  // -inf
    const double top = maximum == none ? 0.0 : maximum;
    if (form == ArgumentForm::subtract_then_scale || c == 1.0) return rounded(old_maximum - top) * c;
    const double shift = rounded(top * c);
    if (form == ArgumentForm::unfused) return rounded(old_maximum * c) - shift;
    const auto is_a_float = [](double x) { return static_cast<double>(static_cast<float>(x)) == x; };
    return in_fp32 && is_a_float(old_maximum) && is_a_float(c) && is_a_float(shift)
               ? static_cast<double>(
                     fmaf(static_cast<float>(old_maximum), static_cast<float>(c), static_cast<float>(-shift)))
               : fma(old_maximum, c, -shift);
}

/// What an instrument made of a row's joined sum, carried into its lanes: a change goes into the first. A sum that it left
/// alone stays as it is, infinite and NaN ones too: adding after - before would make an infinite sum NaN.
FAULTLINE_HD inline void carry_change(double before, double after, double* lanes, int count) {
    if (after == before || (after != after && before != before)) return;
    const double change = after - before;
    if (change - change == 0) {  // finite
        lanes[0] += change;
        return;
    }
    lanes[0] = after;
    for (int t = 1; t < count; ++t) lanes[t] = 0;
}

/// The maximum that a tile's scores lead to from the old one, before the row_max site rounds it. `tile_maximum`: the first of
/// the scores that none exceeds, -infinity where there is none. repeats(x): how many are x or more. `logit_per_score`: how
/// many nats a unit of the scores is; `exponent`: what the scores are multiplied with in the exponent (Scales).
template <class Repeats>
[[nodiscard]] FAULTLINE_HD double next_maximum(double tile_maximum, Repeats&& repeats, double old_maximum,
                                               const Schedule& schedule, double logit_per_score, double exponent) {
    constexpr double none = detail::bits_as<double>(std::uint64_t{0xFFF} << 52);  // -inf
    if (schedule.max_policy == MaxPolicy::stable && tile_maximum > none) {
        // Algorithm 1 of arXiv 2510.04212 with its tolerance: a repeated maximum of a tile is moved off the scores, so that
        // no probability is exactly 1.
        const double tolerance = schedule.stable_tolerance / logit_per_score;
        const std::ptrdiff_t found = repeats(tile_maximum - tolerance);
        if (found >= 2 && tile_maximum > 0)
            tile_maximum = schedule.stable_beta * tile_maximum;
        else if (found >= 2 && tile_maximum < 0)
            tile_maximum = 0;
    }
    const double maximum = old_maximum < tile_maximum ? tile_maximum : old_maximum;
    // FlashAttention-4: keep the old maximum while the rescale that the new one asks for is small.
    if (schedule.max_policy == MaxPolicy::lazy && old_maximum > none &&
        (maximum - old_maximum) * exponent <= schedule.max_threshold)
        return old_maximum;
    return maximum;
}

/// The same of the scores of one row.
[[nodiscard]] FAULTLINE_HD inline double next_maximum(const double* s, std::ptrdiff_t count, double old_maximum,
                                                      const Schedule& schedule, double logit_per_score,
                                                      double exponent) {
    double tile_maximum = detail::bits_as<double>(std::uint64_t{0xFFF} << 52);  // -inf
    for (std::ptrdiff_t j = 0; j < count; ++j) tile_maximum = tile_maximum < s[j] ? s[j] : tile_maximum;
    const auto repeats = [&](double least) {
        std::ptrdiff_t found = 0;
        for (std::ptrdiff_t j = 0; j < count; ++j) found += s[j] >= least ? 1 : 0;
        return found;
    };
    return next_maximum(tile_maximum, repeats, old_maximum, schedule, logit_per_score, exponent);
}

}  // namespace faultline
