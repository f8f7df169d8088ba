// SPDX-License-Identifier: Apache-2.0
// A product of matrices by a team, in any order and width of summation: C <- C + X Y. The operands of some terms stand in
// memory that the team's threads share, as the order of summation wants them (doubles with the exponents by which a matrix
// unit aligns them, or fp32), and each thread has 4 rows by 2 columns of C in registers. The host's one thread has the pieces
// of all.
#pragma once

#include <cmath>
#include <cstddef>

#include <faultline/emulated/dot.hpp>
#include <faultline/emulated/product_unit.hpp>
#include <faultline/emulated/rounding.hpp>

namespace faultline::emulated {

/// X and Y^T as they lie in memory: element (i, j) of the product is the sum over t < k of x[i x_row + t x_step]
/// y[j y_col + t y_step].
struct Operands {
    const double* x;
    std::ptrdiff_t x_row, x_step;
    const double* y;
    std::ptrdiff_t y_col, y_step;
    std::ptrdiff_t k;
};

/// What becomes of C.
struct Begin {
    enum class At : unsigned char {
        c,      ///< the sum begins with what C holds
        zero,   ///< it begins with 0 and replaces C
        added,  ///< it begins with 0, is rounded to `format` and added to C in binary64 (Carry::added)
    };
    At at = At::c;
    Format format{};
    Rounding rounding{};

    FAULTLINE_HD void store(double& c, double sum) const {
        c = at == At::added ? c + rounded(sum, format, rounding) : sum;
    }
};

namespace product {

constexpr std::size_t larger_of(std::size_t a, std::size_t b) { return a > b ? a : b; }
inline constexpr std::size_t staging_bytes =
    larger_of(sizeof(Staged<Square>), larger_of(sizeof(Staged<Wide>), sizeof(Staged<Tall>)));

/// One term after the other, in T: Terms::add(c, x, y).
template <class T, class Terms>
struct OneByOne {
    template <class S>
    using Memory = Panels<T, S>;
    using Sum = T;

    [[nodiscard]] FAULTLINE_HD int longest(int n) const { return n; }
    template <class S>
    FAULTLINE_HD void set_x(Panels<T, S>& m, int t, int r, double v) const {
        m.x[t * m.x_pitch + r] = static_cast<T>(v);
    }
    template <class S>
    FAULTLINE_HD void set_y(Panels<T, S>& m, int t, int r, double v) const {
        m.y[t * S::y_pitch + r] = static_cast<T>(v);
    }
    template <class S>
    FAULTLINE_HD void add(const Panels<T, S>& m, const Lane& lane, int n, T (&c)[lane_elements]) const {
        FAULTLINE_HD_UNROLL_BY(4)
        for (int t = 0; t < n; ++t) {
            const auto x = several<lane_rows>(m.x + t * m.x_pitch + lane.row);
            const auto y = several<lane_columns>(m.y + t * S::y_pitch + lane.column);
            FAULTLINE_HD_UNROLL
            for (int e = 0; e < lane_elements; ++e) Terms::add(c[e], x.v[e / lane_columns], y.v[e % lane_columns]);
        }
    }
};
struct Separately {  // product rounded, then the sum
    template <class T>
    FAULTLINE_HD static void add(T& c, T x, T y) {
        c += x * y;
    }
};
struct Fused {
    FAULTLINE_HD static void add(float& c, float x, float y) { c = fmaf(x, y, c); }
};

/// The block of C at (row0, column0). Step: a way of summation, with
///   Sum, Memory<S>                        what a lane sums in, and what stands in shared memory
///   set_x, set_y(staged, t, r, value)     how an operand comes there
///   longest(n)                            how many terms of n may be staged at once
///   add(staged, lane, n, c)               n staged terms into a lane's part of C
template <class S, class Team, class Step>
FAULTLINE_HD inline void block(const Team& team, const Step& step, const Operands& in, const View<double>& c,
                               const Begin& begin, std::ptrdiff_t row0, std::ptrdiff_t column0) {
    constexpr int own = lanes / Team::lanes;
    auto& staged = *static_cast<typename Step::template Memory<S>*>(team.shared());
    typename Step::Sum sum[own][lane_elements];
    FAULTLINE_HD_UNROLL
    for (int o = 0; o < own; ++o) {
        const Lane lane = lane_of<S>(static_cast<int>(team.rank()) + o);
        FAULTLINE_HD_UNROLL
        for (int e = 0; e < lane_elements; ++e) {
            const Element at(lane, row0, column0, e);
            sum[o][e] =
                static_cast<typename Step::Sum>(begin.at == Begin::At::c && at.is_inside(c) ? c(at.i, at.j) : 0.0);
        }
    }
    const int chunk = step.longest(S::terms);
    const double* x = in.x + row0 * in.x_row;
    const double* y = in.y + column0 * in.y_col;
    for (std::ptrdiff_t first = 0; first < in.k; first += chunk) {
        const int n = in.k - first < chunk ? static_cast<int>(in.k - first) : chunk;
        const auto set_x = [&](int t, int r, double v) { step.template set_x<S>(staged, t, r, v); };
        const auto set_y = [&](int t, int r, double v) { step.template set_y<S>(staged, t, r, v); };
        using StagerX = Stager<S::rows, S::terms, Team>;
        using StagerY = Stager<S::columns, S::terms, Team>;
        StagerX of_x{team, x + first * in.x_step, in.x_row, in.x_step, c.rows - row0, n, {}};
        StagerY of_y{team, y + first * in.y_step, in.y_col, in.y_step, c.cols - column0, n, {}};
        constexpr int batches = StagerX::batches > StagerY::batches ? StagerX::batches : StagerY::batches;
        FAULTLINE_HD_UNROLL
        for (int b = 0; b < batches; ++b) {
            if (b < StagerX::batches) of_x.fetch(b);
            if (b < StagerY::batches) of_y.fetch(b);
            if (b < StagerX::batches) of_x.put(b, set_x);
            if (b < StagerY::batches) of_y.put(b, set_y);
        }
        team.sync();
        FAULTLINE_HD_UNROLL
        for (int o = 0; o < own; ++o) {
            const Lane lane = lane_of<S>(static_cast<int>(team.rank()) + o);
            if (row0 + lane.row < c.rows && column0 + lane.column < c.cols) step.add(staged, lane, n, sum[o]);
        }
        team.sync();
    }
    FAULTLINE_HD_UNROLL
    for (int o = 0; o < own; ++o) {
        const Lane lane = lane_of<S>(static_cast<int>(team.rank()) + o);
        FAULTLINE_HD_UNROLL
        for (int e = 0; e < lane_elements; ++e) {
            const Element at(lane, row0, column0, e);
            if (at.is_inside(c)) begin.store(c(at.i, at.j), static_cast<double>(sum[o][e]));
        }
    }
}

template <class S, class Team, class Step>
FAULTLINE_HD inline void blocks(const Team& team, const Step& step, const Operands& in, const View<double>& c,
                                const Begin& begin) {
    for (std::ptrdiff_t i = 0; i < c.rows; i += S::rows)
        for (std::ptrdiff_t j = 0; j < c.cols; j += S::columns) block<S>(team, step, in, c, begin, i, j);
    team.sync();
}
/// In blocks of the shape that leaves fewest lanes idle.
template <class Team, class Step>
FAULTLINE_HD inline void by(const Team& team, const Step& step, const Operands in, const View<double> c,
                            const Begin begin) {
    if (c.rows <= Wide::rows && c.cols > Square::columns && step.longest(Wide::terms) > 0)
        blocks<Wide>(team, step, in, c, begin);
    else if (c.rows > Square::rows && c.cols <= Tall::columns)
        blocks<Tall>(team, step, in, c, begin);
    else
        blocks<Square>(team, step, in, c, begin);
}

}  // namespace product

/// C <- C + X Y, or what `begin` says. On return every thread sees it.
template <class Team>
FAULTLINE_HD_CALLED void multiply(const Team& team, const Accumulation& order, const Operands& in,
                                  const View<double>& c, const Begin& begin = {}) {
    using Kind = Accumulation::Kind;
    if constexpr (requires { team.multiply(order, in, c, begin); })
        if (team.multiply(order, in, c, begin)) return;
    const bool unit = order.kind == Kind::fused && order.unit.terms <= product::most_terms;
    if (in.k > 0 && unit) return product::by(team, product::ByUnit(order.unit), in, c, begin);
    if (in.k > 0 && order.kind == Kind::exact)
        return product::by(team, product::OneByOne<double, product::Separately>(), in, c, begin);
    if (in.k > 0 && order.kind == Kind::sequential)
        return product::by(team, product::OneByOne<float, product::Separately>(), in, c, begin);
    if (in.k > 0 && order.kind == Kind::fma)
        return product::by(team, product::OneByOne<float, product::Fused>(), in, c, begin);
    each(team, c.rows, c.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
        const double first = begin.at == Begin::At::c ? c(i, j) : 0.0;
        begin.store(c(i, j), dot(order, in.k, first, Strided{in.x + i * in.x_row, in.x_step},
                                 Strided{in.y + j * in.y_col, in.y_step}));
    });
}

}  // namespace faultline::emulated
