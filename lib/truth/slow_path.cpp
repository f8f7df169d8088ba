// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/slow_path.hpp>

#include <algorithm>
#include <limits>
#include <tuple>

#include <faultline/truth/interval_row.hpp>
#include <faultline/truth/problem.hpp>

namespace faultline::detail {
namespace {

constexpr int first_bits = 192;

bool by_row(const Undecided& e) {
    return e.output != Output::dk && e.output != Output::dv && e.output != Output::dsink;
}

CertifiedMatrix& matrix(GroupTruth& truth, const Undecided& e) {
    switch (e.output) {
        case Output::o:
            return truth.heads[e.head].o;
        case Output::dq:
            return truth.heads[e.head].dq;
        case Output::lse:
            return truth.heads[e.head].lse;
        case Output::delta:
            return truth.heads[e.head].delta;
        case Output::dsink:
            return truth.heads[e.head].dsink;
        case Output::dk:
            return truth.dk;
        case Output::dv:
            break;
    }
    return truth.dv;
}

void store(const Interval& a, const Undecided& e, GroupTruth& truth) {
    CertifiedMatrix& m = matrix(truth, e);
    store(a, m, m.index(e.row, e.col));
}

/// Stores the elements, which are sorted by (head, row), at this precision; returns those not decided by it.
std::vector<Undecided> pass_by_row(const TruthProblem& problem, const std::vector<Undecided>& elements, int bits,
                                   GroupTruth& truth) {
    std::vector<Undecided> left;
    IntervalRow row(problem, bits);
    Interval r(bits);
    const Undecided* last = nullptr;
    for (const Undecided& e : elements) {
        if (last == nullptr || last->head != e.head || last->row != e.row) row.compute(problem, e.head, e.row);
        last = &e;
        if (row.empty) {
            CertifiedMatrix& m = matrix(truth, e);
            const std::size_t at = m.index(e.row, e.col);
            m.value[at] = e.output == Output::lse ? -std::numeric_limits<double>::infinity() : 0;
            m.bound[at] = 0;
            m.exponent[at] = 0;
            continue;
        }
        switch (e.output) {
            case Output::o:
                row.output(problem, e.head, e.row, e.col, r);
                break;
            case Output::dq:
                row.query_gradient(problem, e.col, r);
                break;
            case Output::lse:
                r = row.lse;
                break;
            default:
                r = row.delta;
                break;
        }
        store(r, e, truth);
        if (!decided(r)) left.push_back(e);
    }
    return left;
}

/// The same for elements of dk, dv and dsink: one pass over all rows of all heads.
std::vector<Undecided> pass_by_column(const TruthProblem& problem, const std::vector<Undecided>& elements, int bits,
                                      GroupTruth& truth) {
    if (elements.empty()) return {};
    std::vector<Interval> sums(elements.size(), Interval(bits));
    const bool gradient =
        std::any_of(elements.begin(), elements.end(), [](const Undecided& e) { return e.output != Output::dv; });
    IntervalRow row(problem, bits);
    Interval t(bits);
    for (std::size_t h = 0; h < problem.q.size(); ++h)
        for (std::ptrdiff_t i = 0; i < query_rows(problem); ++i) {
            const double* kept = dropout_row(problem, h, i);
            const auto sees = [&](const Undecided& e) {
                if (e.output == Output::dsink) return e.head == h;
                return visible(problem, h, i, e.row) && (e.output == Output::dk || kept == nullptr || kept[e.row] != 0);
            };
            if (std::none_of(elements.begin(), elements.end(), sees)) continue;
            row.compute(problem, h, i, gradient);
            for (std::size_t n = 0; n < elements.size(); ++n) {
                const Undecided& e = elements[n];
                if (!sees(e)) continue;
                const auto j = static_cast<std::size_t>(e.row);
                if (e.output == Output::dsink)
                    t = row.ds.back();
                else if (e.output == Output::dk)
                    mul(t, row.dz(j), problem.q[h](i, e.col));
                else
                    mul(t, row.p[j], problem.dout[h](i, e.col));
                add(sums[n], sums[n], t);
            }
        }
    std::vector<Undecided> left;
    Interval share(bits);
    set(share, problem.keep);
    for (std::size_t n = 0; n < elements.size(); ++n) {
        if (elements[n].output == Output::dk) mul(sums[n], sums[n], row.scale);
        if (elements[n].output == Output::dv && !problem.dropout.empty()) div(sums[n], sums[n], share);
        store(sums[n], elements[n], truth);
        if (!decided(sums[n])) left.push_back(elements[n]);
    }
    return left;
}

}  // namespace

void decide(const TruthProblem& problem, std::vector<Undecided> elements, int max_bits, GroupTruth& truth) {
    if (elements.empty()) return;
    const ExponentRange range;
    truth.slow_elements += elements.size();
    const auto place = [](const Undecided& e) { return std::make_tuple(!by_row(e), e.head, e.row); };
    std::stable_sort(elements.begin(), elements.end(),
                     [&](const Undecided& a, const Undecided& b) { return place(a) < place(b); });
    const auto middle = std::partition_point(elements.begin(), elements.end(), by_row);
    std::vector<Undecided> rows(elements.begin(), middle);
    std::vector<Undecided> columns(middle, elements.end());
    for (int bits = first_bits;; bits *= 2) {
        rows = pass_by_row(problem, rows, bits, truth);
        columns = pass_by_column(problem, columns, bits, truth);
        if ((rows.empty() && columns.empty()) || 2 * bits > max_bits) break;
    }
    truth.undecided_elements += rows.size() + columns.size();
}

std::vector<Undecided> all_elements(const TruthProblem& problem) {
    std::vector<Undecided> all;
    const std::ptrdiff_t n_q = query_rows(problem);
    const auto add_matrix = [&](Output output, std::size_t head, std::ptrdiff_t rows, std::ptrdiff_t cols) {
        for (std::ptrdiff_t i = 0; i < rows; ++i)
            for (std::ptrdiff_t c = 0; c < cols; ++c) all.push_back({output, head, i, c});
    };
    for (std::size_t h = 0; h < problem.q.size(); ++h) {
        add_matrix(Output::o, h, n_q, problem.v.cols);
        add_matrix(Output::dq, h, n_q, problem.k.cols);
        add_matrix(Output::lse, h, n_q, 1);
        add_matrix(Output::delta, h, n_q, 1);
        if (!problem.sink.empty()) add_matrix(Output::dsink, h, 1, 1);
    }
    add_matrix(Output::dk, 0, problem.k.rows, problem.k.cols);
    add_matrix(Output::dv, 0, problem.k.rows, problem.v.cols);
    return all;
}

void fill_matrices(const TruthProblem& problem, GroupTruth& truth) {
    constexpr int bits = 256;
    const ExponentRange range;
    IntervalRow row(problem, bits);
    for (std::size_t h = 0; h < problem.q.size(); ++h) {
        HeadTruth& head = truth.heads[h];
        for (std::ptrdiff_t i = 0; i < query_rows(problem); ++i) {
            row.compute(problem, h, i);
            for (std::ptrdiff_t j = 0; j < problem.k.rows; ++j) {
                const auto at = static_cast<std::size_t>(j);
                const std::size_t out = head.s.index(i, j);
                if (!row.visible[at]) {
                    head.s.value[out] = -std::numeric_limits<double>::infinity();
                    continue;
                }
                store(row.dp[at], head.dp, out);
                store(row.s[at], head.s, out);
                store(row.p[at], head.p, out);
                store(row.ds[at], head.ds, out);
            }
        }
    }
}

}  // namespace faultline::detail
