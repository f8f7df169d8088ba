// SPDX-License-Identifier: Apache-2.0
// The tensor-core forward against kernels/cpu under the same plan, bit for bit, and against attention in binary64 with a
// bound derived from the plan's roundings. On a card; the rest is what plans it takes.
#include <gtest/gtest.h>

#include <cmath>

#include <faultline/base/error.hpp>
#include <faultline/tensor_kernel/forward.hpp>

#include "forward_bits.hpp"
#include "heads.hpp"
#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using testing::Head;

struct Shape {
    int n_q, n_k;
    bool causal;
    int query_heads = 1;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
    return out << s.n_q << " x " << s.n_k << (s.causal ? " causal" : " full") << ", " << s.query_heads
               << " query heads";
}
constexpr Shape shapes[] = {{128, 128, true}, {384, 384, true}, {301, 301, true},   {515, 515, false},
                            {64, 333, true},  {1, 700, false},  {400, 150, true},   {129, 129, true, 4},
                            {1, 1, true},     {200, 17, false}, {700, 700, true, 2}};

TEST(TensorForward, HasTheEmulationsBitsForEveryShape) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const Shape& s : shapes) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", " << s);
            Head head(s.n_q, s.n_k, d, 1 + s.n_q, s.query_heads, 2.0);
            head.causal = s.causal;
            expect_same_bits(head, forward_plan());
            expect_same_bits(head, forward_plan(Element::bf16, Unit::mma, d), Unit::mma);
        }
}

/// In the order fused, unfused, subtract_then_scale, stable_max, polynomial, rounded_row_sum.
std::vector<RoundingPlan> plans_of_every_variant() {
    std::vector<RoundingPlan> plans(6, forward_plan());
    plans[1].schedule.argument = ArgumentForm::unfused;
    plans[2].schedule.argument = ArgumentForm::subtract_then_scale;
    plans[3].schedule.max_policy = MaxPolicy::stable;
    plans[3].set(Site::row_max, Rule{fp32});
    plans[4].schedule.exp_poly_every = plans[4].schedule.exp_poly_count = 1;
    plans[4].schedule.exp_poly_skip = 0;
    plans[5].schedule.row_sum_adds = RowSumAdds::rounded;
    return plans;
}

TEST(TensorForward, HasTheEmulationsBitsForEveryVariant) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const double logits : {1.0, 40.0})
            for (const RoundingPlan& plan : plans_of_every_variant()) {
                SCOPED_TRACE(::testing::Message()
                             << "head_dim " << d << ", " << supported(plan, d, true).kernel.name << ", " << logits);
                Head head(260, 260, d, 7, 1, logits);
                for (int c = 0; c < d; ++c) head.k(3, c) = head.k(2, c);  // repeated maxima
                expect_same_bits(head, plan);
            }
}

TEST(TensorForward, HasTheEmulationsBitsForEveryVariantByMma) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const double logits : {1.0, 40.0}) {
            RoundingPlan unfused = plan("fa2-unfused");
            RoundingPlan subtract = forward_plan(Element::bf16, Unit::mma, d), stable = subtract;
            subtract.schedule.argument = ArgumentForm::subtract_then_scale;
            stable.schedule.max_policy = MaxPolicy::stable;
            stable.set(Site::row_max, Rule{fp32});
            for (const RoundingPlan& plan : {faultline::plan("fa2"), unfused, subtract, stable}) {
                SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", "
                                                  << supported(plan, d, true, Unit::mma).kernel.name << ", " << logits);
                Head head(260, 260, d, 7, 1, logits);
                for (int c = 0; c < d; ++c) head.k(3, c) = head.k(2, c);
                expect_same_bits(head, for_head_dim(plan, d, true), Unit::mma);
            }
        }
}

TEST(TensorForward, HasTheEmulationsBitsInFp16) {
    NEEDS_HOPPER();
    for (const int d : {64, 128}) {
        SCOPED_TRACE(d);
        Head head(333, 333, d, 11, 2, 2.0);
        expect_same_bits(head, forward_plan(Element::fp16));
        expect_same_bits(head, forward_plan(Element::fp16, Unit::mma, d), Unit::mma);
    }
}

/// u = 2^-8 (bf16), w = 2^-22 for what happens in fp32 (ex2.approx errs by up to 2^-22 of its result, the additions of a
/// product of wgmma by 2^-23 of the largest term each), S the largest sum of |q k| scale of a row:
///   score: (d/16) w S; argument: 2 w S more; p: w; row sum: (n/8) w; P V: (n/16) w of sum p |v|; p's cast: u
/// so that |o - truth| <= u |o| + (u + w ((d/16 + 2) 2 S + 3 + n/8 + n/16)) sum_j p_j |v_j|, twice the scores' share because
/// row sum and p both have it.
TEST(TensorForward, IsWithinThePlansRoundingsOfTheFunction) {
    NEEDS_HOPPER();
    for (const int d : {64, 128}) {
        SCOPED_TRACE(d);
        constexpr int n = 777;
        const Head head(n, n, d, 5, 1, 3.0);
        const GroupForward out = on_device(head.group(), forward_plan());
        for (int i = 0; i < n; ++i) {
            std::vector<double> s(i + 1);
            double largest = 0, top = -INFINITY, sum = 0;
            for (int j = 0; j <= i; ++j) {
                double dot = 0, size = 0;
                for (int c = 0; c < d; ++c) {
                    dot += head.q[0](i, c) * head.k(j, c);
                    size += std::abs(head.q[0](i, c) * head.k(j, c));
                }
                s[j] = dot * head.scale;
                largest = std::max(largest, size * head.scale);
                top = std::max(top, s[j]);
            }
            for (double& x : s) sum += x = std::exp(x - top);
            const double u = 0x1p-8, w = 0x1p-22;
            const double fp32_part = w * ((d / 16 + 2) * 2 * largest + 3 + n / 8 + n / 16);
            for (int c = 0; c < d; ++c) {
                double o = 0, size = 0;
                for (int j = 0; j <= i; ++j) {
                    o += s[j] / sum * head.v(j, c);
                    size += s[j] / sum * std::abs(head.v(j, c));
                }
                ASSERT_LE(std::abs(out.heads[0].o(i, c) - o),
                          u * std::abs(o) * (1 + u) + (u + fp32_part) * (1 + u) * size)
                    << i << ", " << c;
            }
            ASSERT_LE(std::abs(out.heads[0].lse[i] - (top + std::log(sum))), fp32_part + w * std::abs(top)) << i;
        }
    }
}

TEST(TensorForwardPlans, TakesFa3WithItsOwnKeyTilesAndEveryVariant) {
    const std::vector<RoundingPlan> plans = plans_of_every_variant();
    std::vector<std::string> names;
    for (const RoundingPlan& plan : plans) {
        const ForwardSupport support = supported(plan, 128, false);
        EXPECT_EQ(support.why, "");
        names.push_back(support.kernel.name);
    }
    EXPECT_EQ(names, (std::vector<std::string>{"fused", "unfused", "subtract_then_scale", "stable_max", "polynomial",
                                               "rounded_row_sum"}));
    EXPECT_EQ(supported(plan("fa3"), 128, true).kernel.name, "fused");
    EXPECT_EQ(supported(plan("fa3"), 64, true).kernel.name, "fused");
    EXPECT_EQ(supported(plan("fa3"), 64, true).kernel.unit, Unit::wgmma);
    EXPECT_EQ(supported(plan("fa2"), 128, true).kernel.unit, Unit::mma);
    EXPECT_EQ(supported(plan("fa2"), 64, true).kernel.unit, Unit::wgmma);  // the same roundings
    EXPECT_EQ(supported(plan("fa2"), 64, true, Unit::mma).kernel.unit, Unit::mma);
    EXPECT_EQ(supported(plan("fa2"), 128, false).why, "");
    EXPECT_EQ(supported(plan("fa2-unfused"), 128, true).kernel.name, "unfused");
    EXPECT_EQ(supported(forward_plan(Element::fp16), 64, true).kernel.element, Element::fp16);
}

TEST(TensorForwardPlans, TakesFa3Fp8ByWgmmaAlone) {
    const RoundingPlan own = forward_plan(Element::e4m3);
    const ForwardSupport support = supported(own, 64, true);
    EXPECT_EQ(support.why, "");
    EXPECT_EQ(support.kernel.element, Element::e4m3);
    EXPECT_EQ(support.kernel.variant.max_offset, 8);
    EXPECT_EQ(
        supported(own, 64, true, Unit::mma).why,
        "sites.q_cast.format is e4m3: the tensor-core forward has it by wgmma alone, on compute capability 9.0 (mma has "
        "e4m3 from 8.9 on, of which Hopper makes products of fp16)");
    EXPECT_EQ(supported(plan("fa3-fp8"), 128, true).why, "schedule.block_k is 224: the tensor-core forward has 128");
    RoundingPlan other = own;
    other.schedule.max_offset = 0;
    EXPECT_EQ(supported(other, 64, true).why, "schedule.max_offset is 0: the tensor-core forward has 8");
    other = own;
    other.schedule.argument = ArgumentForm::unfused;
    EXPECT_EQ(supported(other, 64, true).why, "schedule.argument is unfused: the tensor-core forward has fused");
}

TEST(TensorForwardPlans, SaysWhatItDoesNotHave) {
    EXPECT_EQ(supported(plan("fa3"), 96, true).why, "head_dim is 96: expected 64 or 128");
    EXPECT_EQ(supported(plan("fa3"), 128, false).why, "schedule.block_k is 176: the tensor-core forward has 128");
    RoundingPlan lazy = forward_plan();
    lazy.schedule.max_policy = MaxPolicy::lazy;
    EXPECT_EQ(supported(lazy, 128, true).why, "schedule.max_policy is lazy: the tensor-core forward has exact");
    RoundingPlan tf32_p = forward_plan();
    tf32_p.set(Site::p_cast, Rule{tf32});
    EXPECT_EQ(supported(tf32_p, 128, true).why, "sites.p_cast.format is tf32: the tensor-core forward has bf16");
}

TEST(TensorForwardPlans, TheBackwardsRulesDoNotMatter) {
    RoundingPlan other = forward_plan();
    other.set(Site::ds_cast, Rule{});
    other.schedule.zero_sum = ZeroSum::weighted;
    other.schedule.block_q = 64;
    EXPECT_TRUE(supported(other, 128, true));
}

TEST(TensorForwardPlans, ABuildOrMachineWithoutHopperSaysSo) {
    if (has_hopper()) GTEST_SKIP() << "there is one";
    const Head head(8, 8, 64, 1);
    const HeadGroup g = head.group();
    try {
        on_device(g, forward_plan());
        FAIL();
    } catch (const WorkError& e) {
        EXPECT_EQ(std::string(e.what()).rfind("device cuda: ", 0), 0) << e.what();
    }
}

TEST(TensorForwardPlans, RefusesWhatItHasNot) {
    Head head(8, 8, 64, 1);
    head.softcap = 20;
    const HeadGroup g = head.group();
    if (!is_built()) GTEST_SKIP() << "this build has no device";
    EXPECT_THROW(on_device(g, forward_plan()), RequestError);
}

}  // namespace
}  // namespace faultline::tensor_kernel
