// SPDX-License-Identifier: Apache-2.0
// How far the exact plan, in binary64, can be from the function: an a-priori bound from the operands' sizes and the number
// of operations, the same for every schedule. First-order error analysis with u = 2^-53 (Higham, Accuracy and Stability of
// Numerical Algorithms, section 3: a sum of n products errs by at most n u sum |a b|), for row i and key j:
//   S_ij = scale sum_c |q_ic k_jc| + |bias_ij|
//   L_i  = max_j S_ij                      every logit, maximum and lse is at most L_i + log n in size
//   e_i  = u [d L_i + forms (L_i + log n)] the argument of an exponential: the product's sum; scale, log2(e), their product,
//                                          maximum or lse times it, the subtraction, and the bias in any of their orders
//   eps_i = 2 e_i + 2 T e_i + (n + forms) u  relative error of p_ij/l_i or of exp(s - lse): numerator and denominator, and in
//                                          each the rescales of T key tiles, whose exponents err as the scores' own; the sum
//   o_i errs by at most (eps_i + n u) max|v|
//   D_i  = max_j sum_c |dO_ic v_jc|        dp_ij, delta_i and their errors' scale
//   ds_ij errs by p_ij D_i eta_i, eta_i = 4 eps_i + (4 n + 4 d + forms) u: p; delta, which is made of o (eps_i, n u, d u) or of
//                                          P and dP (eps_i, n u); dp (d u); the difference, the product, the scale
//   dq_i errs by 2 scale max|k| D_i (eta_i + n u)  sum_j p_ij = 1; twice, for schedules that take off row sums of ds, each
//                                          of which is at most D_i eta_i, times keys or a mean of keys
//   dk_j by 2 scale max|q| sum_i p_ij D_i (eta_i + N u), dv_j by max|dO| sum_i p_ij (eps_i + N u), N rows of all heads
// Under a softcap c a score errs by no more than its argument does (tanh's slope is at most 1) and by some u c, and is at
// most c in size; tanh itself errs by t_i = e_i/c + 4 u, and the slope 1 - tanh^2 by 2 t_i + 4 u of its largest value, 1,
// which eta_i takes up. A sink is one more term of the row sum. Dropout divides o, dv and dp, and what is made of them, by
// the kept share. dsink errs by sum_i p_i,sink D_i (eta_i + N u).
// The dropped terms are of the size of the squares of eps and eta, below 2^-20 of the bound here; `second_order` has them.
#pragma once

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "heads.hpp"

namespace faultline::testing {

/// Rounding-errors-at-most of one head group, per row (o, dq) or key (dk, dv).
struct Binary64Bound {
    std::vector<std::vector<double>> o, dq;  ///< [head][query]
    std::vector<double> dk, dv;              ///< [key]
    std::vector<double> dsink;               ///< [head]

    explicit Binary64Bound(const Head& head) {
        constexpr double u = 0x1p-53, second_order = 1 + 0x1p-20;
        constexpr double forms = 16;  // roundings of one element between two sums, whatever the schedule
        constexpr double tiles = 8;   // key tiles, at most, of the schedules tested
        const HeadGroup in = head.group();
        const auto n = static_cast<double>(in.k.rows), d = static_cast<double>(std::max(in.k.cols, in.v.cols));
        const double rows = static_cast<double>(in.q[0].rows) * static_cast<double>(in.q.size());
        const double k_max = largest(in.k), v_max = largest(in.v);
        dk.assign(static_cast<std::size_t>(in.k.rows), 0.0);
        dv = dk;
        for (std::size_t h = 0; h < in.q.size(); ++h) {
            const double q_max = largest(in.q[h]), dout_max = largest(in.dout[h]);
            o.emplace_back();
            dq.emplace_back();
            dsink.push_back(0);
            for (std::ptrdiff_t i = 0; i < in.q[h].rows; ++i) {
                std::vector<double> s;
                double size = 0, gradient = 0;
                for (std::ptrdiff_t j = 0; j < in.k.rows; ++j) {
                    s.push_back(-INFINITY);
                    if (!is_visible(in, h, i, j)) continue;
                    const double bias = in.bias.empty() ? 0 : in.bias[h](i, j);
                    const double raw = in.scale * dot(in.q[h], i, in.k, j, false);
                    s.back() = (in.softcap > 0 ? in.softcap * std::tanh(raw / in.softcap) : raw) + bias;
                    size = std::max(size, in.scale * dot(in.q[h], i, in.k, j, true) + std::abs(bias));
                    gradient = std::max(gradient, dot(in.dout[h], i, in.v, j, true) / in.keep);
                }
                const double sink = in.sink.empty() ? -INFINITY : in.sink[h];
                if (!in.sink.empty()) size = std::max(size, std::abs(sink));
                const double e = u * (d * size + forms * (size + in.softcap + std::log(n)));
                const double eps = 2 * e + 2 * tiles * e + (n + forms) * u;
                const double slope = in.softcap > 0 ? 2 * (e / in.softcap + 4 * u) + 4 * u : 0;
                const double eta = 4 * eps + (4 * n + 4 * d + forms) * u + slope;
                o[h].push_back(second_order * (eps + n * u) * v_max / in.keep);
                dq[h].push_back(second_order * 2 * in.scale * k_max * gradient * (eta + n * u));
                const double top = std::max(sink, *std::max_element(s.begin(), s.end()));
                double sum = std::exp(sink - top);
                dsink[h] += second_order * sum * gradient * (eta + rows * u);  // p_sink is at most that
                for (const double x : s) sum += std::exp(x - top);
                for (std::size_t j = 0; j < s.size(); ++j) {
                    if (std::isinf(s[j])) continue;
                    const double p = std::exp(s[j] - top) / sum;
                    dk[j] += second_order * 2 * in.scale * q_max * p * gradient * (eta + rows * u);
                    dv[j] += second_order * dout_max * p * (eps + rows * u) / in.keep;
                }
            }
        }
    }

  private:
    static double largest(MatrixView<const double> m) {
        double most = 0;
        for (std::ptrdiff_t i = 0; i < m.rows; ++i)
            for (std::ptrdiff_t j = 0; j < m.cols; ++j) most = std::max(most, std::abs(m(i, j)));
        return most;
    }
    static double dot(MatrixView<const double> a, std::ptrdiff_t i, MatrixView<const double> b, std::ptrdiff_t j,
                      bool of_magnitudes) {
        double sum = 0;
        for (std::ptrdiff_t c = 0; c < a.cols; ++c)
            sum += of_magnitudes ? std::abs(a(i, c) * b(j, c)) : a(i, c) * b(j, c);
        return sum;
    }
};

/// Every element of the row or key within its bound.
inline void expect_within(const Matrix& value, const CertifiedMatrix& truth, const std::vector<double>& bound,
                          const char* what) {
    for (std::ptrdiff_t i = 0; i < value.rows; ++i)
        for (std::ptrdiff_t j = 0; j < value.cols; ++j)
            ASSERT_LE(std::abs(value(i, j) - truth(i, j)), bound[static_cast<std::size_t>(i)])
                << what << "(" << i << ", " << j << ") = " << value(i, j);
}

/// Every output of an exact plan within its bound of the truth.
inline void expect_true(const Head& head, const RoundingPlan& plan, const TruthOptions& options = {}) {
    const Result r = run(head, plan);
    const GroupTruth truth = attention_truth(head.problem(), options);
    const Binary64Bound bound(head);
    for (std::size_t h = 0; h < head.q.size(); ++h) {
        expect_within(r.forward.heads[h].o, truth.heads[h].o, bound.o[h], "o");
        expect_within(r.backward.dq[h], truth.heads[h].dq, bound.dq[h], "dq");
        if (head.sink.empty()) continue;
        EXPECT_NEAR(r.backward.dsink[h], truth.heads[h].dsink(0, 0), bound.dsink[h]);
    }
    expect_within(r.backward.dk, truth.dk, bound.dk, "dk");
    expect_within(r.backward.dv, truth.dv, bound.dv, "dv");
}

}  // namespace faultline::testing
