// SPDX-License-Identifier: Apache-2.0
// A sink on the fast path: a key of its own.
#include <cmath>
#include <limits>
#include <utility>

#include <faultline/truth/elementary.hpp>
#include <faultline/truth/fast_head.hpp>
#include <faultline/truth/problem.hpp>

namespace faultline::detail {
namespace {

constexpr double masked = -std::numeric_limits<double>::infinity();

Matrix with_row_of_zeros(MatrixView<const double> a) {
    Matrix m(a.rows + 1, a.cols);
    for (std::ptrdiff_t i = 0; i < a.rows; ++i)
        for (std::ptrdiff_t c = 0; c < a.cols; ++c) m(i + 1, c) = a(i, c);
    return m;
}

/// Without its first row, or its first column.
CertifiedMatrix without_first(const CertifiedMatrix& a, bool row) {
    CertifiedMatrix m(row ? a.rows - 1 : a.rows, row ? a.cols : a.cols - 1);
    for (std::ptrdiff_t i = 0; i < m.rows; ++i)
        for (std::ptrdiff_t c = 0; c < m.cols; ++c) {
            const std::size_t to = m.index(i, c), from = row ? a.index(i + 1, c) : a.index(i, c + 1);
            m.value[to] = a.value[from];
            m.bound[to] = a.bound[from];
            m.exponent[to] = a.exponent[from];
        }
    return m;
}

}  // namespace

SinkAsKey::SinkAsKey(const TruthProblem& given) : problem(given) {
    const auto keep = [&](Matrix m) {
        storage_.push_back(std::move(m));
        return std::as_const(storage_.back()).view();
    };
    const std::ptrdiff_t n_q = query_rows(given), n_k = given.k.rows;
    problem.k = keep(with_row_of_zeros(given.k));
    problem.v = keep(with_row_of_zeros(given.v));
    problem.sink.clear();
    problem.bias.clear();
    problem.dropout.clear();
    // Rows that causality leaves without any key still see the sink: then the mask is written out.
    problem.causal = given.causal && n_q <= n_k;
    for (std::size_t h = 0; h < given.q.size(); ++h) {
        Matrix bias(n_q, n_k + 1);
        for (std::ptrdiff_t i = 0; i < n_q; ++i) {
            const double* own = bias_row(given, h, i);
            bias(i, 0) = given.sink[h];
            for (std::ptrdiff_t j = 0; j < n_k; ++j)
                bias(i, j + 1) = j < causal_end(given, i) ? (own == nullptr ? 0 : own[j]) : masked;
        }
        problem.bias.push_back(keep(std::move(bias)));
        if (given.dropout.empty()) continue;
        Matrix kept(n_q, n_k + 1, 1.0);
        for (std::ptrdiff_t i = 0; i < n_q; ++i)
            for (std::ptrdiff_t j = 0; j < n_k; ++j) kept(i, j + 1) = dropout_row(given, h, i)[j];
        problem.dropout.push_back(keep(std::move(kept)));
    }
}

void sink_gradient(const WideRow& ds, const double* error, std::ptrdiff_t padded, std::size_t head, GroupTruth& truth,
                   FastReport& report) {
    const auto width = static_cast<std::size_t>(padded);
    AlignedVector a_high(width), a_low(width), scratch(width), other(width);
    const double reference = largest_exponent(ds, error, padded, scratch.data());
    if (reference == none_exponent) return;  // exactly 0
    double* const both[2] = {scratch.data(), other.data()};
    const ScaledRow scaled = scale_row(ds, error, reference, padded, a_high.data(), a_low.data(), both);
    const DoubleDouble sum = tree_sum(a_high.data(), a_low.data(), padded);
    const WideSum total{sum, reference, 1.01 * (scaled.error + scaled.magnitude * tree_depth(padded) * add_error)};
    if (!settle(total, truth.heads[head].dsink, 0)) report.undecided.push_back({Output::dsink, head, 0, 0});
}

void fast_sink(std::vector<HeadRows>& heads, GroupTruth& truth, FastReport& report) {
    for (std::size_t h = 0; h < heads.size(); ++h) {
        truth.heads[h].dsink = CertifiedMatrix(1, 1);
        if (report.lost_row) {
            report.undecided.push_back({Output::dsink, h, 0, 0});
            continue;
        }
        HeadRows& rows = heads[h];
        const std::ptrdiff_t count = rows.ds_high.rows, padded = round_up_to_lanes(count);
        const auto width = static_cast<std::size_t>(padded);
        AlignedVector high(width), low(width), exponent(width, no_exponent), error(width);
        for (std::ptrdiff_t i = 0; i < count; ++i) {
            const auto at = static_cast<std::size_t>(i);
            const WideRow ds = rows.ds(i);
            high[at] = ds.high[0];
            low[at] = ds.low[0];
            exponent[at] = ds.exponent[0];
            error[at] = rows.ds_error.row(i)[0];
        }
        const WideRow column{high.data(), low.data(), exponent.data()};
        sink_gradient(column, error.data(), padded, h, truth, report);
    }
}

void drop_sink_key(GroupTruth& truth, FastReport& report) {
    for (HeadTruth& head : truth.heads)
        for (CertifiedMatrix* m : {&head.s, &head.p, &head.dp, &head.ds})
            if (m->rows > 0) *m = without_first(*m, false);
    truth.dk = without_first(truth.dk, true);
    truth.dv = without_first(truth.dv, true);
    std::vector<Undecided> left;
    for (Undecided e : report.undecided) {
        if (e.output == Output::dk || e.output == Output::dv) {
            if (e.row == 0) continue;
            --e.row;
        }
        left.push_back(e);
    }
    report.undecided = std::move(left);
}

}  // namespace faultline::detail
