// SPDX-License-Identifier: Apache-2.0
// attention_truth against the judge: every element.
#include <gtest/gtest.h>

#include "compare.hpp"
#include "problems.hpp"

namespace faultline {
namespace {

using test::Shape;

void expect_truth(const TruthProblem& problem, const std::string& name, int bits = 320) {
    SCOPED_TRACE(name);
    const GroupTruth truth = attention_truth(problem);
    test::expect_same(truth, attention_truth_mpfr(problem, bits));
    test::expect_within_bounds(problem, truth, name, bits);
    EXPECT_EQ(truth.undecided_elements, 0U);
}

TEST(Truth, RandomHeadsOfEveryShape) {
    std::uint64_t seed = 1;
    for (const std::ptrdiff_t d : {1, 8, 64, 96, 128})
        for (const bool causal : {false, true})
            for (const auto& [n_q, n_k] : {std::pair{1, 1}, std::pair{17, 17}, std::pair{5, 30}, std::pair{30, 5}}) {
                Shape shape{.n_q = n_q, .n_k = n_k, .d = d, .d_v = d, .causal = causal};
                shape.heads = 1 + seed % 3;
                const auto owned = test::random_problem(shape, ++seed);
                expect_truth(owned.problem, "d " + std::to_string(d) + " n_q " + std::to_string(n_q) + " n_k " +
                                                std::to_string(n_k) + (causal ? " causal" : ""));
            }
}

}  // namespace
}  // namespace faultline
