// SPDX-License-Identifier: Apache-2.0
// The tensor-core forward beside kernels/cpu, bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <faultline/agreement/differing.hpp>
#include <faultline/tensor_kernel/forward.hpp>

#include "heads.hpp"

namespace faultline::tensor_kernel {

using agreement::differing;

inline GroupForward on_device(const HeadGroup& g, const RoundingPlan& plan, Unit unit = Unit::wgmma) {
    return attention_forward(std::span<const HeadGroup>(&g, 1), plan, unit).front();
}

inline void expect_same_bits(const testing::Head& head, const RoundingPlan& plan, Unit unit = Unit::wgmma) {
    const HeadGroup g = head.group();
    EXPECT_EQ(differing(on_device(g, plan, unit), faultline::attention_forward(g, plan)), 0u);
}

}  // namespace faultline::tensor_kernel
