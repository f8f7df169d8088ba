// SPDX-License-Identifier: Apache-2.0
// The passes over a matrix that the iteration of lanczos.cpp makes, in a file for each instruction set (as lib/gemm, and for its
// reasons). Private to this folder. Every one gives the same bits: a dot product has eight lanes of fused multiply-adds over
// ascending columns, joined by halves; a sum of rows adds them in ascending order.
//
// Nothing that could be shared with other files (inline functions of the standard library) may be used in those that include this.
#pragma once

#include <cstddef>

namespace faultline::lanczos_detail {

template <class T>
struct Rows {
    const T* data;
    std::ptrdiff_t rows, cols, stride;
};

struct Passes {
    void (*multiply)(const Rows<float>& w, const double* x, double* y);             ///< y = W x
    void (*multiply_transposed)(const Rows<float>& w, const double* x, double* y);  ///< y = W^T x
    /// u = W x - beta u and y = W^T u, reading W once.
    void (*next_left)(const Rows<float>& w, const double* x, double beta, double* u, double* y);
    /// x -= V^T V x for the rows of V (classical Gram-Schmidt); room for V.rows numbers.
    void (*orthogonalise)(const Rows<double>& v, double* x, double* room);
};

extern const Passes passes_v4, passes_v3, passes_plain;

/// V: eight doubles, with zero, load (of doubles or floats), broadcast, fma, store. at_once: rows that share a load of the vector.
template <class V, int at_once>
struct PassesOf {
    using Eight = typename V::Type;
    template <class T>
    struct Group {
        const T* row[at_once];
        [[gnu::always_inline]] inline Group(const Rows<T>& w, std::ptrdiff_t first) {
            for (int r = 0; r < at_once; ++r)  // behind the last one that one again
                row[r] = w.data + (first + r < w.rows ? first + r : w.rows - 1) * w.stride;
        }
    };
    static double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }

    template <class T>
    [[gnu::always_inline]] static inline void dots_of(const Group<T>& w, std::ptrdiff_t cols, const double* x,
                                                      double (&dots)[at_once]) {
        Eight sum[at_once];
#pragma GCC unroll 8
        for (int r = 0; r < at_once; ++r) sum[r] = V::zero();
        std::ptrdiff_t c = 0;
        for (; c + 8 <= cols; c += 8) {
            const Eight of_x = V::load(x + c);
#pragma GCC unroll 8
            for (int r = 0; r < at_once; ++r) sum[r] = V::fma(V::load(w.row[r] + c), of_x, sum[r]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < at_once; ++r) {
            double lane[8];
            V::store(lane, sum[r]);
            dots[r] = ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
        }
        for (; c < cols; ++c)
            for (int r = 0; r < at_once; ++r) dots[r] = fused(static_cast<double>(w.row[r][c]), x[c], dots[r]);
    }
    /// y += the rows times their factors.
    template <class T>
    [[gnu::always_inline]] static inline void add_rows(const Group<T>& w, std::ptrdiff_t cols,
                                                       const double (&factor)[at_once], double* y) {
        Eight by[at_once];
#pragma GCC unroll 8
        for (int r = 0; r < at_once; ++r) by[r] = V::broadcast(factor[r]);
        std::ptrdiff_t c = 0;
        for (; c + 8 <= cols; c += 8) {
            Eight sum = V::load(y + c);
#pragma GCC unroll 8
            for (int r = 0; r < at_once; ++r) sum = V::fma(V::load(w.row[r] + c), by[r], sum);
            V::store(y + c, sum);
        }
        for (; c < cols; ++c)
            for (int r = 0; r < at_once; ++r) y[c] = fused(static_cast<double>(w.row[r][c]), factor[r], y[c]);
    }

    static void multiply(const Rows<float>& w, const double* x, double* y) {
        for (std::ptrdiff_t i = 0; i < w.rows; i += at_once) {
            double dots[at_once];
            dots_of(Group<float>(w, i), w.cols, x, dots);
            for (int r = 0; r < at_once && i + r < w.rows; ++r) y[i + r] = dots[r];
        }
    }
    static void multiply_transposed(const Rows<float>& w, const double* x, double* y) {
        for (std::ptrdiff_t c = 0; c < w.cols; ++c) y[c] = 0;
        for (std::ptrdiff_t i = 0; i < w.rows; i += at_once) {
            double factor[at_once];
            for (int r = 0; r < at_once; ++r) factor[r] = i + r < w.rows ? x[i + r] : 0.0;
            add_rows(Group<float>(w, i), w.cols, factor, y);
        }
    }
    static void next_left(const Rows<float>& w, const double* x, double beta, double* u, double* y) {
        for (std::ptrdiff_t c = 0; c < w.cols; ++c) y[c] = 0;
        for (std::ptrdiff_t i = 0; i < w.rows; i += at_once) {
            const Group<float> group(w, i);
            double dots[at_once];
            dots_of(group, w.cols, x, dots);
            for (int r = 0; r < at_once; ++r) {
                dots[r] = i + r < w.rows ? fused(-beta, u[i + r], dots[r]) : 0.0;
                if (i + r < w.rows) u[i + r] = dots[r];
            }
            add_rows(group, w.cols, dots, y);
        }
    }
    static void orthogonalise(const Rows<double>& v, double* x, double* room) {
        for (std::ptrdiff_t i = 0; i < v.rows; i += at_once) {
            double dots[at_once];
            dots_of(Group<double>(v, i), v.cols, x, dots);
            for (int r = 0; r < at_once && i + r < v.rows; ++r) room[i + r] = -dots[r];
        }
        for (std::ptrdiff_t i = 0; i < v.rows; i += at_once) {
            double factor[at_once];
            for (int r = 0; r < at_once; ++r) factor[r] = i + r < v.rows ? room[i + r] : 0.0;
            add_rows(Group<double>(v, i), v.cols, factor, x);
        }
    }
    static constexpr Passes all{multiply, multiply_transposed, next_left, orthogonalise};
};

}  // namespace faultline::lanczos_detail
