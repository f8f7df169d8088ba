// SPDX-License-Identifier: Apache-2.0
// Arb's rigorous balls: arb_dot for every sum of products, arb_exp. Scores of hidden keys are not computed.
#include "peers.hpp"

#ifdef FAULTLINE_HAVE_ARB

#include <algorithm>

#include <arb.h>

namespace faultline::bench {
namespace {

struct Balls {
    arb_ptr x;
    slong n;
    explicit Balls(slong count) : x(_arb_vec_init(count)), n(count) {}
    explicit Balls(MatrixView<const double> a) : Balls(a.rows * a.cols) {
        for (slong i = 0; i < a.rows; ++i)
            for (slong j = 0; j < a.cols; ++j) arb_set_d(x + i * a.cols + j, a(i, j));
    }
    Balls(const Balls&) = delete;
    Balls& operator=(const Balls&) = delete;
    ~Balls() { _arb_vec_clear(x, n); }
    [[nodiscard]] std::vector<double> rounded() const {
        std::vector<double> r;
        for (slong i = 0; i < n; ++i) r.push_back(arf_get_d(arb_midref(x + i), ARF_RND_NEAR));
        return r;
    }
};

}  // namespace

bool have_arb() { return true; }

PeerResult arb_attention(const TruthProblem& problem) {
    const slong n = problem.q[0].rows, m = problem.k.rows, d = problem.k.cols, d_v = problem.v.cols;
    Balls q(problem.q[0]), dout(problem.dout[0]), k(problem.k), v(problem.v);
    Balls p(n * m), ds(n * m), o(n * d_v), dq(n * d), dk(m * d), dv(m * d_v), scratch(3);
    arb_ptr sum = scratch.x, delta = scratch.x + 1, root = scratch.x + 2;
    arb_sqrt_ui(root, static_cast<ulong>(d), peer_bits);
    const auto first_query = [&](slong j) { return problem.causal ? std::max<slong>(0, j - (m - n)) : 0; };
    for (slong i = 0; i < n; ++i) {
        const slong end = problem.causal ? i + (m - n) + 1 : m;
        arb_ptr row = p.x + i * m;
        arb_ptr row_ds = ds.x + i * m;
        arb_zero(sum);
        for (slong j = 0; j < end; ++j) {
            arb_dot(row + j, nullptr, 0, q.x + i * d, 1, k.x + j * d, 1, d, peer_bits);
            arb_div(row + j, row + j, root, peer_bits);
            arb_exp(row + j, row + j, peer_bits);
            arb_add(sum, sum, row + j, peer_bits);
            arb_dot(row_ds + j, nullptr, 0, dout.x + i * d_v, 1, v.x + j * d_v, 1, d_v, peer_bits);
        }
        _arb_vec_scalar_div(row, row, end, sum, peer_bits);
        arb_dot(delta, nullptr, 0, row, 1, row_ds, 1, end, peer_bits);
        for (slong j = 0; j < end; ++j) {
            arb_sub(row_ds + j, row_ds + j, delta, peer_bits);
            arb_mul(row_ds + j, row_ds + j, row + j, peer_bits);
            arb_div(row_ds + j, row_ds + j, root, peer_bits);
        }
        for (slong c = 0; c < d_v; ++c) arb_dot(o.x + i * d_v + c, nullptr, 0, row, 1, v.x + c, d_v, end, peer_bits);
        for (slong c = 0; c < d; ++c) arb_dot(dq.x + i * d + c, nullptr, 0, row_ds, 1, k.x + c, d, end, peer_bits);
    }
    for (slong j = 0; j < m; ++j) {
        const slong i = first_query(j);
        for (slong c = 0; c < d_v; ++c)
            arb_dot(dv.x + j * d_v + c, nullptr, 0, p.x + i * m + j, m, dout.x + i * d_v + c, d_v, n - i, peer_bits);
        for (slong c = 0; c < d; ++c)
            arb_dot(dk.x + j * d + c, nullptr, 0, ds.x + i * m + j, m, q.x + i * d + c, d, n - i, peer_bits);
    }
    return {o.rounded(), dq.rounded(), dk.rounded(), dv.rounded()};
}

}  // namespace faultline::bench
#else
namespace faultline::bench {

bool have_arb() { return false; }
PeerResult arb_attention(const TruthProblem&) { return {}; }

}  // namespace faultline::bench
#endif
