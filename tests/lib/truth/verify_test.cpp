// SPDX-License-Identifier: Apache-2.0
// verify_truth: what it sees, how much it checks, when it stops.
#include <cstddef>
#include <string>

#include <gtest/gtest.h>

#include <faultline/truth/truth.hpp>

#include "problems.hpp"

namespace faultline {
namespace {

using test::Shape;

TEST(Verification, SeesAWrongElement) {
    const auto owned = test::random_problem(Shape{}, 57);
    GroupTruth truth = attention_truth(owned.problem);
    EXPECT_EQ(verify_truth(owned.problem, truth, 100, 1).outside, 0U);
    for (double& x : truth.dk.value) x *= 1 + 0x1p-51;
    const TruthVerification found = verify_truth(owned.problem, truth, 100, 1);
    EXPECT_GT(found.outside, 90U);
    EXPECT_EQ(found.worst.substr(0, 2), "dk");
    EXPECT_GT(found.worst_ratio, 1.5);
}

TEST(Verification, OfMoreThanThereIsChecksEachElementOnce) {
    const auto owned = test::random_problem(Shape{}, 57);
    const GroupTruth truth = attention_truth(owned.problem);
    std::size_t all = truth.dk.value.size() + truth.dv.value.size();
    ASSERT_EQ(truth.dk.cols, truth.dv.cols);  // or the narrower one's last column counts again
    for (const HeadTruth& head : truth.heads)
        all += head.o.value.size() + head.dq.value.size() + head.lse.value.size() + head.delta.value.size();
    const TruthVerification found = verify_truth(owned.problem, truth, ~std::size_t{0}, 1);
    EXPECT_EQ(found.checked, all);
    EXPECT_EQ(found.outside, 0U);
}

TEST(Verification, DoesNotDependOnThreads) {
    auto owned = test::random_problem(Shape{.n_q = 21, .n_k = 23, .heads = 2}, 59);
    owned.problem.sink = {0.5, -1};
    const GroupTruth truth = attention_truth(owned.problem);
    const TruthVerification one = verify_truth(owned.problem, truth, 30, 1);
    EXPECT_EQ(one.outside, 0U);
    EXPECT_EQ(one.checked, 4U * 30 + 2 * 4 + 2);  // o, dq, dk, dv; lse and delta of four rows; two sinks
    for (const int threads : {2, 5}) {
        const TruthVerification several = verify_truth(owned.problem, truth, 30, 1, 320, {}, threads);
        EXPECT_EQ(several.checked, one.checked);
        EXPECT_EQ(several.outside, one.outside);
        EXPECT_EQ(several.worst_ratio, one.worst_ratio);
        EXPECT_EQ(several.worst, one.worst);
    }
}

TEST(Verification, StopsWhenAsked) {
    const auto owned = test::random_problem(Shape{}, 57);
    const GroupTruth truth = attention_truth(owned.problem);
    int polls = 0;
    const TruthVerification found =
        verify_truth(owned.problem, truth, 1'000'000, 1, 320, [&] { return ++polls > 3; });  // true after three rows
    EXPECT_EQ(polls, 5);  // once more before the columns
    const HeadTruth& head = truth.heads[0];
    EXPECT_EQ(found.checked, 3U * static_cast<std::size_t>(head.o.cols + head.dq.cols + 2));
}

}  // namespace
}  // namespace faultline
