// SPDX-License-Identifier: Apache-2.0
// The tensor-core backward against kernels/cpu under the same plan, bit for bit, and against the gradients in binary64 with a
// bound derived from the plan's roundings. On a card; the rest is what plans it takes.
#include <gtest/gtest.h>

#include <cmath>

#include <faultline/agreement/backward_bound.hpp>
#include <faultline/base/error.hpp>
#include <faultline/tensor_kernel/backward_workspace.hpp>

#include "backward_bits.hpp"
#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using testing::Head;

struct Shape {
    int n_q, n_k;
    bool causal;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
    return out << s.n_q << " x " << s.n_k << (s.causal ? " causal" : " full");
}
constexpr Shape shapes[] = {{128, 128, true}, {384, 384, true}, {301, 301, true}, {260, 515, false}, {64, 333, true},
                            {1, 300, false},  {400, 150, true}, {1, 1, true},     {200, 17, false}};

TEST(TensorBackward, HasTheEmulationsBitsForEveryShape) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const Shape& s : shapes) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", " << s);
            Head head(s.n_q, s.n_k, d, static_cast<std::uint64_t>(1 + s.n_q), 1, 2.0);
            head.causal = s.causal;
            expect_same_gradients(head, backward_plan(d));
        }
}

std::vector<RoundingPlan> plans_of_every_variant(int d) {
    RoundingPlan unfused = backward_plan(d);
    unfused.schedule.bwd_argument = ArgumentForm::unfused;
    RoundingPlan scaled = backward_plan(d);
    scaled.schedule.ds_scale = DsScale::before;
    RoundingPlan rounded = backward_plan(d);
    rounded.schedule.functions = Functions::correctly_rounded;
    RoundingPlan cudnn = rounded;
    cudnn.schedule.bwd_exp_base = ExpBase::e;
    cudnn.set(Site::lse_scale, Rule{});  // lse in natural units, as it is stored
    cudnn.schedule.ds_scale = DsScale::before;
    cudnn.schedule.delta_order = DeltaOrder::octet_pairs;
    RoundingPlan unrounded_o = backward_plan(d);
    unrounded_o.schedule.delta_from = DeltaFrom::o_unrounded;
    return {backward_plan(d), unfused, scaled, rounded, cudnn, unrounded_o};
}

TEST(TensorBackward, HasTheEmulationsBitsForEveryVariant) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const double logits : {1.0, 20.0})
            for (const RoundingPlan& plan : plans_of_every_variant(d)) {
                SCOPED_TRACE(::testing::Message()
                             << "head_dim " << d << ", " << supported_backward(plan, d, true).kernel.name
                             << (plan.schedule.delta_from == DeltaFrom::o ? "" : ", delta of the unrounded o")
                             << ", logits of " << logits);
                expect_same_gradients(Head(260, 260, d, 7, 1, logits), plan);
            }
}

TEST(TensorBackward, HasTheEmulationsBitsInFp16) {
    NEEDS_HOPPER();
    for (const int d : {64, 128}) {
        SCOPED_TRACE(d);
        expect_same_gradients(Head(333, 333, d, 11, 1, 2.0), backward_plan(d, Element::fp16));
    }
}

TEST(TensorBackward, HasTheEmulationsBitsByMma) {
    NEEDS_HOPPER();  // whose mma lib/tensor_core has been checked for
    for (const int d : {64, 128}) {
        for (const Shape& s : shapes) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", " << s);
            Head head(s.n_q, s.n_k, d, static_cast<std::uint64_t>(1 + s.n_q), 1, 2.0);
            head.causal = s.causal;
            expect_same_gradients(head, backward_plan(d, Element::bf16, Unit::mma));
        }
        SCOPED_TRACE(d);
        RoundingPlan unfused = backward_plan(d, Element::bf16, Unit::mma);
        unfused.schedule.bwd_argument = ArgumentForm::unfused;
        expect_same_gradients(Head(260, 260, d, 7, 1, 20.0), unfused);
        expect_same_gradients(Head(260, 260, d, 7, 1, 2.0), backward_plan(d, Element::fp16, Unit::mma));
    }
}

/// Several groups in one call are each what they are alone.
TEST(TensorBackward, GroupsDoNotMix) {
    NEEDS_HOPPER();
    const Head a(200, 200, 64, 3, 2), b(200, 200, 64, 4, 2);
    const RoundingPlan plan = backward_plan(64);
    const std::vector<HeadGroup> groups{a.group(), b.group()};
    const std::vector<GroupForward> forwards{faultline::attention_forward(groups[0], plan),
                                             faultline::attention_forward(groups[1], plan)};
    const std::vector<GroupBackward> together = attention_backward(groups, forwards, plan);
    for (std::size_t g = 0; g < 2; ++g) {
        const GroupBackward alone = on_device(groups[g], forwards[g], plan);
        EXPECT_EQ(differing(together[g].dq[1], alone.dq[1]), 0u);
        EXPECT_EQ(differing(together[g].dk, alone.dk), 0u);
        EXPECT_EQ(differing(together[g].dv, alone.dv), 0u);
    }
}

TEST(TensorBackward, IsWithinThePlansRoundingsOfTheGradients) {
    NEEDS_HOPPER();
    struct Case {
        Shape shape;
        int query_heads;
        double logits;
    };
    constexpr Case cases[] = {{{513, 513, true}, 1, 2.0},
                              {{200, 300, true}, 4, 1.0},
                              {{150, 140, false}, 3, 2.0},
                              {{300, 300, true}, 2, 30.0}};
    for (const int d : {64, 128})
        for (const Case& c : cases) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", " << c.shape << ", " << c.query_heads
                                              << " query heads, logits of " << c.logits);
            Head head(c.shape.n_q, c.shape.n_k, d, 5, c.query_heads, c.logits);
            head.causal = c.shape.causal;
            const HeadGroup g = head.group();
            const Bounded truth(g);
            for (const Unit unit : {Unit::wgmma, Unit::mma}) {
                const RoundingPlan plan = backward_plan(d, Element::bf16, unit);
                const GroupBackward out = on_device(g, faultline::attention_forward(g, plan), plan);
                for (std::size_t h = 0; h < g.q.size(); ++h)
                    EXPECT_EQ(beyond(out.dq[h], truth.dq[h], truth.dq_bound[h]), 0u) << "dq of head " << h;
                EXPECT_EQ(beyond(out.dk, truth.dk, truth.dk_bound), 0u) << "dk";
                EXPECT_EQ(beyond(out.dv, truth.dv, truth.dv_bound), 0u) << "dv";
            }
        }
}

/// Delta of P and dP has a smaller error than that of the stored O, which the bound is for.
TEST(TensorBackward, DeltaOfPAndDpIsWithinThePlansRoundings) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const DeltaFrom from : {DeltaFrom::p_dp, DeltaFrom::p_dp_normalized}) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", normalized " << (from != DeltaFrom::p_dp));
            const Head head(300, 333, d, 6, 2, 3.0);
            const HeadGroup g = head.group();
            RoundingPlan plan = backward_plan(d);
            plan.schedule.delta_from = from;
            const GroupBackward out = on_device(g, faultline::attention_forward(g, plan), plan);
            const Bounded truth(g);
            for (std::size_t h = 0; h < g.q.size(); ++h)
                EXPECT_EQ(beyond(out.dq[h], truth.dq[h], truth.dq_bound[h]), 0u) << "dq of head " << h;
            EXPECT_EQ(beyond(out.dk, truth.dk, truth.dk_bound), 0u) << "dk";
            EXPECT_EQ(beyond(out.dv, truth.dv, truth.dv_bound), 0u) << "dv";
        }
}

/// Keys with a large mean, along which a row of ds that does not sum to zero puts its error: the projection takes nearly all of
/// it away, and what it leaves is what the emulation's leaves.
TEST(TensorBackward, ProjectsAsTheEmulationDoes) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const bool causal : {true, false}) {
            Head head(280, 300, d, 8, 1, 2.0);
            head.causal = causal;
            for (std::ptrdiff_t j = 0; j < head.k.rows; ++j)
                for (std::ptrdiff_t c = 0; c < d; c += 4) head.k(j, c) += 8;  // of bf16 still: sums of few bits
            for (double& x : head.k.values) x = round(x, bf16, Rounding::nearest_even);
            const HeadGroup g = head.group();
            const auto error = [&](const GroupBackward& out, const Bounded& truth) {
                double sum = 0;
                for (std::size_t i = 0; i < truth.dq[0].values.size(); ++i)
                    sum += std::pow(out.dq[0].values[i] - truth.dq[0].values[i], 2);
                return std::sqrt(sum);
            };
            const RoundingPlan plain = backward_plan(d);
            const GroupForward forward = faultline::attention_forward(g, plain);
            const double unprojected = error(on_device(g, forward, plain), Bounded(g));
            for (const ZeroSum kind : {ZeroSum::weighted, ZeroSum::uniform, ZeroSum::largest}) {
                SCOPED_TRACE(::testing::Message() << "head_dim " << d << (causal ? " causal" : " full")
                                                  << ", projection " << static_cast<int>(kind));
                RoundingPlan plan = plain;
                plan.schedule.zero_sum = kind;
                const GroupBackward out = on_device(g, forward, plan);
                const GroupBackward cpu = faultline::attention_backward(g, forward, plan);
                const Bounded truth(g, kind);
                const auto apart = [](const Matrix& a, const Matrix& b, const Matrix& bound) {
                    int count = 0;
                    for (std::size_t i = 0; i < a.values.size(); ++i) {
                        const double casts = 0x1p-8 * (std::abs(a.values[i]) + std::abs(b.values[i]));
                        count += !(std::abs(a.values[i] - b.values[i]) <= casts + bound.values[i]);
                    }
                    return count;
                };
                EXPECT_EQ(apart(out.dq[0], cpu.dq[0], truth.dq_apart[0]), 0) << "dq";
                EXPECT_EQ(apart(out.dk, cpu.dk, truth.dk_apart), 0) << "dk";
                EXPECT_EQ(differing(out.dv, cpu.dv), 0u) << "dv";
                EXPECT_LT(error(out, truth), unprojected / 2) << "the projection has an effect";
            }
        }
}

TEST(TensorBackwardPlans, TakesFa3AndEveryVariant) {
    std::vector<std::string> names;
    for (const RoundingPlan& plan : plans_of_every_variant(128)) {
        const BackwardSupport support = supported_backward(plan, 128, false);
        EXPECT_EQ(support.why, "");
        names.push_back(support.kernel.name);
        EXPECT_EQ(support.kernel.delta_from, plan.schedule.delta_from);
    }
    EXPECT_EQ(names, (std::vector<std::string>{"fused", "unfused", "scaled_before_cast", "correctly_rounded",
                                               "cudnn_like", "fused"}));
    for (const bool causal : {false, true})
        for (const int d : {64, 128}) EXPECT_EQ(supported_backward(plan("fa3"), d, causal).why, "");
    EXPECT_EQ(supported_backward(plan("cudnn-like"), 128, true).kernel.name, "cudnn_like");
    RoundingPlan repaired = backward_plan(128);
    repaired.schedule.zero_sum = ZeroSum::weighted;
    repaired.schedule.delta_from = DeltaFrom::p_dp;
    EXPECT_EQ(supported_backward(repaired, 128, true).kernel.name, "projected");
    EXPECT_EQ(supported_backward(backward_plan(64, Element::fp16), 64, true).kernel.element, Element::fp16);
    EXPECT_EQ(supported_backward(plan("fa2"), 128, true).kernel.unit, Unit::mma);
    EXPECT_EQ(supported_backward(plan("fa2-unfused"), 128, false).kernel.name, "unfused");
    EXPECT_EQ(supported_backward(backward_plan(64, Element::fp16, Unit::mma), 64, true).kernel.unit, Unit::mma);
}

TEST(TensorBackwardPlans, TakesInputsInE4m3) {
    for (const int d : {64, 128}) {
        const BackwardSupport preset = supported_backward(plan("fa3-fp8"), d, true);
        EXPECT_EQ(preset.why, "");
        EXPECT_EQ(preset.kernel.element, Element::e4m3);
        EXPECT_EQ(preset.kernel.name, "fused");
        RoundingPlan repaired = backward_plan(d, Element::e4m3);
        repaired.schedule.zero_sum = ZeroSum::weighted;
        EXPECT_EQ(supported_backward(repaired, d, true).kernel.name, "projected");
    }
    RoundingPlan other = backward_plan(128, Element::e4m3);
    other.set(Site::v_cast, Rule{bf16});
    EXPECT_EQ(supported_backward(other, 128, true).why,
              "sites.v_cast.format is bf16: the tensor-core backward has e4m3");
    other = backward_plan(128, Element::e4m3);
    other.set(Site::do_cast, Rule{e4m3});
    EXPECT_EQ(supported_backward(other, 128, true).why,
              "sites.do_cast.format is e4m3: the tensor-core backward has bf16");
    other = backward_plan(128, Element::bf16, Unit::mma);
    other.set(Site::q_cast, Rule{e4m3});
    EXPECT_EQ(supported_backward(other, 128, true).kernel.unit, Unit::wgmma);
    EXPECT_NE(supported_backward(other, 128, true).why, "");
}

TEST(TensorBackwardCalls, AreRefusedWhereTheKernelHasNotWhatTheyAsk) {
    const float factor = 2;
    char memory[128];
    BackwardCall call;
    call.heads = call.kv_heads = 2;
    call.n_q = call.n_k = call.head_dim = 64;
    call.scale = 0.125;
    call.o = call.workspace = memory;
    call.q_strides = call.k_strides = call.v_strides = contiguous(2, 64, 64);
    const BackwardKernel by_bf16 = supported_backward(backward_plan(64), 64, true).kernel,
                         by_e4m3 = supported_backward(backward_plan(64, Element::e4m3), 64, true).kernel;
    expect_backward(call, by_bf16);
    expect_backward(call, by_e4m3);
    for (const float* BackwardCall::*descale :
         {&BackwardCall::q_descale, &BackwardCall::k_descale, &BackwardCall::v_descale}) {
        BackwardCall scaled = call;
        scaled.*descale = &factor;
        expect_backward(scaled, by_e4m3);
        EXPECT_THROW(expect_backward(scaled, by_bf16), std::invalid_argument);
        BackwardKernel other = by_e4m3;
        other.variant = Unfused::value;
        EXPECT_THROW(expect_backward(scaled, other), std::invalid_argument);
        other = by_e4m3;
        other.delta_from = DeltaFrom::p_dp;
        EXPECT_THROW(expect_backward(scaled, other), std::invalid_argument);
    }
    call.k_strides.row = 72;  // of bytes: no bulk read of 16
    expect_backward(call, by_bf16);
    EXPECT_THROW(expect_backward(call, by_e4m3), std::invalid_argument);
}

/// q, k and v in bf16 stand behind what the backward in bf16 needs.
TEST(TensorBackwardCalls, InE4m3NeedRoomForTheirInputs) {
    BackwardCall call;
    call.batch = call.kv_heads = 2;
    call.heads = 4;
    call.n_q = 100;
    call.n_k = 70;
    call.head_dim = 128;
    const std::size_t inputs = sizeof(std::uint16_t) * 2 * 128 * (4 * 100 + 2 * 2 * 70),
                      more = backward_workspace(call, Element::e4m3) - backward_workspace(call);
    EXPECT_GE(more, inputs);
    EXPECT_LE(more, inputs + 3 * 127);
}

TEST(TensorBackwardPlans, SaysWhatItDoesNotHave) {
    EXPECT_EQ(supported_backward(plan("fa3"), 96, true).why, "head_dim is 96: expected 64 or 128");
    RoundingPlan other = backward_plan(128);
    other.schedule.bwd_argument = ArgumentForm::unfused;
    other.schedule.zero_sum = ZeroSum::weighted;
    EXPECT_EQ(supported_backward(other, 128, true).why,
              "schedule.zero_sum is weighted: the tensor-core backward has none");
    other = backward_plan(128);
    other.schedule.bwd_block_k = 64;
    EXPECT_EQ(supported_backward(other, 128, true).why, "schedule.bwd_block_k is 64: the tensor-core backward has 128");
    other = backward_plan(128);
    other.schedule.bwd_block_q = 72;
    EXPECT_FALSE(supported_backward(other, 128, true));
    other = backward_plan(128);
    other.set(Site::ds_cast, Rule{tf32});
    EXPECT_EQ(supported_backward(other, 128, true).why,
              "sites.ds_cast.format is tf32: the tensor-core backward has bf16");
}

TEST(TensorBackwardPlans, TheForwardsRulesAndTheQueryTileDoNotMatter) {
    RoundingPlan other = backward_plan(128);
    other.set(Site::p_cast, Rule{});
    other.schedule.max_policy = MaxPolicy::stable;
    other.schedule.bwd_block_q = 80;
    EXPECT_EQ(supported_backward(other, 128, true).why, "");
}

TEST(TensorBackwardPlans, ABuildOrMachineWithoutHopperSaysSo) {
    if (has_hopper()) GTEST_SKIP() << "there is one";
    const Head head(8, 8, 64, 1);
    const HeadGroup g = head.group();
    const RoundingPlan plan = backward_plan(64);
    try {
        on_device(g, faultline::attention_forward(g, plan), plan);
        FAIL();
    } catch (const WorkError& e) {
        EXPECT_EQ(std::string(e.what()).rfind("device cuda: ", 0), 0) << e.what();
    }
}

}  // namespace
}  // namespace faultline::tensor_kernel
