// SPDX-License-Identifier: Apache-2.0
// A streaming state in bf16 or fp16 on the tensor cores: bit for bit what kernels/cpu makes of the plan, site by site.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <string>

#include <faultline/plan/plan_toml.hpp>
#include <faultline/tensor_kernel/backward.hpp>

#include "forward_bits.hpp"
#include "on_hopper.hpp"
#include "paths.hpp"

namespace faultline::tensor_kernel {
namespace {

using testing::Head;

constexpr std::array state_sites{Site::s_cast,    Site::row_max,       Site::row_sum,
                                 Site::o_rescale, Site::pv_accumulate, Site::lse};

/// fa2-unfused in key tiles of block_k; state site i in the format where bit i is set.
RoundingPlan state_plan(unsigned mask, int block_k = 64, const Format& format = bf16) {
    RoundingPlan plan = faultline::plan("fa2-unfused");
    plan.tiles.clear();
    plan.schedule.block_k = block_k;
    for (std::size_t i = 0; i < state_sites.size(); ++i)
        if ((mask >> i & 1) != 0) {
            Rule rule = plan[state_sites[i]];
            rule.format = format;
            plan.set(state_sites[i], rule);
        }
    return plan;
}
constexpr unsigned everything = 63;

/// 0 differing elements in every combination of sites, or what was put in has no effect and the test is void.
TEST(TensorState, HasTheEmulationsBitsForEveryCombinationOfSites) {
    NEEDS_HOPPER();
    for (const double logits : {1.0, 60.0}) {
        const Head head(200, 200, 64, 21, 1, logits);
        const HeadGroup g = head.group();
        const GroupForward control = faultline::attention_forward(g, state_plan(0));
        for (unsigned mask = 0; mask <= everything; ++mask) {
            SCOPED_TRACE(::testing::Message() << "sites " << mask << ", logits of " << logits);
            const GroupForward cpu = faultline::attention_forward(g, state_plan(mask));
            EXPECT_EQ(differing(cpu, control) > 0, mask != 0);
            for (const Unit unit : {Unit::wgmma, Unit::mma})
                EXPECT_EQ(differing(on_device(g, state_plan(mask), unit), cpu), 0u)
                    << (unit == Unit::mma ? "mma" : "wgmma");
        }
    }
}

struct Shape {
    int n_q, n_k;
    bool causal;
    int query_heads = 1;
};
constexpr Shape shapes[] = {{256, 256, true}, {301, 301, true}, {515, 515, false}, {64, 333, true},    {1, 700, false},
                            {400, 150, true}, {1, 1, true},     {200, 17, false},  {129, 129, true, 4}};

TEST(TensorState, HasTheEmulationsBitsForEveryShapeAndTile) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const Shape& s : shapes)
            for (const int block_k : {32, 64, 128}) {
                SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", " << s.n_q << " x " << s.n_k
                                                  << (s.causal ? " causal" : " full") << ", key tiles of " << block_k);
                Head head(s.n_q, s.n_k, d, static_cast<std::uint64_t>(31 + s.n_q), s.query_heads, 4.0);
                head.causal = s.causal;
                const RoundingPlan plan = state_plan(everything, block_k);
                int kernels = 0;
                for (const Unit unit : {Unit::wgmma, Unit::mma})
                    if (supported(plan, d, s.causal, unit)) {
                        ++kernels;
                        expect_same_bits(head, plan, unit);
                    }
                EXPECT_EQ(kernels, d == 64 ? (block_k == 64 ? 2 : 1) : (block_k == 128 ? 0 : 1));
            }
}

TEST(TensorState, HasTheEmulationsBitsInFp16) {
    NEEDS_HOPPER();
    for (const Unit unit : {Unit::wgmma, Unit::mma})
        for (unsigned site = 0; site < state_sites.size(); ++site) {
            SCOPED_TRACE(site);
            expect_same_bits(Head(260, 260, 64, 5, 1, 4.0), state_plan(1U << site, 64, fp16), unit);
        }
    expect_same_bits(Head(260, 260, 64, 5, 1, 4.0), state_plan(everything, 64, fp16));
}

/// As much as a layer of the recipe: 96 heads of 256, 1.6 million elements of o.
TEST(TensorState, HasTheEmulationsBitsOfAWholeLayer) {
    NEEDS_HOPPER();
    std::vector<Head> heads;
    std::vector<HeadGroup> groups;
    heads.reserve(96);
    for (std::uint64_t h = 0; h < 96; ++h) {
        heads.emplace_back(256, 256, 64, 100 + h, 1, std::exp2(static_cast<double>(h % 8)));
        groups.push_back(heads.back().group());
    }
    const RoundingPlan plan = state_plan(everything);
    std::vector<GroupForward> cpu;
    for (const HeadGroup& g : groups) cpu.push_back(faultline::attention_forward(g, plan));
    for (const Unit unit : {Unit::wgmma, Unit::mma}) {
        const std::vector<GroupForward> device = attention_forward(groups, plan, unit);
        std::size_t count = 0;
        for (std::size_t i = 0; i < groups.size(); ++i) count += differing(device[i], cpu[i]);
        EXPECT_EQ(count, 0u) << (unit == Unit::mma ? "mma" : "wgmma");
    }
}

TEST(TensorState, TheBackwardHoldsScoresInBf16) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const double logits : {1.0, 20.0}) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", logits of " << logits);
            RoundingPlan plan = backward_plan(d, Element::bf16, Unit::mma);
            plan.schedule.bwd_argument = ArgumentForm::unfused;
            const Head head(260, 260, d, 7, 1, logits);
            const HeadGroup g = head.group();
            const GroupForward forward = faultline::attention_forward(g, plan);
            const GroupBackward control = faultline::attention_backward(g, forward, plan);
            plan.set(Site::bwd_s_cast, Rule{bf16});
            EXPECT_EQ(supported_backward(plan, d, true).kernel.name, "unfused_bf16_scores");
            const GroupBackward cpu = faultline::attention_backward(g, forward, plan);
            const GroupBackward device =
                attention_backward(std::span(&g, 1), std::span<const GroupForward>(&forward, 1), plan).front();
            EXPECT_NE(cpu.dq[0].values, control.dq[0].values);
            EXPECT_EQ(device.dq[0].values, cpu.dq[0].values);
            EXPECT_EQ(device.dk.values, cpu.dk.values);
            EXPECT_EQ(device.dv.values, cpu.dv.values);
        }
}

TEST(TensorStatePlans, TakesEverySiteAndFormat) {
    const auto kernel = [](unsigned mask, int block_k, const Format& format, int head_dim = 64) {
        const ForwardSupport support = supported(state_plan(mask, block_k, format), head_dim, true);
        EXPECT_EQ(support.why, "");
        EXPECT_EQ(support.kernel.name, "streaming_state");
        EXPECT_EQ(support.kernel.block_k, block_k);
        return support.kernel;
    };
    EXPECT_EQ(kernel(1, 64, bf16).state, (StreamingState{.s = StateFormat::bf16}));
    EXPECT_EQ(kernel(2, 64, bf16).state, (StreamingState{.row_max = StateFormat::bf16}));
    EXPECT_EQ(kernel(4, 64, bf16).state, (StreamingState{.row_sum = StateFormat::bf16}));
    EXPECT_EQ(kernel(8, 64, fp16).state, (StreamingState{.o_rescale = StateFormat::fp16}));
    EXPECT_EQ(kernel(16, 64, bf16).state, (StreamingState{.pv_accumulate = StateFormat::bf16}));
    EXPECT_EQ(kernel(32, 64, bf16).state, (StreamingState{.lse = StateFormat::bf16}));
    EXPECT_EQ(kernel(0, 64, bf16).state, StreamingState{});  // the control has the same tiles
    EXPECT_EQ(kernel(everything, 64, bf16).unit, Unit::wgmma);
    EXPECT_EQ(kernel(everything, 32, bf16).unit, Unit::mma);
    EXPECT_EQ(kernel(everything, 64, bf16, 128).unit, Unit::mma);
    EXPECT_EQ(supported(state_plan(0, 128), 64, true).kernel.name, "unfused");  // the plain kernel has these tiles
}

TEST(TensorStatePlans, SaysWhatItDoesNotHave) {
    EXPECT_EQ(supported(state_plan(everything, 96), 64, true).why,
              "schedule.block_k is 96: the tensor-core forward has 64");
    RoundingPlan toward_zero = state_plan(0);
    toward_zero.set(Site::lse, Rule{bf16, Rounding::toward_zero});
    EXPECT_EQ(supported(toward_zero, 64, true).why, "sites.lse.format is bf16: the tensor-core forward has fp32");
    RoundingPlan fused = state_plan(everything);
    fused.schedule.argument = ArgumentForm::fused;
    EXPECT_EQ(supported(fused, 64, true).why, "schedule.argument is fused: the tensor-core forward has unfused");
}

/// The plans that come with the recipe.
TEST(TensorStatePlans, TakesThePlansOfTheExperiment) {
    int plans = 0;
    for (const auto& file :
         std::filesystem::directory_iterator(test::source_dir() / "experiments/configs/plans/streaming64")) {
        ++plans;
        const std::string name = file.path().stem();
        SCOPED_TRACE(name);
        const RoundingPlan plan = read_plan(file.path());
        const ForwardSupport forward = supported(plan, 64, true);
        EXPECT_EQ(forward.why, "");
        EXPECT_EQ(forward.kernel.block_k, 64);
        EXPECT_EQ(supported_backward(plan, 64, true).why, "");
        const auto says = [&](std::string_view what) { return name.find(what) != std::string::npos; };
        const bool all = says("all");
        const auto held = [&](StateFormat f) { return f == StateFormat::bf16; };
        EXPECT_EQ(held(forward.kernel.state.lse), says("but-lse") ? false : all || says("lse"));
        EXPECT_EQ(held(forward.kernel.state.row_max), says("but-row-max") ? false : all || says("row-max"));
        EXPECT_EQ(held(forward.kernel.state.row_sum), says("but-row-sum") ? false : all || says("row-sum"));
        EXPECT_EQ(supported_backward(plan, 64, true).kernel.variant.bf16_scores, says("s-backward") || says("both"));
    }
    EXPECT_GE(plans, 22);
}

}  // namespace
}  // namespace faultline::tensor_kernel
