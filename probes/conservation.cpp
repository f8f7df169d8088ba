// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/conservation.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <faultline/base/clones.hpp>
#include <faultline/cpu/tiles.hpp>

namespace faultline {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

double dot(const double* a, const double* b, std::ptrdiff_t count) {
    double sum = 0;
    for (std::ptrdiff_t c = 0; c < count; ++c) sum += a[c] * b[c];
    return sum;
}

/// out_j += sum_c a_c b_cj, c rising: over j, so that it runs in vectors and adds in the order of a plain dot product.
FAULTLINE_CLONES void add_products(const double* a, MatrixView<const double> b, std::ptrdiff_t count, double* out) {
    for (std::ptrdiff_t c = 0; c < b.rows; ++c) {
        const double x = a[c];
        const double* row = b.row(c);
        for (std::ptrdiff_t j = 0; j < count; ++j) out[j] += x * row[j];
    }
}

void score_row(const HeadInputs& in, MatrixView<const double> k_t, std::ptrdiff_t i, double* s) {
    const std::ptrdiff_t visible = visible_keys(i, in.q.rows, in.k.rows, in.causal);
    std::fill(s, s + visible, 0.0);
    add_products(in.q.row(i), k_t, visible, s);
    for (std::ptrdiff_t j = 0; j < visible; ++j) {
        s[j] *= in.scale;
        if (in.softcap > 0) s[j] = in.softcap * std::tanh(s[j] / in.softcap);
        if (in.bias.data != nullptr) s[j] += in.bias(i, j);
    }
}

double log_sum(const double* s, std::ptrdiff_t count, const std::optional<double>& sink) {
    double top = sink.value_or(-infinity);
    for (std::ptrdiff_t j = 0; j < count; ++j)
        if (!(s[j] <= top)) top = s[j];  // a NaN is taken up
    if (top == -infinity || std::isnan(top)) return top;
    double sum = sink ? std::exp(*sink - top) : 0;
    for (std::ptrdiff_t j = 0; j < count; ++j) sum += std::exp(s[j] - top);
    return top + std::log(sum);
}

/// ds of one row. With its own delta: dp - delta = (dp - dp_w) - sum_j p_j (dp_j - dp_w), w the key of the largest p.
void gradient_row(const double* p, const double* dp, std::ptrdiff_t count, double p_sink, const double* given,
                  double* ds, double& delta) {
    std::ptrdiff_t winner = 0;
    for (std::ptrdiff_t j = 1; j < count; ++j)
        if (p[j] > p[winner]) winner = j;
    const double reference = given != nullptr || count == 0 ? 0 : dp[winner];
    double away = 0;  // delta - reference; the sink's dp is 0
    for (std::ptrdiff_t j = 0; j < count; ++j) away += p[j] * (dp[j] - reference);
    away -= p_sink * reference;
    if (given != nullptr) away = *given;
    delta = reference + away;
    for (std::ptrdiff_t j = 0; j < count; ++j) ds[j] = p[j] == 0 ? 0 : p[j] * ((dp[j] - reference) - away);
}

/// Everything but s and dp.
void fill_statistics(const HeadInputs& in, std::span<const double> lse, std::span<const double> delta,
                     ScoreGradient& g) {
    const std::ptrdiff_t n_q = g.s.rows, n_k = g.s.cols;
    const bool backward = in.dout.data != nullptr;
    g.p = Matrix(n_q, n_k);
    if (backward) g.ds = Matrix(n_q, n_k);
    for (std::ptrdiff_t i = 0; i < n_q; ++i) {
        const double* s = g.s.view().row(i);
        double* p = g.p.view().row(i);
        const auto row = static_cast<std::size_t>(i);
        const double reference = lse.empty() ? log_sum(s, n_k, in.sink) : lse[row];
        g.lse.push_back(reference);
        for (std::ptrdiff_t j = 0; j < n_k; ++j) p[j] = s[j] == -infinity ? 0 : std::exp(s[j] - reference);
        const double p_sink = in.sink ? std::exp(*in.sink - reference) : 0;
        if (in.sink) g.p_sink.push_back(p_sink);
        if (!backward) continue;
        gradient_row(p, g.dp.view().row(i), n_k, p_sink, delta.empty() ? nullptr : &delta[row], g.ds.view().row(i),
                     g.delta.emplace_back());
    }
}

}  // namespace

ScoreGradient score_gradient(const HeadInputs& in, std::span<const double> lse, std::span<const double> delta) {
    const std::ptrdiff_t n_q = in.q.rows, n_k = in.k.rows;
    ScoreGradient g;
    g.s = Matrix(n_q, n_k, -infinity);
    Matrix k_t(in.k.cols, n_k), v_t(in.v.cols, n_k);
    transpose(in.k, k_t.view());
    for (std::ptrdiff_t i = 0; i < n_q; ++i) score_row(in, k_t.view(), i, g.s.view().row(i));
    if (in.dout.data != nullptr) {
        g.dp = Matrix(n_q, n_k);
        transpose(in.v, v_t.view());
        for (std::ptrdiff_t i = 0; i < n_q; ++i) {
            double* dp = g.dp.view().row(i);
            add_products(in.dout.row(i), v_t.view(), visible_keys(i, n_q, n_k, in.causal), dp);
            for (std::ptrdiff_t j = 0; j < n_k; ++j)
                if (g.s(i, j) == -infinity) dp[j] = 0;
        }
    }
    fill_statistics(in, lse, delta, g);
    return g;
}

ScoreGradient with_statistics(const ScoreGradient& g, const HeadInputs& in, std::span<const double> lse,
                              std::span<const double> delta) {
    ScoreGradient other;
    other.s = g.s;
    other.dp = g.dp;
    fill_statistics(in, lse, delta, other);
    return other;
}

std::vector<double> delta_of_output(MatrixView<const double> dout, MatrixView<const double> o) {
    std::vector<double> delta;
    for (std::ptrdiff_t i = 0; i < dout.rows; ++i) delta.push_back(dot(dout.row(i), o.row(i), o.cols));
    return delta;
}

std::vector<double> delta_of_scores(const ScoreGradient& g) {
    std::vector<double> delta;
    for (std::ptrdiff_t i = 0; i < g.dp.rows; ++i)
        delta.push_back(dot(g.p.view().row(i), g.dp.view().row(i), g.p.cols));
    return delta;
}

Conservation conservation(const ScoreGradient& g, double softcap, MatrixView<const double> bias) {
    Conservation c;
    for (std::ptrdiff_t i = 0; i < g.p.rows; ++i) {
        const auto row = static_cast<std::size_t>(i);
        double p_sum = g.p_sink.empty() ? 0 : g.p_sink[row];
        for (std::ptrdiff_t j = 0; j < g.p.cols; ++j) p_sum += g.p(i, j);
        c.p_sum.push_back(p_sum);
        if (g.ds.rows == 0) continue;
        const double sink = g.p_sink.empty() ? 0 : -g.p_sink[row] * g.delta[row];
        double sum = sink, magnitude = std::abs(sink), before = 0;
        for (std::ptrdiff_t j = 0; j < g.ds.cols; ++j) {
            const double ds = g.ds(i, j);
            sum += ds;
            magnitude += std::abs(ds);
            // A masked score has no gradient; its s of -inf would make a NaN of it.
            if (!(softcap > 0) || ds == 0) continue;
            const double capped = (g.s(i, j) - (bias.data != nullptr ? bias(i, j) : 0.0)) / softcap;
            before += ds * (1 - capped * capped);
        }
        c.gradient_sum.push_back(sum);
        c.gradient_abs.push_back(magnitude);
        if (softcap > 0) c.before_softcap.push_back(before);
    }
    return c;
}

double relative_row_sum(double sum, double magnitude) { return magnitude == 0 ? 0.0 : sum / magnitude; }

double relative_row_sum_rms(std::span<const double> relative, std::span<const double> keys) {
    double squares = 0, rows = 0;
    for (std::size_t i = 0; i < relative.size(); ++i) {
        if (keys[i] < 2) continue;
        squares += relative[i] * relative[i];
        rows += 1;
    }
    return std::sqrt(squares / rows);  // NaN: 0/0
}

std::vector<double> running_sum(std::span<const double> values) {
    std::vector<double> sums;
    double sum = 0;
    for (const double x : values) sums.push_back(sum += x);
    return sums;
}

}  // namespace faultline
