// SPDX-License-Identifier: Apache-2.0
// dq, dk, dv against central finite differences of L = sum dout o in several thousand bits: nothing of the backward
// formulae, and nothing of the judge, enters here.
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/truth/mpfr_real.hpp>
#include <faultline/truth/truth.hpp>

#include "problems.hpp"

namespace faultline {
namespace {

using detail::Real;

struct Precision {
    int bits;
    int step;  // the difference quotient's step is 2^-step
};

/// A matrix of Reals, row-major.
struct RealMatrix {
    std::ptrdiff_t cols;
    std::vector<Real> x;
    RealMatrix(MatrixView<const double> a, int bits) : cols(a.cols) {
        for (std::ptrdiff_t i = 0; i < a.rows; ++i)
            for (std::ptrdiff_t c = 0; c < a.cols; ++c) {
                x.emplace_back(bits);
                mpfr_set_d(x.back(), a(i, c), MPFR_RNDN);
            }
    }
    Real& operator()(std::ptrdiff_t i, std::ptrdiff_t c) { return x[static_cast<std::size_t>(i * cols + c)]; }
};

struct Inputs {
    std::vector<RealMatrix> q;
    RealMatrix k, v;
    std::vector<RealMatrix> sink;  ///< per head [1, 1], or none
};

/// L = sum_{h,i,c} dout o, softmax in its plainest form: with cap, sink and dropout as truth.hpp defines them.
void loss(const TruthProblem& p, Inputs& in, int bits, Real& result) {
    Real s(bits), t(bits), denominator(bits), weighted(bits), scale(bits);
    mpfr_set_si(scale, p.k.cols, MPFR_RNDN);
    mpfr_rec_sqrt(scale, scale, MPFR_RNDN);
    mpfr_set_zero(result, 1);
    const std::ptrdiff_t n_q = p.q[0].rows;
    for (std::size_t h = 0; h < in.q.size(); ++h)
        for (std::ptrdiff_t i = 0; i < n_q; ++i) {
            mpfr_set_zero(denominator, 1);
            mpfr_set_zero(weighted, 1);
            if (!in.sink.empty()) mpfr_exp(denominator, in.sink[h](0, 0), MPFR_RNDN);
            for (std::ptrdiff_t j = 0; j < p.k.rows; ++j) {
                const double bias = p.bias.empty() ? 0 : p.bias[p.bias.size() == 1 ? 0 : h](i, j);
                if ((p.causal && j > i + p.k.rows - n_q) || std::isinf(bias)) continue;
                mpfr_set_zero(s, 1);
                for (std::ptrdiff_t c = 0; c < p.k.cols; ++c) {
                    mpfr_mul(t, in.q[h](i, c), in.k(j, c), MPFR_RNDN);
                    mpfr_add(s, s, t, MPFR_RNDN);
                }
                mpfr_mul(s, s, scale, MPFR_RNDN);
                if (p.softcap > 0) {
                    mpfr_div_d(s, s, p.softcap, MPFR_RNDN);
                    mpfr_tanh(s, s, MPFR_RNDN);
                    mpfr_mul_d(s, s, p.softcap, MPFR_RNDN);
                }
                mpfr_add_d(s, s, bias, MPFR_RNDN);
                mpfr_exp(s, s, MPFR_RNDN);
                mpfr_add(denominator, denominator, s, MPFR_RNDN);
                if (!p.dropout.empty() && p.dropout[h](i, j) == 0) continue;
                mpfr_div_d(s, s, p.keep, MPFR_RNDN);
                for (std::ptrdiff_t c = 0; c < p.v.cols; ++c) {
                    mpfr_mul_d(t, in.v(j, c), p.dout[h](i, c), MPFR_RNDN);
                    mpfr_mul(t, t, s, MPFR_RNDN);
                    mpfr_add(weighted, weighted, t, MPFR_RNDN);
                }
            }
            if (mpfr_zero_p(static_cast<mpfr_srcptr>(denominator))) continue;
            mpfr_div(t, weighted, denominator, MPFR_RNDN);
            mpfr_add(result, result, t, MPFR_RNDN);
        }
}

/// Every element of `gradient` against the difference quotient in the elements of `variable`. Its own error, of second
/// order in the step, is 2^(-2 step) times third derivatives (here below 2^200), and rounding 2^(step - bits).
void check(const TruthProblem& p, Inputs& in, RealMatrix& variable, const CertifiedMatrix& gradient,
           Precision precision, const std::string& name) {
    Real up(precision.bits), down(precision.bits), kept(precision.bits), step(precision.bits);
    mpfr_set_ui_2exp(step, 1, -precision.step, MPFR_RNDN);
    const WideReal quotient_error(1.0, std::max(-2 * precision.step + 200, precision.step - precision.bits + 64));
    for (std::ptrdiff_t i = 0; i < gradient.rows; ++i)
        for (std::ptrdiff_t c = 0; c < gradient.cols; ++c) {
            kept = variable(i, c);
            mpfr_add(variable(i, c), kept, step, MPFR_RNDN);
            loss(p, in, precision.bits, up);
            mpfr_sub(variable(i, c), kept, step, MPFR_RNDN);
            loss(p, in, precision.bits, down);
            variable(i, c) = kept;
            mpfr_sub(up, up, down, MPFR_RNDN);
            mpfr_div(up, up, step, MPFR_RNDN);
            mpfr_div_2ui(up, up, 1, MPFR_RNDN);
            // minus truth
            mpfr_set_d(down, gradient.at(i, c).mantissa, MPFR_RNDN);
            mpfr_mul_2si(down, down, static_cast<long>(gradient.at(i, c).exponent), MPFR_RNDN);
            mpfr_sub(up, up, down, MPFR_RNDN);
            long exponent = 0;
            const double mantissa = mpfr_get_d_2exp(&exponent, up, MPFR_RNDA);
            const WideReal difference(std::fabs(mantissa), exponent);
            EXPECT_LE(difference, gradient.bound_at(i, c) + quotient_error)
                << name << "[" << i << ", " << c << "] = " << gradient.at(i, c).to_string(17) << " off by "
                << difference.to_string();
            EXPECT_TRUE(gradient.at(i, c).mantissa == 0 || quotient_error < abs(gradient.at(i, c)) * WideReal(0x1p-60))
                << name << ": the quotient is too coarse to judge by: " << gradient.at(i, c).to_string();
        }
}

void check_all(const TruthProblem& p, Precision precision) {
    const GroupTruth truth = attention_truth(p);
    Inputs in{{}, RealMatrix(p.k, precision.bits), RealMatrix(p.v, precision.bits), {}};
    for (const double& logit : p.sink) in.sink.emplace_back(MatrixView<const double>{&logit, 1, 1}, precision.bits);
    for (const auto& q : p.q) in.q.emplace_back(q, precision.bits);
    for (std::size_t h = 0; h < p.sink.size(); ++h) check(p, in, in.sink[h], truth.heads[h].dsink, precision, "dsink");
    for (std::size_t h = 0; h < p.q.size(); ++h) check(p, in, in.q[h], truth.heads[h].dq, precision, "dq");
    check(p, in, in.k, truth.dk, precision, "dk");
    check(p, in, in.v, truth.dv, precision, "dv");
}

TEST(Gradient, BenignHeadsByFiniteDifferences) {
    constexpr Precision precision{1200, 400};
    for (const bool causal : {false, true}) {
        auto owned =
            test::random_problem(test::Shape{.n_q = 4, .n_k = 5, .d = 3, .d_v = 2, .heads = 2, .causal = causal}, 71);
        check_all(owned.problem, precision);
        Matrix bias(4, 5, 0.5);
        bias(1, 1) = bias(2, 0) = -INFINITY;
        for (std::ptrdiff_t j = 0; j < 5; ++j) bias(3, j) = -INFINITY;
        owned.problem.bias = {owned.keep(bias)};
        check_all(owned.problem, precision);
    }
}

TEST(Gradient, SaturatedRowsByFiniteDifferences) {
    // logits of about 10^3 nats: gradients down to 2^-5000 or so
    test::Shape shape{.n_q = 3, .n_k = 3, .d = 2, .d_v = 2, .causal = false, .q_size = 30, .k_size = 30};
    check_all(test::random_problem(shape, 72).problem, {26000, 9000});
}

/// One with all of cap, sink and dropout, or each alone.
test::OwnedProblem modified(const test::Shape& shape, double softcap, bool sink, double keep, std::uint64_t seed) {
    test::OwnedProblem owned = test::random_problem(shape, seed);
    test::Generator g(seed + 1);
    owned.problem.softcap = softcap;
    owned.problem.keep = keep;
    for (std::size_t h = 0; h < shape.heads; ++h) {
        if (sink) owned.problem.sink.push_back(0.5 * static_cast<double>(h) - 0.75);
        if (keep == 1) continue;
        Matrix kept(shape.n_q, shape.n_k);
        for (double& x : kept.values) x = g.uniform() < keep ? 1 : 0;
        owned.problem.dropout.push_back(owned.keep(kept));
    }
    return owned;
}

TEST(Gradient, CapSinkAndDropoutByFiniteDifferences) {
    constexpr Precision precision{1200, 400};
    const test::Shape shape{.n_q = 4, .n_k = 5, .d = 3, .d_v = 2, .heads = 2, .causal = true};
    check_all(modified(shape, 1.5, false, 1, 73).problem, precision);
    check_all(modified(shape, 0, true, 1, 74).problem, precision);
    check_all(modified(shape, 0, false, 0.75, 75).problem, precision);
    check_all(modified(shape, 1.5, true, 0.75, 76).problem, precision);
}

// u of some 100 and more: slopes of e^-200, and p of the capped scores.
TEST(Gradient, SaturatedCapByFiniteDifferences) {
    const test::Shape shape{.n_q = 3, .n_k = 3, .d = 2, .d_v = 2, .causal = false, .q_size = 30, .k_size = 30};
    check_all(modified(shape, 4, true, 1, 77).problem, {12000, 4000});
}

}  // namespace
}  // namespace faultline
