// SPDX-License-Identifier: Apache-2.0
// Which heads the kernels that leave hidden pairs out may have, held to what the processor's emulation makes of heads at either side.
#include <cmath>

#include <gtest/gtest.h>

#include <faultline/device/hidden_pairs.hpp>
#include <faultline/plan/presets.hpp>

#include "heads.hpp"
#include "hidden_heads.hpp"

namespace faultline {
namespace {

using testing::Head;

double largest(const std::vector<double>& x) {
    double all = 0;
    for (const double value : x) all = std::max(all, std::abs(value));
    return all;
}

struct Judged {
    bool zeros, finite;  ///< what is said of the head, and whether dq and dk of the processor are
};

Judged judge(const Head& head, const RoundingPlan& plan) {
    const HeadGroup group = head.group();
    const GroupForward forward = attention_forward(group, plan);
    const GroupBackward backward = attention_backward(group, forward, plan);
    const Matrix &dout = head.dout.front(), &o = forward.heads.front().o_unrounded;
    std::vector<double> delta;
    for (std::ptrdiff_t i = 0; i < dout.rows; ++i) {
        double sum = 0;
        for (std::ptrdiff_t j = 0; j < dout.cols; ++j) {
            const auto at = static_cast<std::size_t>(i * dout.cols + j);
            sum += dout.values[at] * o.values[at];
        }
        delta.push_back(sum);
    }
    bool finite = true;
    for (const std::vector<double>* x : {&backward.dq.front().values, &backward.dk.values})
        for (const double value : *x) finite = finite && std::isfinite(value);
    const double most = device::largest_of_hidden_pairs(plan[Site::ds].format, plan[Site::dp_accumulate].format,
                                                        plan[Site::dp_cast].format);
    return {device::hidden_pairs_are_zeros(most, static_cast<double>(head.v.cols), largest(dout.values),
                                           largest(head.v.values), largest(delta)),
            finite};
}

TEST(HiddenPairs, InfinitiesAreNoZeros) {
    const RoundingPlan plan = for_head_dim(faultline::plan("fa2"), 64, true);
    for (const Head& head : testing::heads_with_hidden_infinities()) {
        const Judged judged = judge(head, plan);
        EXPECT_FALSE(judged.finite) << "the processor has a NaN here";
        EXPECT_FALSE(judged.zeros);
    }
}

// Up to the limit hidden pairs leave no trace: sizes from far below it to far beyond, ds in the formats that a plan may give it.
TEST(HiddenPairs, WhatIsSaidToBeZerosIsFinite) {
    for (const Format& format : {fp32, bf16, fp16}) {
        RoundingPlan plan = for_head_dim(faultline::plan("fa2"), 64, true);
        plan.set(Site::ds, {.format = format});
        const double most =
            device::largest_of_hidden_pairs(format, plan[Site::dp_accumulate].format, plan[Site::dp_cast].format);
        int zeros = 0, others = 0;
        for (int step = -8; step < 12; ++step) {
            Head head(96, 96, 64, 91, 1, 1.0);
            for (double& x : head.dout.front().values) x = std::copysign(1.0, x);
            for (double& x : head.v.values) x = std::copysign(std::exp2(std::floor(std::log2(most)) - 6 + step / 2), x);
            head.k.values.assign(head.k.values.size(), 0.0);
            const Judged judged = judge(head, plan);
            (judged.zeros ? zeros : others) += 1;
            EXPECT_TRUE(judged.finite || !judged.zeros) << step;
        }
        EXPECT_GT(zeros, 4);
        EXPECT_GT(others, 4);
    }
}

}  // namespace
}  // namespace faultline
