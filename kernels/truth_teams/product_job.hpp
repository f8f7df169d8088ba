// SPDX-License-Identifier: Apache-2.0
// The sums of products of lemma 1 as tiles: each element's steps in the order of lib/truth/products.cpp, the
// accumulators in registers. A thread has 4 rows by `columns` columns, 32 apart, so that a warp reads whole lines of
// the right factor.
#pragma once

#include <cmath>

#include <faultline/truth_teams/flat.hpp>

namespace faultline::truth_teams {

struct Steps {
    std::ptrdiff_t begin, end;
};

/// q k^T and dout v^T: as many steps as there are coordinates, for the keys that a row sees.
struct DotSteps {
    FlatInputs in;
    std::ptrdiff_t first, count;

    [[nodiscard]] FAULTLINE_HD bool needed(std::ptrdiff_t row, std::ptrdiff_t last, std::ptrdiff_t col) const {
        const bool one_head = in.head(first + row) == in.head(first + last);
        return !one_head || col < padded(in.seen(in.query(first + last)));
    }
    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t parts(std::ptrdiff_t, std::ptrdiff_t) const { return 1; }
    [[nodiscard]] FAULTLINE_HD Steps part(std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t) const { return {0, count}; }
};

/// p v and ds k: a step for each key that a row sees. Rows that see fewer have zeros there, which change nothing.
struct KeySteps {
    FlatInputs in;
    std::ptrdiff_t first;

    [[nodiscard]] FAULTLINE_HD bool needed(std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t) const { return true; }
    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t parts(std::ptrdiff_t, std::ptrdiff_t) const { return 1; }
    [[nodiscard]] FAULTLINE_HD Steps part(std::ptrdiff_t, std::ptrdiff_t row, std::ptrdiff_t last) const {
        const bool one_head = in.head(first + row) == in.head(first + last);
        return {0, one_head ? in.seen(in.query(first + last)) : in.n_k};
    }
};

/// ds^T q and p^T dout: a step for each row of the strip whose query may see the key, head by head.
struct QuerySteps {
    FlatInputs in;
    std::ptrdiff_t first, count;

    [[nodiscard]] FAULTLINE_HD bool needed(std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t) const { return true; }
    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t parts(std::ptrdiff_t, std::ptrdiff_t) const {
        return in.head(first + count - 1) - in.head(first) + 1;
    }
    [[nodiscard]] FAULTLINE_HD Steps part(std::ptrdiff_t n, std::ptrdiff_t key, std::ptrdiff_t) const {
        const std::ptrdiff_t head = (in.head(first) + n) * in.n_q - first;
        const std::ptrdiff_t from = head + in.first_query(key), to = head + in.n_q;
        return {from < 0 ? 0 : from, to > count ? count : to};
    }
};

/// out[row, col] <- (out or sigma) + sum over steps of left(row, step) right(step, col); with `finish` less sigma
/// again. sigma = 6 row_power col_power (1.5 times 2^2).
template <class StepsOf, int columns, bool has_low>
struct ProductJob {
    StepsOf steps;
    std::ptrdiff_t rows, cols;
    const double *left_high, *left_low;  // element at row * row_stride + step * step_stride
    std::ptrdiff_t row_stride, step_stride;
    const double* right;  // step * right_stride + col
    std::ptrdiff_t right_stride;
    const double *row_power, *col_power;
    double *high, *low;  // row * out_stride + col
    std::ptrdiff_t out_stride;
    bool resume, finish;

    static constexpr int rows_each = 4, lane_count = 32, warps = 8;
    static constexpr std::ptrdiff_t tile_rows = rows_each * warps, tile_cols = columns * lane_count;

    [[nodiscard]] std::ptrdiff_t teams() const {
        return ((rows + tile_rows - 1) / tile_rows) * ((cols + tile_cols - 1) / tile_cols);
    }
    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double*) const {
        const std::ptrdiff_t across = (cols + tile_cols - 1) / tile_cols;
        // The longest rows come first: under causality those are the last (or, of keys, the first).
        const std::ptrdiff_t down = (rows + tile_rows - 1) / tile_rows;
        const std::ptrdiff_t tile = step_stride == 1 ? down - 1 - index / across : index / across;
        for (std::ptrdiff_t rank = team.rank(); rank < warps * lane_count; rank += team.size())
            run(tile * tile_rows + rank / lane_count * rows_each, index % across * tile_cols + rank % lane_count);
    }

  private:
    FAULTLINE_HD void run(std::ptrdiff_t row, std::ptrdiff_t col) const {
        if (row >= rows || col >= cols) return;
        const std::ptrdiff_t last = row + rows_each <= rows ? row + rows_each - 1 : rows - 1;
        if (!steps.needed(row, last, col - col % lane_count)) return;
        double acc[rows_each][columns], rest[rows_each][columns];
        const double *at_high[rows_each], *at_low[rows_each];
        std::ptrdiff_t at_col[columns];
        for (int c = 0; c < columns; ++c) {
            const std::ptrdiff_t own = col + c * lane_count;
            at_col[c] = own < cols ? own : col;  // a column twice, where there are no more: stored once
        }
        for (int r = 0; r < rows_each; ++r) {
            const std::ptrdiff_t own = row + r <= last ? row + r : last;
            at_high[r] = left_high + own * row_stride;
            at_low[r] = has_low ? left_low + own * row_stride : nullptr;
            for (int c = 0; c < columns; ++c) {
                const std::ptrdiff_t at = own * out_stride + at_col[c];
                acc[r][c] = resume ? high[at] : sigma(own, at_col[c]);
                rest[r][c] = resume ? low[at] : 0;
            }
        }
        const std::ptrdiff_t parts = steps.parts(row, last);
        for (std::ptrdiff_t n = 0; n < parts; ++n) {
            const Steps part = steps.part(n, row, last);
#ifdef __CUDACC__
#pragma unroll 4  // the factors of the next steps are on their way while these are summed
#endif
            for (std::ptrdiff_t t = part.begin; t < part.end; ++t) {
                const double* b = right + t * right_stride;
                double factor[columns];
                for (int c = 0; c < columns; ++c) factor[c] = b[at_col[c]];
                for (int r = 0; r < rows_each; ++r) {
                    const double a = at_high[r][t * step_stride];
                    if constexpr (has_low) {
                        const double a_low = at_low[r][t * step_stride];
                        for (int c = 0; c < columns; ++c)
                            detail::product_step(a, a_low, factor[c], acc[r][c], rest[r][c]);
                    } else {
                        for (int c = 0; c < columns; ++c) detail::product_step(a, factor[c], acc[r][c], rest[r][c]);
                    }
                }
            }
        }
        for (int r = 0; r < rows_each; ++r)
            for (int c = 0; c < columns; ++c) {
                if (row + r > last || col + c * lane_count >= cols) continue;
                const DoubleDouble sum = finish ? detail::finished(sigma(row + r, at_col[c]), acc[r][c], rest[r][c])
                                                : DoubleDouble{acc[r][c], rest[r][c]};
                high[(row + r) * out_stride + at_col[c]] = sum.high;
                low[(row + r) * out_stride + at_col[c]] = sum.low;
            }
    }
    [[nodiscard]] FAULTLINE_HD double sigma(std::ptrdiff_t row, std::ptrdiff_t col) const {
        return 6 * row_power[row] * col_power[col];
    }
};

}  // namespace faultline::truth_teams
