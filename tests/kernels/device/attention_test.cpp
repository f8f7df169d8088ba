// SPDX-License-Identifier: Apache-2.0
// The emulated kernel on the device where its operands are large, so that they travel by way of page-locked memory and as the
// smallest type that holds them: bf16, floats, doubles; and its gradients in registers. Other small ones are `faultline selftest`'s.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/device/device.hpp>
#include <faultline/device/parts.hpp>
#include <faultline/format/format.hpp>
#include <faultline/plan/presets.hpp>

#include "heads.hpp"
#include "hidden_heads.hpp"

namespace faultline {
namespace {

using testing::Head;
using testing::random_matrix;

// An operand is 140,800 doubles, 1.1 MB: more than is copied without page-locked memory, in one piece as bf16 or floats and in two
// as doubles.
constexpr std::ptrdiff_t n = 1100, d = 128;

class DeviceAttention : public ::testing::Test {
  protected:
    void SetUp() override {
        try {
            (void)device::info();
        } catch (const WorkError& error) {
            GTEST_SKIP() << error.what();
        }
    }
    static void expect_same(const std::vector<double>& a, const std::vector<double>& b, const char* what) {
        ASSERT_EQ(a.size(), b.size()) << what;
        std::size_t differ = 0;
        for (std::size_t i = 0; i < a.size(); ++i) differ += std::memcmp(&a[i], &b[i], sizeof(double)) != 0;
        EXPECT_EQ(differ, 0u) << what;
    }
    static void expect_bits_of_the_processor(const std::vector<Head>& heads, const std::string& name) {
        SCOPED_TRACE(name);
        const RoundingPlan plan =
            for_head_dim(faultline::plan(name), static_cast<int>(heads.front().k.cols), heads.front().causal);
        std::vector<HeadGroup> groups;
        for (const Head& head : heads) {
            groups.push_back(head.group());
            groups.back().first_head = static_cast<int>(groups.size()) - 1;
        }
        const device::Attention found = device::attention(groups, plan);
        const std::vector<GroupForward> apart = device::attention_forward(groups, plan);
        for (std::size_t g = 0; g < groups.size(); ++g) {
            const GroupForward forward = attention_forward(groups[g], plan);
            const GroupBackward backward = attention_backward(groups[g], forward, plan);
            const HeadForward &a = forward.heads.front(), &b = found.forward[g].heads.front();
            expect_same(a.o.values, b.o.values, "o");
            expect_same(a.o_unrounded.values, b.o_unrounded.values, "o before its cast");
            expect_same(a.lse, b.lse, "lse");
            expect_same(a.p.values, apart[g].heads.front().p.values, "p");
            EXPECT_TRUE(b.p.values.empty()) << "p stays there";
            expect_same(backward.dq.front().values, found.backward[g].dq.front().values, "dq");
            expect_same(backward.dk.values, found.backward[g].dk.values, "dk");
            expect_same(backward.dv.values, found.backward[g].dv.values, "dv");
        }
    }
    static std::vector<Head> two_heads() { return {Head(n, n, d, 31, 1, 2.0), Head(n, n, d, 32, 1, 2.0)}; }
};

TEST_F(DeviceAttention, LargeOperandsOfBf16) {
    for (const char* const name : {"fa2", "math"}) expect_bits_of_the_processor(two_heads(), name);
}

/// Exact, so that operands stay as they are: of 24 bits, and of 53; and results are doubles.
TEST_F(DeviceAttention, LargeOperandsOfOtherTypes) {
    for (const Format& format : {fp32, binary64}) {
        std::vector<Head> heads = two_heads();
        std::uint64_t seed = 40;
        for (Head& head : heads)
            for (Matrix* m : {&head.q.front(), &head.k, &head.v, &head.dout.front()})
                *m = random_matrix(n, d, 1.0, ++seed, format);
        expect_bits_of_the_processor(heads, "exact");
    }
}

/// Nothing is computed, and dk and dv, or o and dq, are the processor's zeros: where what they take is small, and where it is not.
TEST_F(DeviceAttention, WithoutQueriesOrKeys) {
    for (const char* const name : {"fa2", "math", "exact"}) {
        expect_bits_of_the_processor({Head(0, 40, 64, 5)}, name);
        expect_bits_of_the_processor({Head(0, 9000, 128, 6)}, name);
        expect_bits_of_the_processor({Head(40, 0, 64, 7)}, name);
        expect_bits_of_the_processor({Head(9000, 0, 128, 8)}, name);
    }
}

/// bf16 up to one of the last elements of an operand.
TEST_F(DeviceAttention, LargeOperandsWithOneElementOfAnotherType) {
    std::vector<Head> heads = two_heads();
    heads[0].k.values[heads[0].k.values.size() - 3] = 1 + 0x1p-20;
    heads[0].v.values[heads[0].v.values.size() - 1] = -0.0;
    heads[1].q.front().values.back() = 1 + 0x1p-50;
    expect_bits_of_the_processor(heads, "exact");
}

/// Gradients that are computed in registers (gradients.cuh): lengths that no tile divides, rows without a key, both head sizes.
TEST_F(DeviceAttention, GradientsOfEveryPreset) {
    for (const std::string_view name : preset_names())
        expect_bits_of_the_processor({Head(150, 130, 128, 51, 2, 2.0)}, std::string(name));
    Head open(70, 200, 64, 52);
    open.causal = false;
    for (const char* const name : {"fa2", "efficient", "fa1", "repo-2510.04212", "thunderkittens", "cudnn-like"}) {
        expect_bits_of_the_processor({Head(200, 333, 64, 53)}, name);
        expect_bits_of_the_processor({open}, name);
    }
}

/// Heads with what those kernels leave to the others, beside one without: infinities, NaN, numbers beyond the limits of the integers
/// that Ampere's rule is computed in, probabilities so small that nothing but zeros is left, subnormal numbers.
TEST_F(DeviceAttention, GradientsOfUnusualHeads) {
    const auto head = [](std::uint64_t seed) { return Head(150, 150, 64, seed, 1, 4.0); };
    std::vector<Head> heads;
    for (std::uint64_t seed = 60; seed < 67; ++seed) heads.push_back(head(seed));
    heads[1].k.values[5] = INFINITY;
    heads[2].dout.front().values[700] = NAN;
    heads[3].v.values[64] = 0x1p30;
    for (double& x : heads[4].q.front().values) x *= 64;
    for (double& x : heads[5].dout.front().values) x = round(x * 0x1p-120, bf16);
    heads[6].k.values.back() = 0x1p100;
    for (const char* const name : {"fa2", "efficient", "fa1", "repo-2510.04212", "thunderkittens"})
        expect_bits_of_the_processor(heads, name);
}

/// 0 times infinity in pairs that the mask hides (hidden_pairs.hpp).
TEST_F(DeviceAttention, GradientsOfHiddenInfinities) {
    for (const char* const name : {"fa2", "efficient", "fa1", "repo-2510.04212", "thunderkittens"})
        for (const Head& head : testing::heads_with_hidden_infinities()) expect_bits_of_the_processor({head}, name);
}

/// Rows without a key whose log-sum-exp is another than the plus infinity of our own forwards, as a caller may have it.
TEST_F(DeviceAttention, GradientsOfRowsWithoutAKeyAndTheirLse) {
    for (const char* const name : {"fa2", "fa3", "fa4", "efficient", "repo-2510.04212"})
        for (const double lse : {-static_cast<double>(INFINITY), static_cast<double>(NAN), -3e38}) {
            SCOPED_TRACE(name);
            const std::ptrdiff_t head_dim = std::string(name) == "efficient" ? 128 : 64;
            const Head head(128, 64, head_dim, 92);
            const RoundingPlan plan = for_head_dim(faultline::plan(name), static_cast<int>(head_dim), true);
            const std::vector<HeadGroup> groups{head.group()};
            std::vector<GroupForward> forward{attention_forward(groups.front(), plan)};
            for (std::size_t i = 0; i < 64; ++i) forward.front().heads.front().lse[i] = lse;
            const GroupBackward wanted = attention_backward(groups.front(), forward.front(), plan);
            const std::vector<GroupBackward> found = device::attention_backward(groups, forward, plan);
            expect_same(wanted.dq.front().values, found.front().dq.front().values, "dq");
            expect_same(wanted.dk.values, found.front().dk.values, "dk");
            expect_same(wanted.dv.values, found.front().dv.values, "dv");
        }
}

/// Casts that saturate, so that no visible pair shows that the scale of the gradient is infinite in fp32.
TEST_F(DeviceAttention, GradientsOfAnInfiniteScale) {
    Head head(64, 64, 64, 93);
    for (Matrix* m : {&head.q.front(), &head.k})
        for (double& x : m->values) x = std::abs(x);
    for (const DsScale at : {DsScale::before, DsScale::after_cast}) {
        RoundingPlan plan = for_head_dim(faultline::plan("fa2"), 64, true);
        plan.schedule.ds_scale = at;
        for (const Site site : {Site::bwd_p_cast, Site::ds_cast, Site::ds_scaled}) plan.set(site, {.format = e4m3});
        std::vector<HeadGroup> groups{head.group()};
        const std::vector<GroupForward> forward{attention_forward(groups.front(), plan)};
        groups.front().scale = 1e39;
        const GroupBackward wanted = attention_backward(groups.front(), forward.front(), plan);
        const std::vector<GroupBackward> found = device::attention_backward(groups, forward, plan);
        expect_same(wanted.dq.front().values, found.front().dq.front().values, "dq");
        expect_same(wanted.dk.values, found.front().dk.values, "dk");
        expect_same(wanted.dv.values, found.front().dv.values, "dv");
    }
}

/// One group of a call has a bias, the other none.
TEST_F(DeviceAttention, GradientsOfGroupsOfWhichOneHasABias) {
    std::vector<Head> heads{Head(96, 96, 64, 94), Head(96, 96, 64, 95)};
    heads.back().bias.push_back(random_matrix(96, 96, 1.0, 96));
    expect_bits_of_the_processor(heads, "fa2");
}

/// Which of them are left to the other kernel is counted, and so are blocks of products that are no unit's.
TEST_F(DeviceAttention, HeadsThatAreLeftAreCounted) {
    const device::Info card = device::info();
    if (card.major != 9 || card.minor != 0) GTEST_SKIP() << "the unit of this card has another rule";
    for (const char* const name : {"fa2", "efficient", "fa1", "repo-2510.04212", "fa3-fp8"}) {
        SCOPED_TRACE(name);
        std::vector<Head> heads{Head(130, 150, 64, 70, 1, 2.0), Head(130, 150, 64, 71, 1, 2.0)};
        const RoundingPlan plan = for_head_dim(faultline::plan(name), 64, true);
        for (const bool usual : {true, false}) {
            if (!usual) heads[1].q.front().values[70] = NAN;
            std::vector<HeadGroup> groups{heads[0].group(), heads[1].group()};
            groups[1].first_head = 1;
            device::Parts parts;
            device::time_parts(&parts);
            (void)device::attention(groups, plan);
            device::time_parts(nullptr);
            EXPECT_EQ(parts.heads_in_registers["dq"], usual ? 2u : 1u);
            EXPECT_EQ(parts.heads_in_registers["dk and dv"], usual ? 2u : 1u);
            EXPECT_EQ(parts.blocks_left == 0, usual) << parts.blocks_left;
        }
    }
}

}  // namespace
}  // namespace faultline
