// SPDX-License-Identifier: Apache-2.0
// A kernel is judged by the type of its file, whatever type the plan stores.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/attribution/finding.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/table.hpp>
#include <faultline/plan/presets.hpp>

#include "made_captures.hpp"

namespace faultline {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// The layer with a kernel "ref", which stores what `exact` leaves in bf16: no error but that of its type.
Attribution under(const RoundingPlan& plan, std::vector<Site> sites = {}) {
    Capture capture = testing::made_capture({{"ref", faultline::plan("exact")}}, {.n = 32, .d = 16});
    for (auto& array : capture.layers[0].observed[0].outputs) {
        array->dtype = Dtype::bf16;
        for (double& x : array->values) x = round(x, bf16, Rounding::nearest_even);
    }
    AttributionOptions options;
    options.sites = std::move(sites);
    return attribute(capture, plan, options);
}

TEST(Types, APlanThatStoresNoneIsComparedAsTheFileHoldsIt) {
    const Attribution a = under(plan("exact"));
    const OutputAttribution& o = a.layers[0].outputs[0];
    ASSERT_EQ(o.observed.size(), 1u);
    const ObservedOutput& ref = o.observed[0];
    EXPECT_EQ(ref.bit_equal_to_plan, 1);
    EXPECT_EQ(ref.plan->rel_error, ref.error.rel_error) << "rounded to bf16 they are the same";
    const std::string text = attribution::verdict(a.layers[0], o, a.plan);
    EXPECT_THAT(text,
                HasSubstr(error_text(ref.error.rel_error) + " once stored in bf16, as ref is (all of its elements"));
    EXPECT_THAT(text, Not(HasSubstr("does not explain")));
    EXPECT_THAT(table(a), HasSubstr("|truth|    bf16"));
    EXPECT_FALSE(attribution::is_worth_a_block(o, a.plan)) << "nothing is wrong with it";
}

// Gradients in fp32 and o in bf16, as some kernels leave them.
TEST(Types, EachColumnHasTheLevelOfItsOwn) {
    RoundingPlan wide = plan("fa2");
    wide.set(Site::dq_cast, {fp32});
    const Attribution a = under(wide, {Site::dq_cast});
    const OutputAttribution &o = a.layers[0].outputs[0], &dq = a.layers[0].outputs[1];
    const ObservedOutput& ref = dq.observed[0];
    EXPECT_LT(dq.level->to_double(), 1e-7);
    // Storing the truth is all that it does: the same but for the order in which some thousand squares are added up.
    EXPECT_NEAR((ref.error.rel_error / *level_of(ref, dq)).to_double(), 1, 1024 * 0x1p-53);
    EXPECT_EQ(*level_of(o.observed[0], o), *o.level) << "o is of one type";
    const std::string text = table(a);
    EXPECT_THAT(text, HasSubstr("level  what storing the truth costs: o, dk, dv in bf16, dq in fp32; * marks that"));
    EXPECT_THAT(text, HasSubstr("|truth|   level"));
    EXPECT_THAT(text, HasSubstr(error_text(ref.error.rel_error) + "*"));
    EXPECT_THAT(attribution::verdict(a.layers[0], dq, a.plan), HasSubstr("; of the one site tried none does 5.0%"));
}

}  // namespace
}  // namespace faultline
