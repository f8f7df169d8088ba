// SPDX-License-Identifier: Apache-2.0
// Attention of the device's trainer where it is emulated: sequences and instruments in their places, on the CPU; the trainer
// against the CPU's with the same plan, on a card.
#include <faultline/gpt_device/emulated_attention.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include <faultline/plan/presets.hpp>

#include "../../kernels/tensor_kernel/on_hopper.hpp"
#include "planted_runs.hpp"
#include "small_runs.hpp"

namespace faultline::gpt {
namespace {

using testing::HasSubstr;

/// Two layers, an odd context, two micro-batches, in fp32, under the trainer's own kernel as a plan, which is then emulated: few
/// roundings lie between the two trainers.
TrainConfig emulated() {
    TrainConfig c = small_with_faults(false);
    c.model.attention = {{-1, {}, std::make_shared<RoundingPlan>(fast_plan(false))}};
    return c;
}

std::vector<float> waves(std::size_t n, double frequency) {
    std::vector<float> x(n);
    for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>(std::sin(frequency * static_cast<double>(i + 1)));
    return x;
}

/// Sequence by sequence on several threads it is attention_layer_forward and _backward of all of them, with the faults of each
/// head of each sequence, which draw by their places, and what was seen in the order of HeadParts.
TEST(EmulatedAttention, OfSequencesBesideEachOtherIsTheLayers) {
    const TrainConfig c = emulated();
    const ModelConfig& m = c.model;
    constexpr int sequences = 3, layer = 1;
    const std::ptrdiff_t rows = std::ptrdiff_t{sequences} * m.context, width = m.width;
    const auto count = static_cast<std::size_t>(rows * width);
    const EmulatedAttention::Operands in{waves(count, 0.37), waves(count, 0.91), waves(count, 1.3)};
    const std::vector<float> dout = waves(count, 0.053);
    const std::vector<double> scale{0.3, 0.2};
    Faults one(c, {"row_sum:multiplicative:-0.1", "ds:random:0.2"}),
        other(c, {"row_sum:multiplicative:-0.1", "ds:random:0.2"});

    EmulatedAttention by(m, sequences, &cpu_backend());
    by.begin(5, 1, one.hooks.in_emulated_attention());
    const std::vector<float> o = by.forward(layer, in, scale, true, true);
    const EmulatedAttention::Gradients gradients = by.backward(layer, in, scale, dout, true, true);
    const EmulatedAttention::Seen seen = by.seen(layer);

    StepContext context;
    context.step = 5;
    context.micro_step = 1;
    context.attention = &other.hooks;
    context.detailed = true;
    AttentionState<float> state;
    FastScratch<float> scratch;
    const LayerAt at{layer, 0, sequences, m.context};
    const auto view = [&](const std::vector<float>& x) { return MatrixView<const float>(x.data(), rows, width); };
    std::vector<float> whole(count), dq(count), dk(count), dv(count);
    const auto to = [&](std::vector<float>& x) { return MatrixView<float>(x.data(), rows, width); };
    attention_layer_forward<float>(m, context, at, view(in.q), view(in.k), view(in.v), scale, to(whole), state,
                                   scratch);
    attention_layer_backward<float>(m, context, at, view(in.q), view(in.k), view(in.v), view(whole), view(dout), scale,
                                    to(dq), to(dk), to(dv), state, scratch);
    EXPECT_EQ(o, whole);
    EXPECT_EQ(gradients.q, dq);
    EXPECT_EQ(gradients.k, dk);
    EXPECT_EQ(gradients.v, dv);
    ASSERT_EQ(seen.largest.size(), state.heads.size());
    ASSERT_EQ(seen.rows.size(), 2 * state.heads.size());
    for (std::size_t h = 0; h < state.heads.size(); ++h) {
        EXPECT_EQ(seen.largest[h], static_cast<float>(state.heads[h].max_logit));
        EXPECT_EQ(seen.zero_sums[2 * h], state.heads[h].zero_sum);
        EXPECT_EQ(seen.zero_sums[2 * h + 1], state.heads[h].zero_sum_abs);
        EXPECT_EQ(seen.rows[2 * h], state.heads[h].saturated);
        EXPECT_EQ(seen.rows[2 * h + 1], state.heads[h].entropy);
    }
    const FaultHooks::Step did = one.hooks.take_step(), wanted = other.hooks.take_step();
    for (std::size_t h = 0; h < did.realised.size(); ++h) {
        EXPECT_EQ(did.realised[h].count, wanted.realised[h].count);
        EXPECT_EQ(did.realised[h].sum_squared, wanted.realised[h].sum_squared);
    }
    EXPECT_GT(did.realised[2].sum_squared, 0);
    // Where no instrument is asked for none is there.
    EXPECT_NE(by.forward(layer, in, scale, false, false), o);
    EXPECT_TRUE(by.seen(layer).rows.empty());
    (void)by.backward(layer, in, scale, dout, false, false);
    EXPECT_EQ(by.seen(layer).zero_sums, std::vector<double>(2 * state.heads.size(), 0.0));
}

/// Losses, what monitors see, and what faults inside the kernel did, over 20 steps: as runs without (device_trainer_test.cpp,
/// device_faults_test.cpp) in fp32.
TEST(EmulatedAttention, RunsGoTheCpusWay) {
    NEEDS_HOPPER();
    TrainConfig c = emulated();
    c.monitor_every = 5;
    c.validate_every = 20;
    c.validation_batches = 1;
    for (const std::vector<std::string>& words : {std::vector<std::string>{},
                                                  {"row_sum:multiplicative:-0.1", "ffn_output:fixed:1%:from=4"},
                                                  {"delta:multiplicative:0.2:from=3", "ds:fixed:0.05:layers=1"}}) {
        SCOPED_TRACE(testing::PrintToString(words));
        const WindowOrder order(1);
        Faults of_cpu(c, words), of_device(c, words);
        Trainer cpu(c, text(), order, of_cpu.on_cpu());
        DeviceTrainer device(c, text(), order, {.faults = &of_device.hooks});
        EXPECT_THAT(device.description().front(), HasSubstr("emulated (the tensor cores' kernel has bf16 operands)"));
        for (int step = 0; step < c.steps; ++step) {
            const StepReport &a = device.step(), &b = cpu.step();
            ASSERT_NEAR(a.loss, b.loss, 1e-5) << step;
            for (std::size_t h = 0; h < b.max_logit.size(); ++h) {
                EXPECT_NEAR(a.max_logit[h], b.max_logit[h], 1e-3 * std::abs(b.max_logit[h])) << step;
                EXPECT_NEAR(a.zero_sum_abs[h], b.zero_sum_abs[h], 1e-3 * b.zero_sum_abs[h]) << step;
                EXPECT_NEAR(a.qk_rms[h], b.qk_rms[h], 1e-3 * b.qk_rms[h]) << step;
                EXPECT_EQ(std::isnan(a.entropy[h]), std::isnan(b.entropy[h])) << step;
                if (!std::isnan(b.entropy[h])) {
                    EXPECT_NEAR(a.entropy[h], b.entropy[h], 1e-3 * b.entropy[h]) << step;
                }
            }
            if (step + 1 == c.steps) {
                EXPECT_NEAR(a.validation_loss, b.validation_loss, 1e-5);
            }
            const FaultHooks::Step did = of_device.hooks.take_step(), wanted = of_cpu.hooks.take_step();
            for (std::size_t h = 0; h < wanted.realised.size(); ++h) {
                EXPECT_EQ(did.realised[h].count, wanted.realised[h].count) << step;
                EXPECT_NEAR(did.realised[h].relative_rms(), wanted.realised[h].relative_rms(), 1e-3) << step;
            }
        }
    }
}

}  // namespace
}  // namespace faultline::gpt
