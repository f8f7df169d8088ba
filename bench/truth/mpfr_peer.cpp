// SPDX-License-Identifier: Apache-2.0
// mpfr_mul + mpfr_add with the inputs in 8-bit variables (bf16): of the plain loops the fastest over the whole head, where
// mpfr_fma with 128-bit inputs takes a fifth longer.
#include "peers.hpp"

#include <cmath>

#include <mpfr.h>

namespace faultline::bench {
namespace {

/// n numbers, row-major.
class Numbers {
  public:
    Numbers(std::ptrdiff_t n, int bits) : x_(static_cast<std::size_t>(n)) {
        for (auto& x : x_) {
            mpfr_init2(&x, bits);
            mpfr_set_zero(&x, 1);
        }
    }
    explicit Numbers(MatrixView<const double> a) : Numbers(a.rows * a.cols, 8) {
        for (std::ptrdiff_t i = 0; i < a.rows; ++i)
            for (std::ptrdiff_t j = 0; j < a.cols; ++j) mpfr_set_d((*this)[i * a.cols + j], a(i, j), MPFR_RNDN);
    }
    Numbers(const Numbers&) = delete;
    Numbers& operator=(const Numbers&) = delete;
    ~Numbers() {
        for (auto& x : x_) mpfr_clear(&x);
    }
    mpfr_ptr operator[](std::ptrdiff_t i) { return &x_[static_cast<std::size_t>(i)]; }
    [[nodiscard]] std::vector<double> rounded() {
        std::vector<double> r;
        for (auto& x : x_) r.push_back(mpfr_get_d(&x, MPFR_RNDN));
        return r;
    }

  private:
    std::vector<__mpfr_struct> x_;
};

}  // namespace

PeerResult mpfr_attention(const TruthProblem& problem) {
    const std::ptrdiff_t n = problem.q[0].rows, m = problem.k.rows, d = problem.k.cols, d_v = problem.v.cols;
    Numbers q(problem.q[0]), dout(problem.dout[0]), k(problem.k), v(problem.v);
    Numbers s(m, peer_bits), dp(m, peer_bits), o(n * d_v, peer_bits), dq(n * d, peer_bits), dk(m * d, peer_bits),
        dv(m * d_v, peer_bits);
    Numbers scratch(4, peer_bits);
    mpfr_ptr t = scratch[0];
    mpfr_ptr sum = scratch[1];
    mpfr_ptr delta = scratch[2];
    const double root = std::sqrt(static_cast<double>(d));
    for (std::ptrdiff_t i = 0; i < n; ++i) {
        const std::ptrdiff_t end = problem.causal ? i + (m - n) + 1 : m;
        for (std::ptrdiff_t j = 0; j < end; ++j) {
            mpfr_set_zero(s[j], 1);
            for (std::ptrdiff_t c = 0; c < d; ++c) {
                mpfr_mul(t, q[i * d + c], k[j * d + c], MPFR_RNDN);
                mpfr_add(s[j], s[j], t, MPFR_RNDN);
            }
            mpfr_div_d(s[j], s[j], root, MPFR_RNDN);
            mpfr_set_zero(dp[j], 1);
            for (std::ptrdiff_t c = 0; c < d_v; ++c) {
                mpfr_mul(t, dout[i * d_v + c], v[j * d_v + c], MPFR_RNDN);
                mpfr_add(dp[j], dp[j], t, MPFR_RNDN);
            }
        }
        mpfr_set_zero(sum, 1);
        for (std::ptrdiff_t j = 0; j < end; ++j) {
            mpfr_exp(s[j], s[j], MPFR_RNDN);
            mpfr_add(sum, sum, s[j], MPFR_RNDN);
        }
        mpfr_set_zero(delta, 1);
        for (std::ptrdiff_t j = 0; j < end; ++j) {
            mpfr_div(s[j], s[j], sum, MPFR_RNDN);
            mpfr_mul(t, s[j], dp[j], MPFR_RNDN);
            mpfr_add(delta, delta, t, MPFR_RNDN);
        }
        for (std::ptrdiff_t j = 0; j < end; ++j) {
            for (std::ptrdiff_t c = 0; c < d_v; ++c) {
                mpfr_mul(t, s[j], v[j * d_v + c], MPFR_RNDN);
                mpfr_add(o[i * d_v + c], o[i * d_v + c], t, MPFR_RNDN);
                mpfr_mul(t, s[j], dout[i * d_v + c], MPFR_RNDN);
                mpfr_add(dv[j * d_v + c], dv[j * d_v + c], t, MPFR_RNDN);
            }
            mpfr_sub(dp[j], dp[j], delta, MPFR_RNDN);
            mpfr_mul(dp[j], dp[j], s[j], MPFR_RNDN);
            mpfr_div_d(dp[j], dp[j], root, MPFR_RNDN);
            for (std::ptrdiff_t c = 0; c < d; ++c) {
                mpfr_mul(t, dp[j], k[j * d + c], MPFR_RNDN);
                mpfr_add(dq[i * d + c], dq[i * d + c], t, MPFR_RNDN);
                mpfr_mul(t, dp[j], q[i * d + c], MPFR_RNDN);
                mpfr_add(dk[j * d + c], dk[j * d + c], t, MPFR_RNDN);
            }
        }
    }
    return {o.rounded(), dq.rounded(), dk.rounded(), dv.rounded()};
}

}  // namespace faultline::bench
