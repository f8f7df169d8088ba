// SPDX-License-Identifier: Apache-2.0
// The judge: attention's definitions in plain MPFR loops (dot products that 128-bit integers hold are exact), and the sampled verification of a truth against it.
#include <faultline/truth/judge.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <faultline/truth/problem.hpp>

namespace faultline::detail {
namespace {

constexpr mpfr_prec_t size_bits = 53;

/// sum <- sum_c a_c b_c, size <- sum_c |a_c b_c|
void dot(const double* a, const double* b, std::ptrdiff_t count, Real& product, Real& sum, Real& size) {
    mpfr_set_zero(sum, 1);
    mpfr_set_zero(size, 1);
    for (std::ptrdiff_t c = 0; c < count; ++c) {
        mpfr_set_d(product, a[c], MPFR_RNDN);
        mpfr_mul_d(product, product, b[c], MPFR_RNDN);
        mpfr_add(sum, sum, product, MPFR_RNDN);
        mpfr_abs(product, product, MPFR_RNDN);
        mpfr_add(size, size, product, MPFR_RNDU);
    }
}

/// Element <- x: nearest 53-bit value; bound half an ulp of it, or the noise of x where that is more.
void store(const Real& x, const Real& size, CertifiedMatrix& out, std::ptrdiff_t i, std::ptrdiff_t j) {
    const std::size_t at = out.index(i, j);
    if (mpfr_zero_p(static_cast<mpfr_srcptr>(x))) return;
    long exponent = 0;
    const double mantissa = mpfr_get_d_2exp(&exponent, x, MPFR_RNDN);  // [0.5, 1]
    const WideReal value(mantissa, exponent);
    const bool fits = std::abs(value.exponent) <= 900;
    out.value[at] = fits ? value.to_double() : value.mantissa;
    out.exponent[at] = fits ? 0 : value.exponent;
    const double half_ulp = std::ldexp(1.0, fits ? static_cast<int>(value.exponent) - 53 : -53);
    Real noise(size_bits);
    mpfr_set(noise, size, MPFR_RNDU);
    to_noise(noise, mpfr_get_prec(static_cast<mpfr_srcptr>(x)));
    mpfr_mul_2si(noise, noise, -static_cast<long>(out.exponent[at]), MPFR_RNDU);
    out.bound[at] = std::max(half_ulp, mpfr_get_d(noise, MPFR_RNDU));
}

void store_masked_row(HeadTruth& head, std::ptrdiff_t i) { head.lse.value[head.lse.index(i, 0)] = -INFINITY; }

}  // namespace

JudgedRow::Integers::Integers(const TruthProblem& problem)
    : q(problem.q.begin(), problem.q.end()),
      dout(problem.dout.begin(), problem.dout.end()),
      k(problem.k),
      v(problem.v) {}

JudgedRow::JudgedRow(const TruthProblem& problem, int bits)
    : JudgedRow(problem, bits, std::make_shared<const Integers>(problem)) {}

JudgedRow::JudgedRow(const TruthProblem& problem, int bits, const JudgedRow& other)
    : JudgedRow(problem, bits, other.integers) {}

JudgedRow::JudgedRow(const TruthProblem& problem, int bits, std::shared_ptr<const Integers> of_problem)
    : visible(static_cast<std::size_t>(problem.k.rows) + (problem.sink.empty() ? 0 : 1)),
      s(visible.size(), Real(bits)),
      p(s),
      dp(s),
      ds(s),
      pd(s),
      dz(s),
      lse(bits),
      delta(bits),
      dp_size(visible.size(), Real(size_bits)),
      ds_size(dp_size),
      dz_size(dp_size),
      lse_size(size_bits),
      delta_size(size_bits),
      scale(bits),
      integers(std::move(of_problem)) {
    if (problem.scale.kind == Scale::Kind::exact) {
        mpfr_set_d(scale, problem.scale.value, MPFR_RNDN);
    } else {
        mpfr_set_si(scale, static_cast<long>(problem.k.cols), MPFR_RNDN);
        mpfr_rec_sqrt(scale, scale, MPFR_RNDN);
    }
}

void JudgedRow::compute(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i) {
    const double* bias = bias_row(problem, head, i);
    const double* kept = dropout_row(problem, head, i);
    Real t(mpfr_get_prec(lse));
    Real sum(mpfr_get_prec(lse));
    Real s_size(size_bits);
    std::size_t largest = 0;
    empty = true;
    for (std::size_t at = 0; at < s.size(); ++at) {
        const auto j = static_cast<std::ptrdiff_t>(at);
        const bool is_sink = j == problem.k.rows;
        visible[at] = is_sink || detail::visible(problem, head, i, j);
        for (std::vector<Real>* row : {&s, &p, &dp, &ds, &pd, &dz, &dp_size, &ds_size, &dz_size})
            mpfr_set_zero((*row)[at], 1);
        if (!visible[at]) continue;
        mpfr_set_zero(s_size, 1);
        if (is_sink) {
            mpfr_set_d(s[at], problem.sink[head], MPFR_RNDN);
        } else {
            if (kept == nullptr || kept[j] != 0) {
                if (!exact_dot(integers->dout[head], i, integers->v, j, problem.v.cols, dp[at], dp_size[at]))
                    dot(problem.dout[head].row(i), problem.v.row(j), problem.v.cols, t, dp[at], dp_size[at]);
                mpfr_div_d(dp[at], dp[at], problem.keep, MPFR_RNDN);
                mpfr_div_d(dp_size[at], dp_size[at], problem.keep, MPFR_RNDU);
            }
            if (!exact_dot(integers->q[head], i, integers->k, j, problem.k.cols, s[at], s_size))
                dot(problem.q[head].row(i), problem.k.row(j), problem.k.cols, t, s[at], s_size);
            mpfr_mul(s[at], s[at], scale, MPFR_RNDN);
            if (problem.softcap > 0) {
                mpfr_div_d(s[at], s[at], problem.softcap, MPFR_RNDN);
                mpfr_sech(dz[at], s[at], MPFR_RNDN);  // 1 - tanh^2 = 1/cosh^2
                mpfr_sqr(dz[at], dz[at], MPFR_RNDN);
                mpfr_tanh(s[at], s[at], MPFR_RNDN);
                mpfr_mul_d(s[at], s[at], problem.softcap, MPFR_RNDN);
            }
            if (bias != nullptr) mpfr_add_d(s[at], s[at], bias[j], MPFR_RNDN);
        }
        if (empty || mpfr_greater_p(s[at], s[largest])) {
            largest = at;
            mpfr_mul(lse_size, s_size, scale, MPFR_RNDU);
            mpfr_abs(lse_size, lse_size, MPFR_RNDU);
        }
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
    mpfr_add(lse_size, lse_size, lse, MPFR_RNDU);
    mpfr_add(lse, lse, s[largest], MPFR_RNDN);
    mpfr_add_ui(sum, sum, 1, MPFR_RNDN);
    for (std::size_t j = 0; j < s.size(); ++j)
        if (visible[j]) mpfr_div(p[j], p[j], sum, MPFR_RNDN);
    // With D_j = dp_j - dp_w, w the largest: delta - dp_w = sum_{j != w} p_j D_j =: rest and dp_j - delta = D_j - rest.
    Real rest(mpfr_get_prec(lse));
    Real rest_size(size_bits);
    for (std::size_t j = 0; j < s.size(); ++j) {
        if (!visible[j] || j == largest) continue;
        mpfr_sub(ds[j], dp[j], dp[largest], MPFR_RNDN);
        mpfr_mul(t, p[j], ds[j], MPFR_RNDN);
        mpfr_add(rest, rest, t, MPFR_RNDN);
        mpfr_add(ds_size[j], dp_size[j], dp_size[largest], MPFR_RNDU);
        mpfr_mul(t, p[j], ds_size[j], MPFR_RNDU);
        mpfr_add(rest_size, rest_size, t, MPFR_RNDU);
    }
    mpfr_add(delta, dp[largest], rest, MPFR_RNDN);
    mpfr_add(delta_size, dp_size[largest], rest_size, MPFR_RNDU);
    for (std::size_t j = 0; j < s.size(); ++j) {
        if (!visible[j]) continue;
        mpfr_sub(ds[j], ds[j], rest, MPFR_RNDN);
        mpfr_mul(ds[j], ds[j], p[j], MPFR_RNDN);
        mpfr_add(ds_size[j], ds_size[j], rest_size, MPFR_RNDU);
        mpfr_mul(ds_size[j], ds_size[j], p[j], MPFR_RNDU);
        const bool is_key = static_cast<std::ptrdiff_t>(j) < problem.k.rows;
        if (problem.softcap > 0 && is_key) {
            mpfr_mul(dz_size[j], ds_size[j], dz[j], MPFR_RNDU);
            mpfr_mul(dz[j], ds[j], dz[j], MPFR_RNDN);
        } else {
            mpfr_set(dz_size[j], ds_size[j], MPFR_RNDU);
            mpfr_set(dz[j], ds[j], MPFR_RNDN);
        }
        if (is_key && (kept == nullptr || kept[j] != 0)) mpfr_div_d(pd[j], p[j], problem.keep, MPFR_RNDN);
    }
}

void add_term(const Real& x, const Real& x_size, double factor, Real& sum, Real& size) {
    Real t(mpfr_get_prec(static_cast<mpfr_srcptr>(sum)));
    mpfr_mul_d(t, x, factor, MPFR_RNDN);
    mpfr_add(sum, sum, t, MPFR_RNDN);
    mpfr_mul_d(t, x_size, std::fabs(factor), MPFR_RNDU);
    mpfr_add(size, size, t, MPFR_RNDU);
}

void JudgedRow::output(const TruthProblem& problem, std::ptrdiff_t c, Real& o, Real& size) const {
    mpfr_set_zero(o, 1);
    mpfr_set_zero(size, 1);
    for (std::ptrdiff_t j = 0; j < problem.k.rows; ++j) {
        const auto at = static_cast<std::size_t>(j);
        if (visible[at]) add_term(pd[at], pd[at], problem.v(j, c), o, size);
    }
}

void JudgedRow::query_gradient(const TruthProblem& problem, std::ptrdiff_t c, Real& dq, Real& size) const {
    mpfr_set_zero(dq, 1);
    mpfr_set_zero(size, 1);
    for (std::ptrdiff_t j = 0; j < problem.k.rows; ++j) {
        const auto at = static_cast<std::size_t>(j);
        if (visible[at]) add_term(dz[at], dz_size[at], problem.k(j, c), dq, size);
    }
    mpfr_mul(dq, dq, scale, MPFR_RNDN);
    mpfr_mul(size, size, scale, MPFR_RNDU);
    mpfr_abs(size, size, MPFR_RNDU);
}

}  // namespace faultline::detail

namespace faultline {

namespace {

using detail::JudgedRow;
using detail::Real;

/// Sums over all queries for one output of the keys, [n_k, cols].
struct KeySums {
    KeySums(std::ptrdiff_t rows, std::ptrdiff_t cols, int bits)
        : width(cols),
          sum(static_cast<std::size_t>(rows * cols), Real(bits)),
          size(sum.size(), Real(detail::size_bits)) {}

    /// Row j += x b^T
    void add(std::ptrdiff_t j, const Real& x, const Real& x_size, const double* b) {
        for (std::ptrdiff_t c = 0; c < width; ++c) {
            const auto at = static_cast<std::size_t>(j * width + c);
            detail::add_term(x, x_size, b[c], sum[at], size[at]);
        }
    }
    void store(const Real* scale, CertifiedMatrix& out) {
        for (std::size_t at = 0; at < sum.size(); ++at) {
            if (scale != nullptr) {
                mpfr_mul(sum[at], sum[at], *scale, MPFR_RNDN);
                mpfr_mul(size[at], size[at], *scale, MPFR_RNDU);
                mpfr_abs(size[at], size[at], MPFR_RNDU);
            }
            const auto n = static_cast<std::ptrdiff_t>(at);
            detail::store(sum[at], size[at], out, n / width, n % width);
        }
    }

    std::ptrdiff_t width;
    std::vector<Real> sum, size;
};

void store_row(const TruthProblem& problem, const JudgedRow& row, std::ptrdiff_t i, HeadTruth& head) {
    if (row.empty) {
        detail::store_masked_row(head, i);
    } else {
        detail::store(row.lse, row.lse_size, head.lse, i, 0);
        detail::store(row.delta, row.delta_size, head.delta, i, 0);
    }
    Real x(mpfr_get_prec(static_cast<mpfr_srcptr>(row.lse)));
    Real size(detail::size_bits);
    for (std::ptrdiff_t c = 0; c < problem.v.cols; ++c) {
        row.output(problem, c, x, size);
        detail::store(x, size, head.o, i, c);
    }
    for (std::ptrdiff_t c = 0; c < problem.k.cols; ++c) {
        row.query_gradient(problem, c, x, size);
        detail::store(x, size, head.dq, i, c);
    }
    for (std::ptrdiff_t j = 0; j < problem.k.rows; ++j) {
        const auto at = static_cast<std::size_t>(j);
        if (!row.visible[at]) {
            head.s.value[head.s.index(i, j)] = -INFINITY;
            continue;
        }
        detail::store(row.s[at], row.lse_size, head.s, i, j);
        detail::store(row.p[at], row.p[at], head.p, i, j);
        detail::store(row.dp[at], row.dp_size[at], head.dp, i, j);
        detail::store(row.ds[at], row.ds_size[at], head.ds, i, j);
    }
}

}  // namespace

GroupTruth attention_truth_mpfr(const TruthProblem& problem, int bits) {
    detail::check_problem(problem);
    const detail::ExponentRange range;
    GroupTruth truth = detail::shaped_truth(problem, true);
    KeySums dk(problem.k.rows, problem.k.cols, bits);
    KeySums dv(problem.k.rows, problem.v.cols, bits);
    JudgedRow row(problem, bits);
    for (std::size_t h = 0; h < problem.q.size(); ++h) {
        KeySums dsink(problem.sink.empty() ? 0 : 1, 1, bits);
        constexpr double one = 1;
        for (std::ptrdiff_t i = 0; i < detail::query_rows(problem); ++i) {
            row.compute(problem, h, i);
            store_row(problem, row, i, truth.heads[h]);
            if (!problem.sink.empty()) dsink.add(0, row.ds.back(), row.ds_size.back(), &one);
            for (std::ptrdiff_t j = 0; j < problem.k.rows; ++j) {
                const auto at = static_cast<std::size_t>(j);
                if (!row.visible[at]) continue;
                dk.add(j, row.dz[at], row.dz_size[at], problem.q[h].row(i));
                dv.add(j, row.pd[at], row.pd[at], problem.dout[h].row(i));
            }
        }
        if (!problem.sink.empty()) dsink.store(nullptr, truth.heads[h].dsink);
    }
    dk.store(&row.scale, truth.dk);
    dv.store(nullptr, truth.dv);
    return truth;
}

}  // namespace faultline
