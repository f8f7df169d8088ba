// SPDX-License-Identifier: Apache-2.0
// Comparing runs with observed outputs, by hand-worked values.
#include <limits>

#include <gtest/gtest.h>

#include <faultline/format/format.hpp>
#include <faultline/identification/match.hpp>
#include <faultline/identification/table.hpp>

namespace faultline {
namespace {

using namespace identification;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// One head of one row whose output o was observed.
struct OneRow {
    LayerCapture layer;
    Unit unit;
    ObservedKernel kernel;
    attribution::RunOutputs run;
    OneRow(const OneRow&) = delete;  // the unit points into it
    OneRow(const std::vector<double>& ours, const std::vector<double>& theirs, Dtype dtype) {
        const auto columns = static_cast<std::ptrdiff_t>(ours.size());
        static const double zero = 0;
        unit.layer = &layer;
        unit.group.inputs.q = {MatrixView<const double>(&zero, 1, 1)};
        kernel.outputs[0] = HeadArray{1, 1, 1, columns, theirs, dtype};
        Matrix& o = run.outputs[0].emplace_back(1, columns);
        o.values = ours;
    }
};

TEST(Compare, CountsEqualElementsAndThoseWithinOneUlp) {
    // ulp of bf16 at 1 is 2^-7. Ours: equal; one ulp; two ulps; NaN with NaN; NaN against a number; zeros of both signs.
    const double u = 0x1p-7;
    const OneRow row({1, 1 + u, 1 + 2 * u, nan, nan, 0.0}, {1, 1, 1, nan, 1, -0.0}, Dtype::bf16);
    EqualFlags flags;
    const OutputMatches m = compare(row.unit, row.run, row.kernel, &flags);
    EXPECT_EQ(m[Output::o], (Match{3, 4, 6}));
    EXPECT_EQ(m[Output::dq], Match{});
    EXPECT_EQ(flags[0], std::vector<std::uint64_t>{0b101001});  // the first element in the lowest bit
    EXPECT_EQ(m.all().differing(), 3u);
}

TEST(Compare, RoundsTheRunToTheTypeOfTheFile) {
    // 1 + 2^-9 rounds to 1 in bf16, and stays what it is in fp32.
    const double x = 1 + 0x1p-9;
    const OneRow narrow({x}, {1}, Dtype::bf16);
    EXPECT_EQ(compare(narrow.unit, narrow.run, narrow.kernel).all().equal, 1u);
    const OneRow wide({x}, {1}, Dtype::f32);
    EXPECT_EQ(compare(wide.unit, wide.run, wide.kernel).all().equal, 0u);
}

TEST(Flips, AreWhatOneRunHasEqualAndTheOtherNot) {
    EqualFlags before, after;
    before[0] = {0b1001, 0};
    after[0] = {0b1010, std::uint64_t{1} << 63};
    before[3] = {0};
    after[3] = {1};
    const Flips f = flips(before, after);
    EXPECT_EQ(f, (Flips{3, 1}));
    EXPECT_DOUBLE_EQ(f.z(), 1.0);  // (3 - 1) / sqrt(4)
    EXPECT_EQ(Flips{}.z(), 0);
    EXPECT_DOUBLE_EQ((Flips{0, 16}).z(), -4);
}

TEST(Share, IsWrittenAsAllOnlyWhereEveryElementIsEqual) {
    EXPECT_EQ(share_percent({10, 10, 10}), "100%");
    EXPECT_EQ(share_percent({99999, 99999, 100000}), "99.999%");
    EXPECT_EQ(share_percent({3, 3, 4}), "75.00%");
    EXPECT_EQ(share_percent({999999999, 0, 1000000000}), "99.9999999%");
}

// Changes that win and lose the same elements stand in one line, whatever order they were found in.
TEST(Table, JoinsRefusedChangesOfEqualCounts) {
    Identification made;
    KernelIdentification& k = made.kernels.emplace_back();
    k.kernel = "mine";
    k.nearest = "fa2";
    k.match.outputs[0] = {99, 99, 100};
    k.ranking.push_back({"fa2", k.match, {}});
    k.trials.emplace_back();
    const auto refused = [&](const char* to, Flips searched) {
        FoundChange f{{{"sites.delta.accumulation", "pairs", to}}, searched, {1, 9}};
        k.found.push_back(f);
    };
    refused("fp32-fma", {40, 2});
    refused("fp32-tree", {50, 2});
    refused("fp32-sequential", {40, 2});
    const std::string text = table(made);
    const auto count = [&](const std::string& what) {
        std::size_t times = 0;
        for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; ++at) ++times;
        return times;
    };
    EXPECT_EQ(count("not carry over: "), 2u) << text;
    for (const char* rule : {"fp32-fma", "fp32-tree", "fp32-sequential"}) EXPECT_EQ(count(rule), 1u) << text;
    EXPECT_EQ(count("each of these does not carry over"), 1u) << text;
}

}  // namespace
}  // namespace faultline
