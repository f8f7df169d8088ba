// SPDX-License-Identifier: Apache-2.0
// Heads for tests: random bf16 operands that own their storage, and the views that the kernels and the truth take.
#pragma once

#include <cmath>

#include <faultline/cpu/attention.hpp>
#include <faultline/format/format.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline::testing {

inline Matrix random_matrix(std::ptrdiff_t rows, std::ptrdiff_t cols, double size, std::uint64_t seed,
                            const Format& format = bf16) {
    Matrix m(rows, cols);
    const RandomStream stream(seed, 17);
    for (std::size_t i = 0; i < m.values.size(); ++i)
        m.values[i] = round(size * stream.normal(i), format, Rounding::nearest_even);
    return m;
}

/// One key head with `query_heads` query heads.
struct Head {
    std::vector<Matrix> q, dout, bias, dropout;
    Matrix k, v;
    bool causal = true;
    double scale = 0, softcap = 0, keep = 1;
    std::vector<double> sink;

    Head(std::ptrdiff_t n_q, std::ptrdiff_t n_k, std::ptrdiff_t d, std::uint64_t seed, int query_heads = 1,
         double logit_size = 1.0)
        : k(random_matrix(n_k, d, 1.0, 4 * seed)),
          v(random_matrix(n_k, d, 1.0, 4 * seed + 1)),
          scale(1.0 / std::sqrt(static_cast<double>(d))) {
        for (int h = 0; h < query_heads; ++h) {
            const auto s = 1000 * static_cast<std::uint64_t>(h) + 4 * seed;
            q.push_back(random_matrix(n_q, d, logit_size, s + 2));
            dout.push_back(random_matrix(n_q, d, 1.0, s + 3));
        }
    }
    /// Each element dropped with probability 1 - share.
    void drop(double share, std::uint64_t seed) {
        keep = share;
        for (std::size_t h = 0; h < q.size(); ++h) {
            const RandomStream stream(seed, 23 + h);
            Matrix& kept = dropout.emplace_back(q[h].rows, k.rows);
            for (std::size_t i = 0; i < kept.values.size(); ++i) kept.values[i] = stream.uniform(i) < share ? 1 : 0;
        }
    }
    [[nodiscard]] HeadGroup group() const {
        HeadGroup g;
        for (const Matrix& m : q) g.q.push_back(m.view());
        for (const Matrix& m : dout) g.dout.push_back(m.view());
        for (const Matrix& m : bias) g.bias.push_back(m.view());
        g.k = k.view();
        g.v = v.view();
        g.scale = scale;
        g.causal = causal;
        g.softcap = softcap;
        g.sink = sink;
        for (const Matrix& m : dropout) g.dropout.push_back(m.view());
        g.keep = keep;
        return g;
    }
    [[nodiscard]] TruthProblem problem() const {
        const HeadGroup g = group();
        TruthProblem p;
        p.q = g.q;
        p.dout = g.dout;
        p.k = g.k;
        p.v = g.v;
        p.causal = causal;
        p.bias = g.bias;
        p.softcap = softcap;
        p.sink = sink;
        p.dropout = g.dropout;
        p.keep = keep;
        return p;
    }
};

/// Forward and backward together.
struct Result {
    GroupForward forward;
    GroupBackward backward;
};
inline Result run(const Head& head, const RoundingPlan& plan, Instrument* instrument = nullptr) {
    const HeadGroup g = head.group();
    Result r{attention_forward(g, plan, instrument), {}};
    r.backward = attention_backward(g, r.forward, plan, instrument);
    return r;
}

inline RoundingPlan preset(std::string_view name, std::ptrdiff_t d = 64) {
    return for_head_dim(plan(name), static_cast<int>(d));
}

}  // namespace faultline::testing
