// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/interval_row.hpp>

#include <faultline/truth/problem.hpp>

namespace faultline::detail {

IntervalRow::IntervalRow(const TruthProblem& problem, int bits)
    : visible(static_cast<std::size_t>(problem.k.rows) + (problem.sink.empty() ? 0 : 1)),
      s(visible.size(), Interval(bits)),
      p(s),
      dp(s),
      ds(s),
      lse(bits),
      delta(bits),
      scale(bits),
      raw_(s),
      weight_(s),
      t_(bits),
      sum_(bits) {
    if (problem.scale.kind == Scale::Kind::exact)
        set(scale, problem.scale.value);
    else
        inverse_sqrt(scale, static_cast<unsigned long>(problem.k.cols));
    if (problem.softcap > 0) capped_ = slope_ = dz_ = s;
}

double IntervalRow::bias_of(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i, std::size_t j) const {
    if (static_cast<std::ptrdiff_t>(j) == problem.k.rows) return problem.sink[head];
    const double* bias = bias_row(problem, head, i);
    return bias == nullptr ? 0 : bias[j];
}

void IntervalRow::compute_scores(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i, bool gradient) {
    const double* kept = dropout_row(problem, head, i);
    Interval share(static_cast<int>(scale.bits()));
    set(share, problem.keep);
    Interval cap(static_cast<int>(scale.bits()));
    set(cap, problem.softcap);
    empty = true;
    for (std::size_t at = 0; at < s.size(); ++at) {
        const auto j = static_cast<std::ptrdiff_t>(at);
        const bool is_sink = j == problem.k.rows;
        visible[at] = is_sink || detail::visible(problem, head, i, j);
        for (std::vector<Interval>* row : {&s, &p, &dp, &ds}) set((*row)[at], 0);
        if (!visible[at]) continue;
        set(raw_[at], 0);
        if (!is_sink) {
            if (gradient && (kept == nullptr || kept[j] != 0)) {
                dot(dp[at], problem.dout[head].row(i), problem.v.row(j), problem.v.cols);
                if (kept != nullptr) div(dp[at], dp[at], share);
            }
            dot(raw_[at], problem.q[head].row(i), problem.k.row(j), problem.k.cols);
        }
        mul(s[at], raw_[at], scale);
        if (problem.softcap > 0) {
            div(t_, s[at], cap);
            if (gradient) sech_squared(slope_[at], t_);
            tanh(capped_[at], t_);
            mul(capped_[at], capped_[at], problem.softcap);
            s[at] = capped_[at];
        }
        if (const double bias = bias_of(problem, head, i, at); bias != 0) add(s[at], s[at], bias);
        // any key near the largest will do as the pivot; the choice affects widths, not containment
        if (empty || mpfr_greater_p(s[at].lo, s[largest_].lo)) largest_ = at;
        empty = false;
    }
}

void IntervalRow::compute(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i, bool gradient) {
    compute_scores(problem, head, i, gradient);
    set(delta, 0);
    if (empty) return;
    const std::size_t w = largest_;
    const double pivot_bias = bias_of(problem, head, i, w);
    set(sum_, 0);
    for (std::size_t j = 0; j < s.size(); ++j) {
        if (!visible[j]) continue;
        if (j == w) {
            set(weight_[j], 1);
            continue;
        }
        // scale (raw_j - raw_w) + (bias_j - bias_w), not s_j - s_w: equal scores differ by exactly 0
        if (problem.softcap > 0) {
            if (same_point(raw_[j], raw_[w]))
                set(t_, 0);
            else
                sub(t_, capped_[j], capped_[w]);
        } else {
            sub(t_, raw_[j], raw_[w]);
            mul(t_, t_, scale);
        }
        const double bias = bias_of(problem, head, i, j);
        if (bias != 0 || pivot_bias != 0) {
            add(t_, t_, bias);
            add(t_, t_, -pivot_bias);
        }
        exp(weight_[j], t_);
        add(sum_, sum_, weight_[j]);
    }
    log1p(lse, sum_);
    add(lse, lse, s[w]);
    add(sum_, sum_, 1.0);
    for (std::size_t j = 0; j < s.size(); ++j)
        if (visible[j]) div(p[j], weight_[j], sum_);
    if (gradient) compute_gradient();
}

void IntervalRow::compute_gradient() {
    const std::size_t w = largest_;
    Interval& rest = delta;  // sum_{j != w} p_j (dp_j - dp_w); dp_w is added when it has been used
    for (std::size_t j = 0; j < s.size(); ++j) {
        if (!visible[j]) continue;
        if (j == w) continue;
        sub(ds[j], dp[j], dp[w]);
        mul(t_, weight_[j], ds[j]);
        add(rest, rest, t_);
    }
    div(rest, rest, sum_);
    for (std::size_t j = 0; j < s.size(); ++j) {
        if (!visible[j]) continue;
        sub(ds[j], ds[j], rest);
        mul(ds[j], ds[j], p[j]);
        if (!slope_.empty()) mul(dz_[j], ds[j], slope_[j]);
    }
    add(delta, rest, dp[w]);
}

void IntervalRow::output(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i, std::ptrdiff_t c,
                         Interval& r) const {
    Interval t(static_cast<int>(r.bits()));
    const double* kept = dropout_row(problem, head, i);
    set(r, 0);
    for (std::ptrdiff_t j = 0; j < problem.k.rows; ++j) {
        if (!visible[static_cast<std::size_t>(j)] || (kept != nullptr && kept[j] == 0)) continue;
        mul(t, weight_[static_cast<std::size_t>(j)], problem.v(j, c));
        add(r, r, t);
    }
    div(r, r, sum_);
    if (kept == nullptr) return;
    set(t, problem.keep);
    div(r, r, t);
}

void IntervalRow::query_gradient(const TruthProblem& problem, std::ptrdiff_t c, Interval& r) const {
    Interval t(static_cast<int>(r.bits()));
    set(r, 0);
    for (std::ptrdiff_t j = 0; j < problem.k.rows; ++j) {
        if (!visible[static_cast<std::size_t>(j)]) continue;
        mul(t, dz(static_cast<std::size_t>(j)), problem.k(j, c));
        add(r, r, t);
    }
    mul(r, r, scale);
}

}  // namespace faultline::detail
