// SPDX-License-Identifier: Apache-2.0
// The blocked product, written once for a vector type V of `V::width` elements with load, store, broadcast and fma. Every
// instruction set's file instantiates it with its own V, so that no instance is shared.
//
// B is packed into panels of VECTORS * width columns, k by k, zero beyond n; a panel meets A in tiles of rows whose
// accumulators stay in registers. Blocks of k follow each other in ascending order and the accumulator passes through C
// between them, which rounds nothing: the chain of fma per element is the same for any blocking.
#pragma once

#include "block.hpp"

namespace faultline::gemm_detail {

template <class V, int ROWS, int VECTORS>
[[gnu::always_inline]] inline void tile(const Problem<typename V::Element>& p, const typename V::Element* a,
                                        const typename V::Element* panel, std::ptrdiff_t depth, typename V::Element* c,
                                        std::ptrdiff_t columns, bool from_zero) {
    using T = typename V::Element;
    constexpr std::ptrdiff_t width = V::width;
    typename V::Type sum[ROWS][VECTORS];
    alignas(64) T edge[VECTORS * width];
    const bool whole = columns == VECTORS * width;
    for (int r = 0; r < ROWS; ++r) {
        const T* from = c + r * p.c_row;
        if (!from_zero && !whole) {
            for (std::ptrdiff_t j = 0; j < VECTORS * width; ++j) edge[j] = j < columns ? from[j] : T(0);
            from = edge;
        }
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = from_zero ? V::zero() : V::load(from + v * width);
    }
    for (std::ptrdiff_t t = 0; t < depth; ++t) {
        typename V::Type b[VECTORS];
        for (int v = 0; v < VECTORS; ++v) b[v] = V::load(panel + (t * VECTORS + v) * width);
        for (int r = 0; r < ROWS; ++r) {
            const typename V::Type x = V::broadcast(a[r * p.a_row + t * p.a_col]);
            for (int v = 0; v < VECTORS; ++v) sum[r][v] = V::fma(x, b[v], sum[r][v]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        T* to = c + r * p.c_row;
        if (whole) {
            for (int v = 0; v < VECTORS; ++v) V::store(to + v * width, sum[r][v]);
        } else {
            for (int v = 0; v < VECTORS; ++v) V::store(edge + v * width, sum[r][v]);
            for (std::ptrdiff_t j = 0; j < columns; ++j) to[j] = edge[j];
        }
    }
}

/// The last rows of a panel: as many tiles of ROWS as fit, then fewer.
template <class V, int ROWS, int VECTORS>
void rows_of_panel(const Problem<typename V::Element>& p, const typename V::Element* a, std::ptrdiff_t rows,
                   const typename V::Element* panel, std::ptrdiff_t depth, typename V::Element* c,
                   std::ptrdiff_t columns, bool from_zero) {
    while (rows >= ROWS) {
        tile<V, ROWS, VECTORS>(p, a, panel, depth, c, columns, from_zero);
        a += ROWS * p.a_row;
        c += ROWS * p.c_row;
        rows -= ROWS;
    }
    if constexpr (ROWS > 1)
        if (rows > 0) rows_of_panel<V, ROWS / 2, VECTORS>(p, a, rows, panel, depth, c, columns, from_zero);
}

/// `width` rows of as many elements, `stride` apart, into columns: to[t * to_stride + j] = from[j * stride + t]. Blocks off
/// the diagonal are swapped, of half the size, then a quarter, and so on; rows from `rows` on count as zeros.
template <class V>
[[gnu::always_inline]] inline void transpose_block(const typename V::Element* from, std::ptrdiff_t stride,
                                                   std::ptrdiff_t rows, typename V::Element* to,
                                                   std::ptrdiff_t to_stride) {
    constexpr int width = V::width;
    typename V::Type r[width];
    for (int j = 0; j < width; ++j) r[j] = j < rows ? V::load(from + j * stride) : V::zero();
#pragma GCC unroll 4
    for (int half = width / 2; half > 0; half /= 2) {
        typename V::Index low, high;
        for (int l = 0; l < width; ++l) {
            low[l] = (l & half) != 0 ? width + l - half : l;
            high[l] = (l & half) != 0 ? width + l : l + half;
        }
#pragma GCC unroll 16
        for (int i = 0; i < width; ++i) {
            if ((i & half) != 0) continue;
            const typename V::Type a = r[i], b = r[i + half];
            r[i] = __builtin_shuffle(a, b, low);
            r[i + half] = __builtin_shuffle(a, b, high);
        }
    }
    for (int t = 0; t < width; ++t) V::store(to + t * to_stride, r[t]);
}

/// Rows [k0, k0 + depth) of b's columns [first, first + columns) into a panel of `width` columns.
template <class V>
void pack(const Problem<typename V::Element>& p, std::ptrdiff_t k0, std::ptrdiff_t depth, std::ptrdiff_t first,
          std::ptrdiff_t columns, std::ptrdiff_t width, typename V::Element* panel) {
    using T = typename V::Element;
    const T* b = p.b + k0 * p.b_row + first * p.b_col;
    if (p.b_col == 1) {
        for (std::ptrdiff_t t = 0; t < depth; ++t, b += p.b_row, panel += width) {
            for (std::ptrdiff_t j = 0; j < columns; ++j) panel[j] = b[j];
            for (std::ptrdiff_t j = columns; j < width; ++j) panel[j] = T(0);
        }
        return;
    }
    std::ptrdiff_t done = 0;
    if constexpr (V::width > 1)
        for (; p.b_row == 1 && done + V::width <= depth; done += V::width)
            for (std::ptrdiff_t j = 0; j < width; j += V::width)
                transpose_block<V>(b + done + j * p.b_col, p.b_col, columns - j, panel + done * width + j, width);
    for (std::ptrdiff_t t = done; t < depth; ++t)
        for (std::ptrdiff_t j = 0; j < width; ++j)
            panel[t * width + j] = j < columns ? b[t * p.b_row + j * p.b_col] : T(0);
}

/// Panels of WIDE vectors, then narrower ones for what is left of n.
template <class V>
struct Shape {
    static constexpr std::ptrdiff_t widest = V::wide * V::width;
    static std::ptrdiff_t vectors(std::ptrdiff_t columns) {
        if (columns > 2 * V::width) return V::wide;
        return columns > V::width ? 2 : 1;
    }
};

template <class V>
void panel_times_rows(const Problem<typename V::Element>& p, std::ptrdiff_t k0, std::ptrdiff_t depth, std::ptrdiff_t i0,
                      std::ptrdiff_t rows, std::ptrdiff_t j0, std::ptrdiff_t columns,
                      const typename V::Element* panel) {
    const auto* a = p.a + i0 * p.a_row + k0 * p.a_col;
    auto* c = p.c + i0 * p.c_row + j0;
    const bool from_zero = k0 == 0 && !p.accumulate;
    const std::ptrdiff_t vectors = Shape<V>::vectors(columns);
    if (vectors == 1)
        rows_of_panel<V, V::rows_narrow, 1>(p, a, rows, panel, depth, c, columns, from_zero);
    else if (vectors == 2)
        rows_of_panel<V, V::rows_two, 2>(p, a, rows, panel, depth, c, columns, from_zero);
    else
        rows_of_panel<V, V::rows_wide, V::wide>(p, a, rows, panel, depth, c, columns, from_zero);
}

template <class V>
void multiply(const Problem<typename V::Element>& p) {
    for (std::ptrdiff_t n0 = 0; n0 < p.n; n0 += block_n) {
        const std::ptrdiff_t n1 = n0 + block_n < p.n ? n0 + block_n : p.n;
        for (std::ptrdiff_t k0 = 0; k0 < p.k; k0 += block_k) {
            const std::ptrdiff_t depth = k0 + block_k < p.k ? block_k : p.k - k0;
            auto* packed = p.packed;
            for (std::ptrdiff_t j = n0; j < n1;) {
                const std::ptrdiff_t columns = n1 - j < Shape<V>::widest ? n1 - j : Shape<V>::widest;
                const std::ptrdiff_t width = Shape<V>::vectors(columns) * V::width;
                pack<V>(p, k0, depth, j, columns, width, packed);
                packed += width * depth;
                j += columns;
            }
            for (std::ptrdiff_t i = 0; i < p.m; i += block_m) {
                const std::ptrdiff_t rows = i + block_m < p.m ? block_m : p.m - i;
                const auto* panel = p.packed;
                for (std::ptrdiff_t j = n0; j < n1;) {
                    const std::ptrdiff_t columns = n1 - j < Shape<V>::widest ? n1 - j : Shape<V>::widest;
                    panel_times_rows<V>(p, k0, depth, i, rows, j, columns, panel);
                    panel += Shape<V>::vectors(columns) * V::width * depth;
                    j += columns;
                }
            }
        }
    }
}

}  // namespace faultline::gemm_detail
