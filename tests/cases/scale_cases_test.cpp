// SPDX-License-Identifier: Apache-2.0
// Head size 128 tells "scale, then cast" from "cast, then scale", and 64 does not: its scale is a power of two.
// NVIDIA/cudnn-frontend#1046 (the score gradient narrowed before and after the scale), Dao-AILab/flash-attention#2893.
#include <cmath>

#include <gtest/gtest.h>

#include "cases.hpp"

namespace faultline::testing {
namespace {

struct Gradients {
    Matrix dq, dk;
    friend bool operator==(const Gradients&, const Gradients&) = default;
};

Gradients gradients(std::ptrdiff_t d, DsScale where, const Format& format) {
    const Head head(48, 48, d, 7);
    RoundingPlan plan = preset("fa2", d);
    plan.schedule.ds_scale = where;
    plan.set(Site::ds_cast, Rule{format});
    const Result r = run(head, plan);
    return {r.backward.dq[0], r.backward.dk};
}

TEST(ScaleAndCast, CommuteWhereTheScaleIsAPowerOfTwoAndNotElsewhere) {
    // 1/8 and 1/16: rounding and scaling commute in every element (bf16's range holds every ds here: no subnormals).
    for (const std::ptrdiff_t d : {64, 256})
        EXPECT_EQ(gradients(d, DsScale::before, bf16), gradients(d, DsScale::after, bf16)) << d;
    // 1/sqrt(96), 1/sqrt(128): not, and in more than a tenth of the elements.
    for (const Format& format : {bf16, fp16})
        for (const std::ptrdiff_t d : {96, 128}) {
            const Gradients before = gradients(d, DsScale::before, format),
                            after = gradients(d, DsScale::after, format);
            std::size_t differing = 0;
            for (std::size_t a = 0; a < before.dq.values.size(); ++a)
                differing += before.dq.values[a] != after.dq.values[a];
            EXPECT_GT(differing, before.dq.values.size() / 10) << d;
            EXPECT_NE(before.dk, after.dk) << d;
        }
}

// Narrowing before the scale and after it, against before it alone (the sums are scaled, exactly): the second changes no bit
// where the scale is a power of two. Elsewhere it adds a rounding to the two that are there, of dp - delta and of its product
// with p. Three independent ones of one size have sqrt(3/2) of the error of two; over the 48*49/2 scores that are seen the
// ratio of two such norms varies by some 3%.
TEST(ScaleAndCast, NarrowingTwiceCostsAtHeadSize128) {
    for (const std::ptrdiff_t d : {64, 128}) {
        const Head head(48, 48, d, 8);
        const HeadTruth truth = attention_truth(head.problem(), {.correctly_rounded = false}).heads[0];
        RoundingPlan once;  // nothing else is rounded
        once.schedule = preset("fa2", d).schedule;
        once.schedule.ds_scale = DsScale::after;
        once.set(Site::ds, Rule{bf16});
        RoundingPlan twice = once;
        twice.schedule.ds_scale = DsScale::before;  // the scaled product is rounded at the site too
        const Result of_once = run(head, once), of_twice = run(head, twice);
        const double error_once = relative_error(of_once.backward.dq[0].view(), truth.dq);
        const double error_twice = relative_error(of_twice.backward.dq[0].view(), truth.dq);
        EXPECT_GT(error_once, 0) << d;
        if (d == 64) {
            EXPECT_TRUE(of_once.backward.dq[0] == of_twice.backward.dq[0]);
            EXPECT_TRUE(of_once.backward.dk == of_twice.backward.dk);
        } else {
            EXPECT_NEAR(error_twice / error_once, std::sqrt(1.5), 0.1);
            EXPECT_FALSE(of_once.backward.dk == of_twice.backward.dk);
        }
    }
}

}  // namespace
}  // namespace faultline::testing
