// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/conservation.hpp>

#include <cmath>
#include <limits>

#include <faultline/cpu/tiles.hpp>

namespace faultline {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

double dot(const double* a, const double* b, std::ptrdiff_t count) {
    double sum = 0;
    for (std::ptrdiff_t c = 0; c < count; ++c) sum += a[c] * b[c];
    return sum;
}

void score_row(const HeadInputs& in, std::ptrdiff_t i, double* s) {
    const std::ptrdiff_t visible = visible_keys(i, in.q.rows, in.k.rows, in.causal);
    for (std::ptrdiff_t j = 0; j < visible; ++j) {
        s[j] = dot(in.q.row(i), in.k.row(j), in.q.cols) * in.scale;
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

}  // namespace

ScoreGradient score_gradient(const HeadInputs& in, std::span<const double> lse, std::span<const double> delta) {
    const std::ptrdiff_t n_q = in.q.rows, n_k = in.k.rows;
    const bool backward = in.dout.data != nullptr;
    ScoreGradient g;
    g.s = Matrix(n_q, n_k, -infinity);
    g.p = Matrix(n_q, n_k);
    if (backward) {
        g.dp = Matrix(n_q, n_k);
        g.ds = Matrix(n_q, n_k);
    }
    for (std::ptrdiff_t i = 0; i < n_q; ++i) {
        double* s = g.s.view().row(i);
        double* p = g.p.view().row(i);
        score_row(in, i, s);
        const auto row = static_cast<std::size_t>(i);
        const double reference = lse.empty() ? log_sum(s, n_k, in.sink) : lse[row];
        g.lse.push_back(reference);
        for (std::ptrdiff_t j = 0; j < n_k; ++j) p[j] = s[j] == -infinity ? 0 : std::exp(s[j] - reference);
        const double p_sink = in.sink ? std::exp(*in.sink - reference) : 0;
        if (in.sink) g.p_sink.push_back(p_sink);
        if (!backward) continue;
        double* dp = g.dp.view().row(i);
        for (std::ptrdiff_t j = 0; j < n_k; ++j)
            if (s[j] != -infinity) dp[j] = dot(in.dout.row(i), in.v.row(j), in.v.cols);
        gradient_row(p, dp, n_k, p_sink, delta.empty() ? nullptr : &delta[row], g.ds.view().row(i),
                     g.delta.emplace_back());
    }
    return g;
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

Conservation conservation(const ScoreGradient& g, double softcap) {
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
            if (softcap > 0 && ds != 0) before += ds * (1 - (g.s(i, j) / softcap) * (g.s(i, j) / softcap));
        }
        c.gradient_sum.push_back(sum);
        c.gradient_abs.push_back(magnitude);
        if (softcap > 0) c.before_softcap.push_back(before);
    }
    return c;
}

std::vector<double> running_sum(std::span<const double> values) {
    std::vector<double> sums;
    double sum = 0;
    for (const double x : values) sums.push_back(sum += x);
    return sums;
}

}  // namespace faultline
