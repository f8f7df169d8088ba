// SPDX-License-Identifier: Apache-2.0
// What is made of a row of a tile, by several threads: its maximum and its sum, with the bits of one thread that goes along
// it (kernels/cpu/row_arithmetic.hpp).
#pragma once

#include <faultline/cpu/row_arithmetic.hpp>
#include <faultline/emulated/problem.hpp>

namespace faultline::emulated {

/// Threads that look for a row's maximum together.
inline constexpr std::ptrdiff_t maximum_parts = 8;

/// top[i]: the first element of row i that none exceeds, -infinity where there is none. `parts` has memory for 2
/// maximum_parts numbers of each row.
template <class Team>
FAULTLINE_HD void row_maxima(const Team& team, const View<double>& s, double* parts, double* top) {
    double* found_at = parts + maximum_parts * s.rows;
    each(team, s.rows, maximum_parts, [&](std::ptrdiff_t i, std::ptrdiff_t part) {
        const double* row = s.row(i);
        double best = -infinity();
        std::ptrdiff_t at = s.cols;
        for (std::ptrdiff_t j = part; j < s.cols; j += maximum_parts)
            if (best < row[j]) {
                best = row[j];
                at = j;
            }
        parts[maximum_parts * i + part] = best;
        found_at[maximum_parts * i + part] = static_cast<double>(at);
    });
    each_row(team, s.rows, [&](std::ptrdiff_t i) {
        double best = -infinity(), at = static_cast<double>(s.cols);
        for (std::ptrdiff_t part = maximum_parts * i; part < maximum_parts * (i + 1); ++part)
            if (best < parts[part] || (best == parts[part] && found_at[part] < at)) {  // +0 and -0 are equal
                best = parts[part];
                at = found_at[part];
            }
        top[i] = best;
    });
}

/// Memory for the tree of RowSumOrder::pairwise: its levels in turn.
struct TreeMemory {
    View<double> level[2];

    FAULTLINE_HD TreeMemory(Arena& arena, RowSumOrder order, std::ptrdiff_t rows, std::ptrdiff_t cols)
        : level{arena.take(order == RowSumOrder::pairwise ? rows : 0, (cols + 1) / 2),
                arena.take(order == RowSumOrder::pairwise ? rows : 0, (cols + 3) / 4)} {}
};

/// lanes[4 i …] <- lanes alpha[i] + the sum of row i in the kernel's order: add_row(). rounded(x): after every addition;
/// stored(x): what is kept between tiles.
template <class Team, class Round, class Stored>
FAULTLINE_HD void add_rows(const Team& team, const View<double>& p, RowSumOrder order, const double* alpha,
                           const TreeMemory& tree, double* lanes, Round&& rounded, Stored&& stored) {
    if (order == RowSumOrder::quad) {
        each(team, p.rows, 4, [&](std::ptrdiff_t i, std::ptrdiff_t t) {
            double& lane = lanes[4 * i + t];
            lane = stored(added_to_quad_lane(p.row(i), p.cols, alpha[i], lane, t, rounded));
        });
    } else if (order == RowSumOrder::pairwise && p.cols > 0) {
        View<double> from = p;
        int at = 0;
        while (from.cols > 1) {
            const View<double> to = tree.level[at].shaped(p.rows, (from.cols + 1) / 2);
            each(team, to.rows, to.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
                const double left = from(i, 2 * j);
                to(i, j) = 2 * j + 1 < from.cols ? rounded(left + from(i, 2 * j + 1)) : left;
            });
            from = to;
            at = 1 - at;
        }
        each_row(team, p.rows, [&](std::ptrdiff_t i) {
            lanes[4 * i] = stored(rounded(rounded(lanes[4 * i] * alpha[i]) + from(i, 0)));
        });
    } else {
        each_row(team, p.rows, [&](std::ptrdiff_t i) {
            add_row(p.row(i), p.cols, order, alpha[i], lanes + 4 * i, rounded);
            for (int t = 0; t < lanes_of(order); ++t) lanes[4 * i + t] = stored(lanes[4 * i + t]);
        });
    }
}

}  // namespace faultline::emulated
