// SPDX-License-Identifier: Apache-2.0
// The tensor-core backward beside kernels/cpu, bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <faultline/agreement/differing.hpp>
#include <faultline/tensor_kernel/backward.hpp>

#include "heads.hpp"

namespace faultline::tensor_kernel {

using agreement::beyond;
using agreement::differing;

inline GroupBackward on_device(const HeadGroup& g, const GroupForward& forward, const RoundingPlan& plan) {
    return attention_backward(std::span<const HeadGroup>(&g, 1), std::span<const GroupForward>(&forward, 1), plan)
        .front();
}

inline void expect_same_gradients(const testing::Head& head, const RoundingPlan& plan) {
    const HeadGroup g = head.group();
    const GroupForward forward = faultline::attention_forward(g, plan);
    const GroupBackward device = on_device(g, forward, plan), cpu = faultline::attention_backward(g, forward, plan);
    EXPECT_EQ(differing(device.dq[0], cpu.dq[0]), 0u) << "dq";
    EXPECT_EQ(differing(device.dk, cpu.dk), 0u) << "dk";
    EXPECT_EQ(differing(device.dv, cpu.dv), 0u) << "dv";
}

}  // namespace faultline::tensor_kernel
