// SPDX-License-Identifier: Apache-2.0
// What a team of the forward works in.
#pragma once

#include <faultline/emulated/rows.hpp>

namespace faultline::emulated {

/// Tiles and row statistics of `rows` rows.
struct ForwardMemory {
    View<double> s, cast, o, split_o;  ///< [rows, block_k], the same, [rows, d_v], [splits * rows, d_v]
    double *maximum, *old_maximum, *alpha, *running_lse, *lanes, *rounded_lanes, *joined, *inverse, *shift, *term, *lse;
    double *split_lse, *weights;  ///< [splits * rows], the tree of SplitMerge::lse_of for each row
    double* exact;                ///< the largest tile that is shown; nullptr where nothing is
    double* scratch;              ///< one number
    double* maxima;               ///< of row_maxima
    TreeMemory tree;

    FAULTLINE_HD ForwardMemory(Arena& arena, const Schedule& schedule, std::ptrdiff_t rows, std::ptrdiff_t n_k,
                               std::ptrdiff_t d_v, bool watched)
        : tree(arena, schedule.row_sum_order, rows, TileAxis(n_k, schedule.block_k).block()) {
        const std::ptrdiff_t cols = TileAxis(n_k, schedule.block_k).block();
        const std::ptrdiff_t splits = schedule.key_splits > 1 ? schedule.key_splits : 0;
        s = arena.take(rows, cols);
        cast = arena.take(schedule.row_sum_adds != RowSumAdds::unrounded ? rows : 0, cols);
        o = arena.take(rows, d_v);
        split_o = arena.take(splits * rows, d_v);
        for (double** array : {&maximum, &old_maximum, &alpha, &running_lse, &joined, &inverse, &shift, &term, &lse})
            *array = arena.take(rows);
        lanes = arena.take(4 * rows);
        rounded_lanes = arena.take(4 * rows);
        split_lse = arena.take(splits * rows);
        weights = arena.take(2 * splits * rows);
        maxima = arena.take(2 * maximum_parts * rows);
        exact = watched ? arena.take(rows * (cols > d_v ? cols : d_v)) : nullptr;
        scratch = arena.take(1);
    }
};

}  // namespace faultline::emulated
