// SPDX-License-Identifier: Apache-2.0
// Problems on which every way to compute the fast path has to give the same bits, and their comparison.
#pragma once

#include <cmath>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "compare.hpp"
#include "problems.hpp"

namespace faultline::test {

inline std::size_t differing(const CertifiedMatrix& a, const CertifiedMatrix& b) {
    if (a.rows != b.rows || a.cols != b.cols) return 1 + a.size() + b.size();
    std::size_t count = 0;
    for (std::size_t e = 0; e < a.size(); ++e)
        count += a.value[e] == b.value[e] && a.bound[e] == b.bound[e] && a.exponent[e] == b.exponent[e] ? 0 : 1;
    return count;
}

inline void expect_same_bits(const GroupTruth& cpu, const GroupTruth& other, const std::string& what) {
    ASSERT_EQ(cpu.heads.size(), other.heads.size());
    for (std::size_t h = 0; h < cpu.heads.size(); ++h) {
        EXPECT_EQ(differing(cpu.heads[h].o, other.heads[h].o), 0U) << what << " o";
        EXPECT_EQ(differing(cpu.heads[h].dq, other.heads[h].dq), 0U) << what << " dq";
        EXPECT_EQ(differing(cpu.heads[h].lse, other.heads[h].lse), 0U) << what << " lse";
        EXPECT_EQ(differing(cpu.heads[h].delta, other.heads[h].delta), 0U) << what << " delta";
        EXPECT_EQ(differing(cpu.heads[h].dsink, other.heads[h].dsink), 0U) << what << " dsink";
    }
    EXPECT_EQ(differing(cpu.dk, other.dk), 0U) << what << " dk";
    EXPECT_EQ(differing(cpu.dv, other.dv), 0U) << what << " dv";
    EXPECT_EQ(cpu.undecided_elements, other.undecided_elements) << what;
    EXPECT_EQ(cpu.slow_elements, other.slow_elements) << what;
}

using OnProblem = std::function<void(const TruthProblem& problem, const std::string& name)>;

inline void shapes_masks_and_formats(const OnProblem& f) {
    std::uint64_t seed = 40;
    for (const std::ptrdiff_t d : {1, 24, 64, 128})
        for (const bool causal : {false, true})
            for (const auto& [n_q, n_k] : {std::pair{1, 1}, std::pair{37, 41}, std::pair{5, 30}, std::pair{70, 20}})
                for (const int significand : {bf16_bits, fp32_bits, double_bits}) {
                    Shape shape{.n_q = n_q, .n_k = n_k, .d = d, .d_v = d == 24 ? 17 : d, .causal = causal};
                    shape.significand = significand;
                    shape.heads = 1 + ++seed % 3;
                    const auto owned = random_problem(shape, seed);
                    f(owned.problem, "d " + std::to_string(d) + " n_q " + std::to_string(n_q) + " n_k " +
                                         std::to_string(n_k) + (causal ? " causal " : " ") +
                                         std::to_string(significand) + " bits");
                }
}

/// Logits of standard deviation `gap` nats: most rows have all mass on one key.
inline void saturated_rows(const OnProblem& f) {
    for (const double gap : {1e2, 1e3, 1e4, 1e5, 1e6})
        for (const bool causal : {true, false}) {
            Shape shape{.n_q = 40, .n_k = 40, .d = 8, .d_v = 8, .heads = 2, .causal = causal};
            shape.q_size = shape.k_size = std::sqrt(gap);
            f(random_problem(shape, 21).problem, "gap " + std::to_string(gap));
        }
}

/// The keys that matter agree in every other column: dq's leading terms cancel there.
inline void keys_that_agree_in_a_column(const OnProblem& f) {
    Shape shape{.n_q = 24, .n_k = 24, .d = 16, .d_v = 16};
    shape.q_size = shape.k_size = 12;
    OwnedProblem owned = random_problem(shape, 23);
    Matrix k(24, 16);
    for (std::ptrdiff_t j = 0; j < 24; ++j)
        for (std::ptrdiff_t c = 0; c < 16; ++c)
            k(j, c) = c % 2 == 0 && j < 23 ? owned.problem.k(0, c) : owned.problem.k(j, c);
    owned.problem.k = owned.keep(k);
    f(owned.problem, "columns that agree");
}

inline void bias_softcap_sink_dropout(const OnProblem& f) {
    for (const double size : {1.0, 20.0, 1000.0})
        for (const int mask : {1, 2, 4, 8, 15, 7, 3}) {
            Shape shape{.n_q = 37, .n_k = 41, .d = 24, .d_v = 17, .heads = 2, .causal = mask % 2 == 0};
            shape.q_size = shape.k_size = size;
            auto owned = random_problem(shape, 81);
            Generator g(82);
            Matrix bias = g.matrix(37, 41, 1, 11);
            for (double& x : bias.values)
                if (x > 1.5) x = -INFINITY;
            for (std::ptrdiff_t j = 0; j < 41; ++j) bias(5, j) = -INFINITY;  // a row that sees nothing
            bias(7, 3) = -0x1p60;                                            // and a key that does not count
            Matrix kept(37, 41);
            for (double& x : kept.values) x = g.uniform() < 0.8 ? 1 : 0;
            if ((mask & 1) != 0) owned.problem.bias = {owned.keep(bias), owned.keep(g.matrix(37, 41, 30, 53))};
            if ((mask & 2) != 0) owned.problem.softcap = 30;
            if ((mask & 4) != 0) owned.problem.sink = {-1, 2.5};
            if ((mask & 8) != 0) {
                owned.problem.dropout = {owned.keep(kept)};
                owned.problem.keep = 0.8;
            }
            f(owned.problem, "size " + std::to_string(size) + " mask " + std::to_string(mask));
        }
}

/// A bias that hides products of 2^45: p is not known well enough, and every element goes the slow way.
inline void rows_that_are_lost(const OnProblem& f) {
    Shape shape{.n_q = 6, .n_k = 6, .d = 4, .d_v = 4};
    shape.q_size = shape.k_size = 0x1p23;
    shape.significand = double_bits;
    OwnedProblem owned = random_problem(shape, 5);
    Matrix bias(6, 6);
    for (std::ptrdiff_t i = 0; i < 6; ++i)
        for (std::ptrdiff_t j = 0; j < 6; ++j)
            for (std::ptrdiff_t c = 0; c < 4; ++c) bias(i, j) -= 0.5 * owned.problem.q[0](i, c) * owned.problem.k(j, c);
    owned.problem.bias = {owned.keep(bias)};
    f(owned.problem, "lost rows");
}

}  // namespace faultline::test
