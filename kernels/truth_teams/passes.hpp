// SPDX-License-Identifier: Apache-2.0
// A team's sums and largest over a row. The trees are those of lib/truth/row_passes.cpp: the same bits. `partial` has
// one number for each thread.
#pragma once

#include <faultline/emulated/machine.hpp>
#include <faultline/truth_teams/flat.hpp>

namespace faultline::truth_teams {

using emulated::each_row;

/// The largest of value(j), j < count, and of `least`.
template <class Team, class F>
FAULTLINE_HD double largest(const Team& team, std::ptrdiff_t count, double least, double* partial, F&& value) {
    double top = least;
    for (std::ptrdiff_t j = team.rank(); j < count; j += team.size()) {
        const double x = value(j);
        top = x > top ? x : top;
    }
    partial[team.rank()] = top;
    team.sync();
    for (std::ptrdiff_t width = team.size() / 2; width > 0; width /= 2) {
        if (team.rank() < width) {
            const double other = partial[team.rank() + width];
            if (other > partial[team.rank()]) partial[team.rank()] = other;
        }
        team.sync();
    }
    top = partial[0];
    team.sync();
    return top;
}

/// sum_j (high_j + low_j); both are overwritten.
template <class Team>
FAULTLINE_HD DoubleDouble tree_sum(const Team& team, double* high, double* low, std::ptrdiff_t count) {
    const auto add_upper = [&](std::ptrdiff_t terms, std::ptrdiff_t offset) {
        each_row(team, terms, [&](std::ptrdiff_t j) {
            const DoubleDouble s = DoubleDouble{high[j], low[j]} + DoubleDouble{high[j + offset], low[j + offset]};
            high[j] = s.high;
            low[j] = s.low;
        });
    };
    while (count > lanes) {
        const std::ptrdiff_t kept = padded((count + 1) / 2);
        add_upper(count - kept, kept);
        count = kept;
    }
    for (std::ptrdiff_t width = lanes / 2; width > 0; width /= 2) add_upper(width, width);
    const DoubleDouble sum{high[0], low[0]};
    team.sync();
    return sum;
}

/// sum_j a_j; a is overwritten.
template <class Team>
FAULTLINE_HD double plain_sum(const Team& team, double* a, std::ptrdiff_t count) {
    while (count > lanes) {
        const std::ptrdiff_t kept = padded((count + 1) / 2);
        each_row(team, count - kept, [&](std::ptrdiff_t j) { a[j] += a[j + kept]; });
        count = kept;
    }
    for (std::ptrdiff_t width = lanes / 2; width > 0; width /= 2)
        each_row(team, width, [&](std::ptrdiff_t j) { a[j] += a[j + width]; });
    const double sum = a[0];
    team.sync();
    return sum;
}

/// The same for a_j >= 0, rounded up.
template <class Team>
FAULTLINE_HD double upper_sum(const Team& team, double* a, std::ptrdiff_t count) {
    return plain_sum(team, a, count) * detail::round_up;
}

}  // namespace faultline::truth_teams
