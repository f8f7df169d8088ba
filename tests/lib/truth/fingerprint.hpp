// SPDX-License-Identifier: Apache-2.0
// One number for all bits of the truth of a few heads: equal when, and practically only when, all bits are.
#pragma once

#include <bit>
#include <cstdint>

#include <faultline/truth/truth.hpp>

#include "problems.hpp"

namespace faultline::test {

inline std::uint64_t fingerprint() {
    std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over 64-bit words
    const auto add = [&](const CertifiedMatrix& m) {
        for (std::size_t at = 0; at < m.size(); ++at)
            for (const std::uint64_t word :
                 {std::bit_cast<std::uint64_t>(m.value[at]), std::bit_cast<std::uint64_t>(m.bound[at]),
                  static_cast<std::uint64_t>(m.exponent[at])})
                hash = (hash ^ word) * 0x100000001b3;
    };
    for (const double size : {1.0, 20.0, 1000.0})
        for (const int significand : {bf16_bits, fp32_bits, double_bits}) {
            Shape shape{.n_q = 37, .n_k = 41, .d = 24, .d_v = 17, .heads = 2, .significand = significand};
            shape.q_size = shape.k_size = size;
            auto owned = random_problem(shape, 81);
            Generator g(82);
            Matrix bias = g.matrix(37, 41, 1, 11);
            for (double& x : bias.values)
                if (x > 1.5) x = -INFINITY;
            if (size == 20) owned.problem.bias = {owned.keep(bias)};
            if (size != 1) {
                owned.problem.softcap = 30;
                owned.problem.sink = {-1, 2.5};
                Matrix kept(37, 41);
                for (double& x : kept.values) x = g.uniform() < 0.8 ? 1 : 0;
                owned.problem.dropout = {owned.keep(kept)};
                owned.problem.keep = 0.8;
            }
            TruthOptions options;
            options.keep_matrices = true;
            options.correctly_rounded = false;  // the fast path alone
            const GroupTruth truth = attention_truth(owned.problem, options);
            for (const HeadTruth& head : truth.heads)
                for (const CertifiedMatrix* m :
                     {&head.o, &head.dq, &head.lse, &head.delta, &head.dsink, &head.s, &head.p, &head.dp, &head.ds})
                    add(*m);
            add(truth.dk);
            add(truth.dv);
        }
    return hash;
}

}  // namespace faultline::test
