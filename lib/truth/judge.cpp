// SPDX-License-Identifier: Apache-2.0
// The judge: attention's definitions in plain MPFR loops, and the sampled verification of a truth against it.
#include <faultline/truth/judge.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <faultline/truth/problem.hpp>

namespace faultline::detail {
namespace {

/// sum <- sum_c a_c b_c
void dot(const double* a, const double* b, std::ptrdiff_t count, Real& product, Real& sum) {
    mpfr_set_zero(sum, 1);
    for (std::ptrdiff_t c = 0; c < count; ++c) {
        mpfr_set_d(product, a[c], MPFR_RNDN);
        mpfr_mul_d(product, product, b[c], MPFR_RNDN);
        mpfr_add(sum, sum, product, MPFR_RNDN);
    }
}

/// Element <- x: nearest 53-bit value, bound half an ulp of it.
void store(const Real& x, CertifiedMatrix& out, std::ptrdiff_t i, std::ptrdiff_t j) {
    const std::size_t at = out.index(i, j);
    if (mpfr_zero_p(x)) return;
    long exponent = 0;
    const double mantissa = mpfr_get_d_2exp(&exponent, x, MPFR_RNDN);  // [0.5, 1]
    const WideReal value(mantissa, exponent);
    const bool fits = std::abs(value.exponent) <= 900;
    out.value[at] = fits ? value.to_double() : value.mantissa;
    out.exponent[at] = fits ? 0 : value.exponent;
    out.bound[at] = std::ldexp(1.0, fits ? static_cast<int>(value.exponent) - 53 : -53);
}

void store_masked_row(HeadTruth& head, std::ptrdiff_t i) { head.lse.value[head.lse.index(i, 0)] = -INFINITY; }

}  // namespace

JudgedRow::JudgedRow(const TruthProblem& problem, int bits)
    : visible(static_cast<std::size_t>(problem.k.rows)),
      s(visible.size(), Real(bits)),
      p(s),
      dp(s),
      ds(s),
      lse(bits),
      delta(bits),
      scale(bits) {
    if (problem.scale.kind == Scale::Kind::exact) {
        mpfr_set_d(scale, problem.scale.value, MPFR_RNDN);
    } else {
        mpfr_set_si(scale, static_cast<long>(problem.k.cols), MPFR_RNDN);
        mpfr_rec_sqrt(scale, scale, MPFR_RNDN);
    }
}

void JudgedRow::compute(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i) {
    const auto n_k = problem.k.rows;
    const double* bias = bias_row(problem, head, i);
    Real t(mpfr_get_prec(lse));
    Real sum(mpfr_get_prec(lse));
    std::size_t largest = 0;
    empty = true;
    for (std::ptrdiff_t j = 0; j < n_k; ++j) {
        const auto at = static_cast<std::size_t>(j);
        visible[at] = detail::visible(problem, head, i, j);
        for (std::vector<Real>* row : {&s, &p, &dp, &ds}) mpfr_set_zero((*row)[at], 1);
        dot(problem.dout[head].row(i), problem.v.row(j), problem.v.cols, t, dp[at]);
        if (!visible[at]) continue;
        dot(problem.q[head].row(i), problem.k.row(j), problem.k.cols, t, s[at]);
        mpfr_mul(s[at], s[at], scale, MPFR_RNDN);
        if (bias != nullptr) mpfr_add_d(s[at], s[at], bias[j], MPFR_RNDN);
        if (empty || mpfr_greater_p(s[at], s[largest])) largest = at;
        empty = false;
    }
    mpfr_set_zero(delta, 1);
    if (empty) return;
    // softmax and log-sum-exp; the mass beside the largest is kept apart from its 1
    mpfr_set_zero(sum, 1);
    for (std::size_t j = 0; j < s.size(); ++j) {
        if (!visible[j]) continue;
        mpfr_sub(t, s[j], s[largest], MPFR_RNDN);
        mpfr_exp(p[j], t, MPFR_RNDN);
        if (j != largest) mpfr_add(sum, sum, p[j], MPFR_RNDN);
    }
    mpfr_log1p(lse, sum, MPFR_RNDN);
    mpfr_add(lse, lse, s[largest], MPFR_RNDN);
    mpfr_add_ui(sum, sum, 1, MPFR_RNDN);
    for (std::size_t j = 0; j < s.size(); ++j)
        if (visible[j]) mpfr_div(p[j], p[j], sum, MPFR_RNDN);
    // With D_j = dp_j - dp_w, w the largest: delta - dp_w = sum_{j != w} p_j D_j =: rest and dp_j - delta = D_j - rest.
    Real rest(mpfr_get_prec(lse));
    for (std::size_t j = 0; j < s.size(); ++j) {
        if (!visible[j]) continue;
        mpfr_sub(ds[j], dp[j], dp[largest], MPFR_RNDN);
        mpfr_mul(t, p[j], ds[j], MPFR_RNDN);
        mpfr_add(rest, rest, t, MPFR_RNDN);
    }
    mpfr_add(delta, dp[largest], rest, MPFR_RNDN);
    for (std::size_t j = 0; j < s.size(); ++j) {
        if (!visible[j]) continue;
        mpfr_sub(ds[j], ds[j], rest, MPFR_RNDN);
        mpfr_mul(ds[j], ds[j], p[j], MPFR_RNDN);
    }
}

void JudgedRow::output(const TruthProblem& problem, std::ptrdiff_t c, Real& o) const {
    Real t(mpfr_get_prec(lse));
    mpfr_set_zero(o, 1);
    for (std::ptrdiff_t j = 0; j < problem.k.rows; ++j) {
        if (!visible[static_cast<std::size_t>(j)]) continue;
        mpfr_mul_d(t, p[static_cast<std::size_t>(j)], problem.v(j, c), MPFR_RNDN);
        mpfr_add(o, o, t, MPFR_RNDN);
    }
}

void JudgedRow::query_gradient(const TruthProblem& problem, std::ptrdiff_t c, Real& dq) const {
    Real t(mpfr_get_prec(lse));
    mpfr_set_zero(dq, 1);
    for (std::ptrdiff_t j = 0; j < problem.k.rows; ++j) {
        if (!visible[static_cast<std::size_t>(j)]) continue;
        mpfr_mul_d(t, ds[static_cast<std::size_t>(j)], problem.k(j, c), MPFR_RNDN);
        mpfr_add(dq, dq, t, MPFR_RNDN);
    }
    mpfr_mul(dq, dq, scale, MPFR_RNDN);
}

}  // namespace faultline::detail

namespace faultline {

GroupTruth attention_truth_mpfr(const TruthProblem& problem, int bits) {
    using detail::Real;
    detail::check_problem(problem);
    const detail::ExponentRange range;
    GroupTruth truth = detail::shaped_truth(problem, true);
    const std::ptrdiff_t n_k = problem.k.rows;
    const std::ptrdiff_t d = problem.k.cols;
    const std::ptrdiff_t d_v = problem.v.cols;
    std::vector<Real> dk(static_cast<std::size_t>(n_k * d), Real(bits));
    std::vector<Real> dv(static_cast<std::size_t>(n_k * d_v), Real(bits));
    detail::JudgedRow row(problem, bits);
    Real t(bits);
    for (std::size_t h = 0; h < problem.q.size(); ++h) {
        HeadTruth& head = truth.heads[h];
        for (std::ptrdiff_t i = 0; i < detail::query_rows(problem); ++i) {
            row.compute(problem, h, i);
            if (row.empty) {
                detail::store_masked_row(head, i);
            } else {
                detail::store(row.lse, head.lse, i, 0);
                detail::store(row.delta, head.delta, i, 0);
            }
            for (std::ptrdiff_t c = 0; c < d_v; ++c) {
                row.output(problem, c, t);
                detail::store(t, head.o, i, c);
            }
            for (std::ptrdiff_t c = 0; c < d; ++c) {
                row.query_gradient(problem, c, t);
                detail::store(t, head.dq, i, c);
            }
            for (std::ptrdiff_t j = 0; j < n_k; ++j) {
                const auto at = static_cast<std::size_t>(j);
                detail::store(row.dp[at], head.dp, i, j);
                if (!row.visible[at]) {
                    head.s.value[head.s.index(i, j)] = -INFINITY;
                    continue;
                }
                detail::store(row.s[at], head.s, i, j);
                detail::store(row.p[at], head.p, i, j);
                detail::store(row.ds[at], head.ds, i, j);
                for (std::ptrdiff_t c = 0; c < d; ++c) {
                    mpfr_mul_d(t, row.ds[at], problem.q[h](i, c), MPFR_RNDN);
                    Real& sum = dk[static_cast<std::size_t>(j * d + c)];
                    mpfr_add(sum, sum, t, MPFR_RNDN);
                }
                for (std::ptrdiff_t c = 0; c < d_v; ++c) {
                    mpfr_mul_d(t, row.p[at], problem.dout[h](i, c), MPFR_RNDN);
                    Real& sum = dv[static_cast<std::size_t>(j * d_v + c)];
                    mpfr_add(sum, sum, t, MPFR_RNDN);
                }
            }
        }
    }
    for (std::ptrdiff_t j = 0; j < n_k; ++j) {
        for (std::ptrdiff_t c = 0; c < d; ++c) {
            mpfr_mul(t, dk[static_cast<std::size_t>(j * d + c)], row.scale, MPFR_RNDN);
            detail::store(t, truth.dk, j, c);
        }
        for (std::ptrdiff_t c = 0; c < d_v; ++c) detail::store(dv[static_cast<std::size_t>(j * d_v + c)], truth.dv, j, c);
    }
    return truth;
}

}  // namespace faultline
