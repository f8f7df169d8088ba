// SPDX-License-Identifier: Apache-2.0
// How a team's threads lie on a block of a product of matrices, and how the operands of some terms come into memory that they
// share.
#pragma once

#include <cstddef>
#include <cstdint>

#include <faultline/emulated/machine.hpp>

namespace faultline::emulated::product {

inline constexpr int lanes = 256, warps = 8;  ///< of a team's block of C
inline constexpr int lane_rows = 4, lane_columns = 2, lane_elements = lane_rows * lane_columns;
inline constexpr int most_terms = 32;  ///< that stand in shared memory

/// How a team's lanes lie on its block of C: a warp has `across` of them side by side, and the team `down` warps under each
/// other. Terms [t] of the block's rows and columns stand in shared memory, padded so that threads that write neighbouring
/// terms do not wait for each other and rows of four values stay aligned.
template <int lanes_across, int warps_down, int terms_of>
struct Shape {
    static constexpr int across = lanes_across, down = warps_down, terms = terms_of;
    static constexpr int warp_rows = lane_rows * 32 / across, warp_columns = lane_columns * across;
    static constexpr int rows = warp_rows * down, columns = warp_columns * (warps / down);
    static constexpr int x_pitch = rows + 4, y_pitch = columns + 2;
    static constexpr int wide_x_pitch = rows + 2;  ///< of doubles, of which two are read at once
};
using Square = Shape<32, 8, most_terms>;    ///< 32 rows, 64 columns
using Wide = Shape<32, 4, most_terms / 2>;  ///< 16 rows, 128 columns
using Tall = Shape<16, 8, most_terms>;      ///< 64 rows, 32 columns

template <class T, class S>
struct Panels {
    static constexpr int x_pitch = sizeof(T) == 8 ? S::wide_x_pitch : S::x_pitch;
    alignas(16) T x[S::terms * x_pitch];
    alignas(16) T y[S::terms * S::y_pitch];
};
/// Numbers that a thread reads together.
template <class T, int n>
struct alignas(n * sizeof(T) > 16 ? 16 : n * sizeof(T)) Several {
    T v[n];
};
template <int n, class T>
FAULTLINE_HD inline Several<T, n> several(const T* from) {
#if defined(__CUDA_ARCH__)
    return *reinterpret_cast<const Several<T, n>*>(from);
#else
    Several<T, n> r;
    for (int i = 0; i < n; ++i) r.v[i] = from[i];
    return r;
#endif
}

/// What a lane has: its place in the block of C.
struct Lane {
    int row, column;  ///< the first of each
};
template <class S>
FAULTLINE_HD inline Lane lane_of(int index) {
    const int warp = index / 32, lane = index % 32;
    return {S::warp_rows * (warp % S::down) + lane_rows * (lane / S::across),
            S::warp_columns * (warp / S::down) + lane_columns * (lane % S::across)};
}

/// Row and column of an element of a lane's part of the block at (row0, column0).
struct Element {
    std::ptrdiff_t i, j;

    FAULTLINE_HD Element(const Lane& lane, std::ptrdiff_t row0, std::ptrdiff_t column0, int e)
        : i(row0 + lane.row + e / lane_columns), j(column0 + lane.column + e % lane_columns) {}
    [[nodiscard]] FAULTLINE_HD bool is_inside(const View<double>& c) const { return i < c.rows && j < c.cols; }
};

/// Elements that a thread has under way from memory before it puts the first where the team shares it.
inline constexpr int under_way = 4;

/// `terms` terms of `rows` rows (or columns) into shared memory: set(t, r, value) of each; what lies beyond the matrix is 0.
/// fetch() starts the loads of its batch of elements, put() needs them: between the two stand the loads of others.
template <int rows, int terms, class Team>
struct Stager {
    static constexpr int batch_elements = under_way * Team::lanes;
    static constexpr int batches = (rows * terms + batch_elements - 1) / batch_elements;
    const Team& team;
    const double* from;
    std::ptrdiff_t row_stride, step, valid_rows;
    int valid_terms;
    double value[under_way];

    FAULTLINE_HD static int term_of(int e, bool along_terms) { return along_terms ? e % terms : e / rows; }
    FAULTLINE_HD static int row_of(int e, bool along_terms) { return along_terms ? e / terms : e % rows; }
    [[nodiscard]] FAULTLINE_HD int element(int batch, int n) const {
        return batch * batch_elements + n * Team::lanes + static_cast<int>(team.rank());
    }
    FAULTLINE_HD void fetch(int batch) {
        const bool along = step == 1;
        FAULTLINE_HD_UNROLL
        for (int n = 0; n < under_way; ++n) {
            const int e = element(batch, n), r = row_of(e, along), t = term_of(e, along);
            value[n] = e < rows * terms && r < valid_rows && t < valid_terms ? from[r * row_stride + t * step] : 0.0;
        }
    }
    template <class Set>
    FAULTLINE_HD void put(int batch, Set&& set) const {
        const bool along = step == 1;
        FAULTLINE_HD_UNROLL
        for (int n = 0; n < under_way; ++n) {
            const int e = element(batch, n);
            if (e < rows * terms) set(term_of(e, along), row_of(e, along), value[n]);
        }
    }
};

}  // namespace faultline::emulated::product
