// SPDX-License-Identifier: Apache-2.0
// The memory of a run on the device, and what is refused before there is one.
#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/gpt_device/memory_plan.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>

namespace faultline::gpt {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TrainConfig gpt2() {
    TrainConfig c;
    c.model = {.layers = 12, .width = 768, .heads = 12, .context = 1024, .vocabulary = 50304, .bias = true};
    c.batch = 32;
    return c;
}

TEST(MemoryPlan, RegionsFollowEachOtherAligned) {
    MemoryPlan plan;
    const std::size_t a = plan.add("one", "a", 1), b = plan.add("two", "b", 257), c = plan.add("one", "c", 256);
    EXPECT_EQ(plan[a].offset, 0U);
    EXPECT_EQ(plan[b].offset, 256U);
    EXPECT_EQ(plan[c].offset, 768U);
    EXPECT_EQ(plan.bytes(), 1024U);
    EXPECT_EQ(plan.text(), "0.00 GiB: one 0.00, two 0.00");
}

TEST(MemoryPlan, ResultAndTotalsComeInOneCopy) {
    const TrainConfig c = gpt2();
    const RunMemory memory(c, ParameterLayout(c.model), {.parts = {1, 1, 1, 1}, .monitors = true});
    const MemoryRegion &result = memory.plan[memory.result], &totals = memory.plan[memory.totals];
    EXPECT_EQ(totals.offset, result.offset + 256);
    EXPECT_EQ(totals.bytes, 12U * 12U * 7U * sizeof(double));
    EXPECT_EQ(memory.result_bytes(), 256 + totals.bytes);
    const RunMemory without(c, ParameterLayout(c.model), {.parts = {}});
    EXPECT_LE(without.result_bytes(), 256U);
}

/// By hand: of 124,475,904 parameters, 32768 tokens, width 768.
TEST(MemoryPlan, OfGpt2IsTheSumOfItsTensors) {
    const TrainConfig c = gpt2();
    const ParameterLayout layout(c.model);
    ASSERT_EQ(layout.size(), 124475904);
    const RunMemory memory(c, layout, {.attention_scratch = 1000, .parts = {}});
    const std::size_t tokens = 32768, width = 768, parameters = 124475904;
    // Residual streams before and between the branches in fp32; h twice, q, k, v, o, u and a (3 + 1 + 4 + 4 widths) in bf16;
    // statistics of two norms, lse of 12 heads.
    const std::size_t layer = tokens * width * (2 * 4 + (2 + 3 + 1 + 4 + 4) * 2) + tokens * (2 * 2 + 12) * 4;
    const std::size_t last = tokens * width * (4 + 2) + tokens * 2 * 4;
    // fp32 weights, moments, gradient; bf16 operands; a byte for eight parameters.
    const std::size_t state = parameters * (4 + 4 + 4 + 4 + 2) + parameters / 8;
    const std::size_t logits = 8192U * 50304U * 2;
    const std::size_t scratch_of_rows = tokens * width * (4 + 2 + 2 + 8 + 6 + 2);
    const std::size_t least = 12 * layer + last + state + logits + scratch_of_rows;
    EXPECT_GE(memory.plan.bytes(), least);
    // Products 64 MiB, partial sums of a layer 19 MiB, delta, input and losses 2.5 MiB.
    EXPECT_LE(memory.plan.bytes(), least + (std::size_t{90} << 20));
    EXPECT_LT(memory.plan.bytes(), std::size_t{15} << 30);
}

// Ranks with a micro-batch each that gather need no more than a run of one; others have a second gradient to add to.
TEST(MemoryPlan, AMicroBatchARankHasOneGradient) {
    TrainConfig c = gpt2();
    const ParameterLayout layout(c.model);
    const RunMemory one(c, layout, {.parts = {}});
    c.accumulate = 2;
    const RunMemory two(c, layout, {.parts = {}}), gathered(c, layout, {.parts = {}, .one_gradient = true});
    EXPECT_EQ(gathered.micro_gradient, gathered.gradient);
    EXPECT_EQ(gathered.plan.bytes(), one.plan.bytes());
    EXPECT_EQ(two.plan.bytes() - one.plan.bytes(), 4 * static_cast<std::size_t>(layout.size()));
}

TEST(MemoryPlan, HeadsPiecesAreWholeSequencesOfOneSize) {
    TrainConfig c = gpt2();
    EXPECT_EQ(head_tokens(c), 8192);
    c.batch = 7;
    EXPECT_EQ(head_tokens(c), 7 * 1024);
    c.batch = 13;
    EXPECT_EQ(head_tokens(c), 1024);
    c.batch = 18;
    EXPECT_EQ(head_tokens(c), 6 * 1024);
    c.batch = 1;
    c.model.context = 10000;
    EXPECT_EQ(head_tokens(c), 10000);
}

TEST(DeviceRefusal, NamesWhatTheDeviceHasNot) {
    EXPECT_EQ(refusal(gpt2()), "");
    const auto why = [](auto change) {
        TrainConfig c = gpt2();
        change(c);
        return refusal(c);
    };
    EXPECT_THAT(why([](TrainConfig& c) { c.model.sigma_reparam = true; }), HasSubstr("sigma-reparam"));
    EXPECT_THAT(why([](TrainConfig& c) { c.model.layers = 513; }), HasSubstr("layers: 513"));
    EXPECT_THAT(why([](TrainConfig& c) { c.model.width = 4096; }), HasSubstr("width: 4096"));
    EXPECT_THAT(why([](TrainConfig& c) { c.model.heads = 64; }), HasSubstr("heads: 64"));
    EXPECT_THAT(why([](TrainConfig& c) { c.model.heads = 4; }), HasSubstr("heads: 4"));
    EXPECT_THAT(why([](TrainConfig& c) { c.model.vocabulary = 50257; }), HasSubstr("vocab: 50257"));
}

TEST(DeviceRefusal, ABuildWithoutTheDeviceSaysSo) {
    if (device_trainer_is_built()) GTEST_SKIP() << "this build has it";
    const TokenData data = tokens_of_text("a text");
    const WindowOrder order(0);
    try {
        DeviceTrainer trainer({}, data, order);
        FAIL();
    } catch (const WorkError& e) {
        EXPECT_THAT(e.what(), StartsWith("device cuda: this build has no device back end"));
    }
}

}  // namespace
}  // namespace faultline::gpt
