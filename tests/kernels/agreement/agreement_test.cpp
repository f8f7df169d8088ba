// SPDX-License-Identifier: Apache-2.0
// What a card is compared with: on one of compute capability 9.0 nothing differs, and on every machine the lists are whole.
#include <algorithm>
#include <limits>
#include <optional>
#include <set>

#include <gtest/gtest.h>

#include <faultline/agreement/differing.hpp>
#include <faultline/agreement/matrix_rule.hpp>
#include <faultline/agreement/special_functions.hpp>
#include <faultline/agreement/tensor_kernels.hpp>
#include <faultline/base/error.hpp>
#include <faultline/tensor_core/accumulate.hpp>

namespace faultline::agreement {
namespace {

/// Nothing where there is no such card; `why` says so.
template <class Run>
auto on_card(const Run& run, std::string& why) -> std::optional<decltype(run())> {
    try {
        return run();
    } catch (const WorkError& error) {
        why = error.what();
        return std::nullopt;
    }
}

TEST(Agreement, EveryInstructionHasARuleByItsName) {
    for (const int capability : {80, 86, 87, 89, 90}) {
        const std::vector<NamedInstruction> all = instructions_with_rules(capability);
        EXPECT_EQ(all.size(), capability == 90 ? 12u : 4u);
        std::set<std::string> names;
        for (const NamedInstruction& one : all) {
            const std::optional<Accumulation> rule = find_accumulation(one.accumulation);
            ASSERT_TRUE(rule) << one.accumulation;
            EXPECT_EQ(rule->kind, Accumulation::Kind::fused) << one.accumulation;
            names.insert(one.name);
        }
        EXPECT_EQ(names.size(), all.size());
    }
    for (const int capability : {70, 75, 100, 120}) EXPECT_TRUE(instructions_with_rules(capability).empty());
}

TEST(Agreement, TensorKernelsAreThoseOfHopper) {
    EXPECT_TRUE(tensor_cases(80).empty());
    EXPECT_TRUE(tensor_cases(100).empty());
    std::vector<std::string> names;
    for (const TensorCase& one : tensor_cases(90)) names.push_back(one.name);
    EXPECT_EQ(names, (std::vector<std::string>{"forward bf16 wgmma", "forward fp16 wgmma", "forward bf16 mma",
                                               "forward fp16 mma", "backward bf16 wgmma", "backward fp16 wgmma",
                                               "backward bf16 mma", "backward fp16 mma", "forward e4m3 wgmma",
                                               "backward e4m3 wgmma", "grouped backward bf16 wgmma"}));
}

TEST(Agreement, CountsWhatDiffers) {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    EXPECT_EQ(differing(std::vector{0.0, 1.0, nan}, std::vector{-0.0, 1.0, nan}), 0u);
    EXPECT_EQ(differing(std::vector{0.0, 1.0, nan}, std::vector{0x1p-1074, 1.0, 2.0}), 2u);
    EXPECT_EQ(differing(std::vector{1.0}, std::vector{1.0, 2.0, 3.0}), 3u);
    Matrix x(1, 3), truth(1, 3), bound(1, 3);
    x.values = {1.0, 2.5, nan};
    truth.values = {1.5, 2.0, 0.0};
    bound.values = {0.5, 0.25, 1.0};
    EXPECT_EQ(beyond(x, truth, bound), 2u);
    EXPECT_EQ(beyond(Matrix(1, 2), truth, bound), 3u);
}

/// A few tiles, and one bit more or fewer than the rule has, which the inputs tell.
TEST(AgreementOnACard, MatrixUnitsFollowTheirRule) {
    for (const NamedInstruction& named : instructions_with_rules(90)) {
        std::string why;
        const auto found = on_card([&] { return check_rule(named, 3, 4); }, why);
        if (!found) GTEST_SKIP() << why;
        EXPECT_GT(found->elements, 40000u) << named.name;
        EXPECT_EQ(found->differing, 0u) << named.name;
        Rival more{.unit = find_accumulation(named.accumulation)->unit}, fewer = more;
        ++more.unit.fraction_bits;
        --fewer.unit.fraction_bits;
        const std::vector<Rival> rivals{more, fewer};
        const MatrixFinding others = put_to_card(named.instruction, rivals, RandomStream(3, std::uint64_t{1}), 4);
        for (std::size_t v = 0; v < rivals.size(); ++v)
            EXPECT_TRUE(std::ranges::any_of(others.tallies, [&](const Tally& t) { return t.mismatches[v] > 0; }))
                << named.name << ", rival " << v;
    }
}

TEST(AgreementOnACard, FunctionsAreTheirModels) {
    std::string why;
    const auto found = on_card([] { return check_special_functions(); }, why);
    if (!found) GTEST_SKIP() << why;
    EXPECT_EQ(found->size(), 7u);
    for (const Agreement& function : *found) {
        EXPECT_EQ(function.elements, std::uint64_t{1} << 32) << function.name;
        EXPECT_EQ(function.differing, 0u) << function.name;
    }
}

TEST(AgreementOnACard, TensorKernelsHaveTheEmulationsValues) {
    for (const TensorCase& one : tensor_cases(90)) {
        std::string why;
        const auto found = on_card([&] { return check_tensor_kernel(one, 0, 5, 200); }, why);
        if (!found) GTEST_SKIP() << why;
        EXPECT_GT(found->elements, 200000u) << one.name;
        EXPECT_EQ(found->differing, 0u) << one.name;
    }
}

}  // namespace
}  // namespace faultline::agreement
