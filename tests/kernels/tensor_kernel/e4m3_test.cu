// SPDX-License-Identifier: Apache-2.0
// The tensor-core forward in e4m3 against kernels/cpu under preset fa3-fp8, bit for bit, and its descale factors.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include <faultline/tensor_kernel/device_memory.cuh>
#include <faultline/tensor_kernel/forward.hpp>

#include "forward_bits.hpp"
#include "heads.hpp"
#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using testing::Head;

TEST(TensorE4m3, HasTheEmulationsBits) {
    NEEDS_HOPPER();
    struct Shape {
        int n_q, n_k;
        bool causal;
        int query_heads = 1;
    };
    for (const int d : {64, 128})
        for (const Shape& s :
             {Shape{128, 128, true}, Shape{301, 301, true}, Shape{515, 515, false}, Shape{1, 700, false},
              Shape{400, 150, true}, Shape{129, 333, true, 4}, Shape{200, 17, false}})
            for (const double logits : {1.0, 20.0}) {
                SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", " << s.n_q << " x " << s.n_k
                                                  << (s.causal ? " causal" : " full") << ", logits " << logits);
                Head head(s.n_q, s.n_k, d, 1 + s.n_q, s.query_heads, logits);
                head.causal = s.causal;
                expect_same_bits(head, forward_plan(Element::e4m3));
            }
}

/// Two heads of keys, one query head each, with factors. The scale that q's and k's make is the plan's; what v's makes of the
/// output before its cast is off by the roundings of factor / row sum and of the product in place of the row sum's reciprocal
/// times it: three of 2^-24 each. With a factor of 2^-1 nothing is rounded.
TEST(TensorE4m3, DescaleFactorsScaleScoresAndOutputs) {
    NEEDS_HOPPER();
    using Byte = __nv_fp8_e4m3;
    constexpr int d = 128, n = 333, heads = 2;
    const RoundingPlan plan = forward_plan(Element::e4m3);
    std::vector<Head> groups;
    std::vector<Byte> q, k, v;
    for (int h = 0; h < heads; ++h) {
        const Head& head = groups.emplace_back(n, n, d, 40 + h, 1, 2.0);
        for (const double x : head.q[0].values) q.push_back(rounded<Byte>(x));
        for (const double x : head.k.values) k.push_back(rounded<Byte>(x));
        for (const double x : head.v.values) v.push_back(rounded<Byte>(x));
    }
    const std::vector<float> q_factor{0.75f, 1.3f}, k_factor{1.0f, 0.7f}, v_factor{0.5f, 0.3f};
    const DeviceMemory<Byte> device_q(q), device_k(k), device_v(v);
    const DeviceMemory<float> device_q_factor(q_factor), device_k_factor(k_factor), device_v_factor(v_factor);
    const DeviceMemory<__nv_bfloat16> o(heads * n * d);
    const DeviceMemory<float> o_unrounded(heads * n * d), lse(heads * n);
    ForwardCall call{.heads = heads,
                     .kv_heads = heads,
                     .n_q = n,
                     .n_k = n,
                     .head_dim = d,
                     .scale = groups.front().scale,
                     .q = device_q.data(),
                     .k = device_k.data(),
                     .v = device_v.data(),
                     .o = o.data(),
                     .o_unrounded = o_unrounded.data(),
                     .lse = lse.data()};
    call.q_strides = call.k_strides = call.v_strides = call.o_strides = contiguous(heads, n, d);
    call.q_descale = device_q_factor.data();
    call.k_descale = device_k_factor.data();
    call.v_descale = device_v_factor.data();
    const ForwardKernel kernel = supported(plan, d, true).kernel;
    EXPECT_THROW(launch_forward(call, kernel), std::invalid_argument);  // no workspace
    const DeviceMemory<unsigned char> workspace(forward_workspace(call, kernel));
    call.workspace = workspace.data();
    launch_forward(call, kernel);
    check(cudaDeviceSynchronize(), "running the forward");
    const std::vector<float> unrounded = o_unrounded.host(), device_lse = lse.host();
    for (int h = 0; h < heads; ++h) {
        Head& head = groups[h];
        head.scale = static_cast<float>(head.scale) * (q_factor[h] * k_factor[h]);
        const HeadForward cpu = faultline::attention_forward(head.group(), plan).heads.front();
        for (int i = 0; i < n; ++i) ASSERT_EQ(device_lse[h * n + i], cpu.lse[i]) << h << ", " << i;
        const double factor = v_factor[h], bound = h == 0 ? 0 : 3.01 * 0x1p-24;
        for (int i = 0; i < n * d; ++i) {
            const double expected = factor * cpu.o_unrounded.values[i];
            ASSERT_LE(std::abs(unrounded[h * n * d + i] - expected), bound * std::abs(expected)) << h << ", " << i;
        }
    }
}

}  // namespace
}  // namespace faultline::tensor_kernel
