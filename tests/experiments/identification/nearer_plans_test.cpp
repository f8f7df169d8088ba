// SPDX-License-Identifier: Apache-2.0
// Which preset a user is told of whose kernel is not the plan asked for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/identification/nearer_plans.hpp>
#include <faultline/plan/presets.hpp>

#include "made_captures.hpp"
#include "support.hpp"

namespace faultline::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(NearerPlans, AreThoseThatTheKernelsWereMadeOf) {
    const Capture capture =
        made_capture({{"third", plan("fa3")}, {"second", plan("fa2")}, {"plain", plan("standard-bf16")}},
                     {.heads = 4, .kv_heads = 2, .n = 150, .d = 64});
    const std::vector<NearerPlan> nearer = nearer_plans(capture, plan("fa2"), 3);
    ASSERT_EQ(nearer.size(), 2u) << "what the plan reproduces needs no other";
    EXPECT_EQ(nearer[0].kernel, "plain");
    EXPECT_EQ(nearer[0].plan, "standard-bf16");
    EXPECT_EQ(nearer[1].kernel, "third");
    EXPECT_EQ(nearer[1].plan, "fa3");
    for (const NearerPlan& n : nearer) {
        EXPECT_EQ(n.bit_equal, 1);
        EXPECT_LT(n.bit_equal_to_asked, 1);
        EXPECT_EQ(n.head, 3);
        EXPECT_THAT(n.layers, ElementsAre("layer0"));
    }
}

// A plan of the user's own is compared too, and stays where no preset is better.
TEST(NearerPlans, LeaveAPlanThatIsTheKernel) {
    RoundingPlan own = plan("fa2");
    own.name = "mine";
    own.schedule.ds_scale = DsScale::before;
    const Capture capture = made_capture({{"mine", own}}, {.n = 150, .d = 72});
    EXPECT_THAT(nearer_plans(capture, own, 0), IsEmpty());
    // Kernels that differ in the backward alone are told apart by the gradients.
    EXPECT_THAT(nearer_plans(made_capture({{"k", plan("fa2")}}, {.n = 150, .d = 72}), own, 0).at(0).plan, "fa2");
}

TEST(NearerPlans, NeedNoGradientAndNoKernel) {
    const Capture forward = made_capture({{"k", plan("standard-bf16")}}, {.n = 150, .d = 64, .gradient = false});
    EXPECT_EQ(nearer_plans(forward, plan("fa2"), 0).at(0).plan, "standard-bf16");
    EXPECT_THAT(nearer_plans(made_capture({}, {.n = 20}), plan("fa2"), 0), IsEmpty());
}

TEST(NearerPlans, AreSaidByTheProgram) {
    using namespace ::faultline::test;
    const std::vector<std::string> words{"attribute", shipped_capture(), "--plan", "fa2",
                                         "--quiet",   "--outputs",       "o",      "--sites",
                                         "o_cast",    "--correction",    "none"};
    std::vector<std::string> with_json = words;
    with_json.emplace_back("--json");
    const Outcome text = run_program(words), object = run_program(with_json);
    ASSERT_EQ(text.status, 0) << text.err;
    EXPECT_THAT(
        text.out,
        HasSubstr(
            "flash is nearer to --plan fa2-unfused-splitkv, which has >99.9% of its elements, than to fa2, which has"));
    const auto nearer = nlohmann::json::parse(object.out)["nearer_plans"];
    ASSERT_EQ(nearer.size(), 2u);
    EXPECT_EQ(nearer[0]["kernel"], "flash");
    EXPECT_EQ(nearer[0]["plan"], "fa2-unfused-splitkv");
    EXPECT_GT(nearer[0]["bit_equal"], 0.999);
    EXPECT_LT(nearer[0]["bit_equal_to_asked"], 0.9);
}

}  // namespace
}  // namespace faultline::testing
