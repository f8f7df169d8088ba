// SPDX-License-Identifier: Apache-2.0
// The tensor-core forward beside kernels/cpu, bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include <faultline/tensor_kernel/forward.hpp>

#include "heads.hpp"

namespace faultline::tensor_kernel {

/// Elements of o, of o before its cast and of lse whose bits differ (zeros of either sign are equal, and so are two NaN).
inline int differing(const GroupForward& a, const GroupForward& b) {
    const auto differ = [](double x, double y) { return !(x == y || (std::isnan(x) && std::isnan(y))); };
    int count = 0;
    for (std::size_t h = 0; h < a.heads.size(); ++h) {
        const HeadForward &x = a.heads[h], &y = b.heads[h];
        for (std::size_t i = 0; i < x.o.values.size(); ++i)
            count += differ(x.o.values[i], y.o.values[i]) + differ(x.o_unrounded.values[i], y.o_unrounded.values[i]);
        for (std::size_t i = 0; i < x.lse.size(); ++i) count += differ(x.lse[i], y.lse[i]);
    }
    return count;
}

inline GroupForward on_device(const HeadGroup& g, const RoundingPlan& plan, Unit unit = Unit::wgmma) {
    return attention_forward(std::span<const HeadGroup>(&g, 1), plan, unit).front();
}

inline void expect_same_bits(const testing::Head& head, const RoundingPlan& plan, Unit unit = Unit::wgmma) {
    const HeadGroup g = head.group();
    EXPECT_EQ(differing(on_device(g, plan, unit), faultline::attention_forward(g, plan)), 0);
}

}  // namespace faultline::tensor_kernel
