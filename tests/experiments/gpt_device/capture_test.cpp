// SPDX-License-Identifier: Apache-2.0
// What a capture on the device holds, against the CPU's of the same step, and that capturing changes nothing.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <map>

#include "../../kernels/tensor_kernel/on_hopper.hpp"
#include "small_runs.hpp"

namespace faultline::gpt {
namespace {

using Layers = std::map<std::pair<std::int64_t, int>, Training::Captured>;

Layers captured(Training& trainer, std::int64_t step) {
    Layers all;
    trainer.capture([step](std::int64_t s) { return s == step; },
                    [&](std::int64_t s, int m, const Training::Captured& layers) {
                        all[{s, m}] = layers;
                    });
    for (std::int64_t s = 0; s <= step; ++s) trainer.step();
    return all;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
    EXPECT_EQ(a.size(), b.size());
    double squares = 0, norm = 0;
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
        squares += d * d;
        norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
    }
    return std::sqrt(squares / norm);
}

/// In fp32 at the start every tensor is the CPU's to its roundings: sums of up to width or context products in another order,
/// through two layers and back, each some sqrt(n) 2^-24 of the tensor; 2^-16 is 64 times the largest of them.
TEST(DeviceCapture, IsTheCpus) {
    NEEDS_HOPPER();
    for (const QkNorm norm : {QkNorm::none, QkNorm::parameter_free}) {
        TrainConfig c = small();
        c.accumulate = 2;
        c.steps = 2;
        c.model.qk_norm = norm;
        const WindowOrder order(c.seed);
        Trainer cpu(c, text(), order);
        DeviceTrainer device(c, text(), order), plain(c, text(), order);
        const Layers of_cpu = captured(cpu, 1), of_device = captured(device, 1);
        ASSERT_EQ(of_device.size(), 2U);
        for (const auto& [at, layers] : of_cpu) {
            const Training::Captured& same = of_device.at(at);
            ASSERT_EQ(same.size(), layers.size());
            for (std::size_t l = 0; l < layers.size(); ++l) {
                SCOPED_TRACE(l);
                EXPECT_LE(distance(same[l].q, layers[l].q), 0x1p-16);
                EXPECT_LE(distance(same[l].k, layers[l].k), 0x1p-16);
                EXPECT_LE(distance(same[l].v, layers[l].v), 0x1p-16);
                EXPECT_LE(distance(same[l].dout, layers[l].dout), 0x1p-16);
                EXPECT_LE(distance(same[l].x, layers[l].x), 0x1p-16);
            }
        }
        plain.step();
        plain.step();
        EXPECT_EQ(device.weights(), plain.weights());
    }
}

/// bf16 values, and what the tensor cores' kernel gets.
TEST(DeviceCapture, HoldsBf16OfTheTensorCores) {
    NEEDS_HOPPER();
    TrainConfig c = small();
    c.model = {.layers = 2, .width = 128, .heads = 2, .context = 200, .vocabulary = 256, .bias = true};
    c = with_tensor_kernel(c);
    c.steps = 1;
    const WindowOrder order(c.seed);
    Trainer cpu(c, text(), order);
    DeviceTrainer device(c, text(), order);
    const Layers of_cpu = captured(cpu, 0), of_device = captured(device, 0);
    const Training::Captured &a = of_device.at({0, 0}), &b = of_cpu.at({0, 0});
    for (std::size_t l = 0; l < a.size(); ++l)
        for (const auto part : {&Gpt<float>::Operands::q, &Gpt<float>::Operands::k, &Gpt<float>::Operands::v,
                                &Gpt<float>::Operands::dout, &Gpt<float>::Operands::x}) {
            for (const float x : a[l].*part) ASSERT_EQ(std::bit_cast<std::uint32_t>(x) & 0xffffU, 0U);
            // Two draws of at most 16 casts one after the other, each off by 2^-9.
            EXPECT_LE(distance(a[l].*part, b[l].*part), 0x1p-4);
        }
}

}  // namespace
}  // namespace faultline::gpt
