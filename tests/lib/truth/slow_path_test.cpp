// SPDX-License-Identifier: Apache-2.0
// Interval arithmetic for every element against the judge.
#include <gtest/gtest.h>

#include "compare.hpp"
#include "problems.hpp"

namespace faultline {
namespace {

using test::Shape;

TEST(SlowPath, RandomHeads) {
    TruthOptions slow;
    slow.fast_path = false;
    for (const Shape& shape :
         {Shape{}, Shape{.n_q = 5, .n_k = 9, .d = 3, .d_v = 2, .heads = 2}, Shape{.n_q = 9, .n_k = 5, .causal = true},
          Shape{.n_q = 1, .n_k = 1}, Shape{.causal = false, .q_size = 1e4, .k_size = 1e3}}) {
        const auto owned = test::random_problem(shape, 3);
        const GroupTruth truth = attention_truth(owned.problem, slow);
        test::expect_same(truth, attention_truth_mpfr(owned.problem, 320));
        test::expect_within_bounds(owned.problem, truth);
        EXPECT_EQ(truth.undecided_elements, 0U);
    }
}

}  // namespace
}  // namespace faultline
