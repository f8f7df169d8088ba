// SPDX-License-Identifier: Apache-2.0
// Which preset a user is told of whose kernel is not the plan asked for.
#include <algorithm>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/identification/json.hpp>
#include <faultline/identification/nearer_plans.hpp>
#include <faultline/identification/table.hpp>
#include <faultline/plan/presets.hpp>

#include "made_captures.hpp"
#include "support.hpp"

namespace faultline::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<NearerPlan> nearer_than(const Capture& capture, const RoundingPlan& plan, std::vector<int> heads = {}) {
    AttributionOptions options;
    options.heads = std::move(heads);
    return nearer_plans(rank_presets(capture, plan, options), plan.name, options.heads);
}

TEST(NearerPlans, AreThoseThatTheKernelsWereMadeOf) {
    const Capture capture =
        made_capture({{"third", plan("fa3")}, {"second", plan("fa2")}, {"plain", plan("standard-bf16")}},
                     {.heads = 4, .kv_heads = 2, .n = 150, .d = 64});
    const std::vector<NearerPlan> nearer = nearer_than(capture, plan("fa2"), {3});
    ASSERT_EQ(nearer.size(), 2u) << "what the plan reproduces needs no other";
    EXPECT_EQ(nearer[0].kernel, "plain");
    EXPECT_EQ(nearer[0].plan, "standard-bf16");
    EXPECT_EQ(nearer[1].kernel, "third");
    EXPECT_EQ(nearer[1].plan, "fa3");
    for (const NearerPlan& n : nearer) {
        EXPECT_EQ(n.bit_equal, 1);
        EXPECT_LT(n.bit_equal_to_asked, 1);
        EXPECT_THAT(n.heads, ElementsAre(3));
        EXPECT_THAT(n.layers, ElementsAre("layer0"));
    }
}

// A plan of the user's own is compared too, and stays where no preset is better.
TEST(NearerPlans, LeaveAPlanThatIsTheKernel) {
    RoundingPlan own = plan("fa2");
    own.name = "mine";
    own.schedule.ds_scale = DsScale::before;
    const Capture capture = made_capture({{"mine", own}}, {.n = 150, .d = 72});
    EXPECT_THAT(nearer_than(capture, own), IsEmpty());
    // Kernels that differ in the backward alone are told apart by the gradients.
    EXPECT_THAT(nearer_than(made_capture({{"k", plan("fa2")}}, {.n = 150, .d = 72}), own).at(0).plan, "fa2");
}

/// The processor's, without room for plans that save P, or for any.
class SmallBackend final : public AttentionBackend {
  public:
    explicit SmallBackend(bool none) : none_(none) {}
    [[nodiscard]] std::string_view name() const override { return "small"; }
    [[nodiscard]] int calls_at_once(int threads) const override { return threads; }
    void expect_room(const HeadGroup&, const RoundingPlan& plan, const Instrument*) const override {
        if (none_ || plan.schedule.p_saved) throw NoRoom("plan \"" + plan.name + "\": no room");
    }
    [[nodiscard]] GroupForward forward(const HeadGroup& in, const RoundingPlan& plan, Instrument* i) const override {
        expect_room(in, plan, i);
        return cpu_backend().forward(in, plan, i);
    }
    [[nodiscard]] GroupBackward backward(const HeadGroup& in, const GroupForward& fwd, const RoundingPlan& plan,
                                         Instrument* i) const override {
        expect_room(in, plan, i);
        return cpu_backend().backward(in, fwd, plan, i);
    }
    [[nodiscard]] GroupTruth truth(const TruthProblem& problem, const TruthOptions& options) const override {
        return cpu_backend().truth(problem, options);
    }

  private:
    bool none_;
};

// The search around the best tries tiles as long as the sequence and a saved P: what has no room there is passed over.
TEST(NearerPlans, AreChosenAmongThoseThatHaveRoom) {
    const Capture capture = made_capture({{"k", plan("fa2")}}, {.n = 40, .d = 32});
    const SmallBackend small(false), none(true);
    IdentifyOptions options;
    options.backend = &small;
    const Identification found = identify(capture, options);
    std::vector<std::string> left_out;
    for (const LeftOutPlan& p : found.left_out) {
        left_out.push_back(p.plan);
        EXPECT_EQ(p.reason, "layer0: plan \"" + p.plan + "\": no room");
    }
    EXPECT_THAT(left_out, ElementsAre("standard-bf16", "math", "llmc"));
    EXPECT_EQ(found.kernels.at(0).match.all().share(), 1);
    for (const RankedPlan& ranked : found.kernels.at(0).ranking)
        EXPECT_THAT(left_out, ::testing::Not(::testing::Contains(ranked.plan)));
    EXPECT_THAT(table(found, false), HasSubstr("math is left out, for want of memory: layer0: plan \"math\": no room"));
    EXPECT_EQ(nlohmann::json::parse(to_json(found)).at("left_out").at(1).at("plan"), "math");

    options.backend = &none;
    try {
        (void)identify(capture, options);
        FAIL();
    } catch (const NoRoom& error) {
        EXPECT_THAT(error.what(), HasSubstr("layer0: plan \"exact\": no room"));
    }
}

TEST(NearerPlans, NeedNoGradientAndNoKernel) {
    const Capture forward = made_capture({{"k", plan("standard-bf16")}}, {.n = 150, .d = 64, .gradient = false});
    EXPECT_EQ(nearer_than(forward, plan("fa2")).at(0).plan, "standard-bf16");
    EXPECT_THAT(nearer_than(made_capture({}, {.n = 20}), plan("fa2")), IsEmpty());
}

/// What one kernel returned, its first head as the other plan's kernel returns it.
void take_first_head(ObservedKernel& kernel, const ObservedKernel& from) {
    for (std::size_t o = 0; o < kernel.outputs.size(); ++o) {
        std::vector<double>& values = kernel.outputs[o]->values;
        const std::vector<double>& other = from.outputs[o]->values;
        const auto one = static_cast<std::ptrdiff_t>(values.size()) / kernel.outputs[o]->heads;
        std::copy(other.begin(), other.begin() + one, values.begin());
    }
}

// On its first head the kernel is fa2 to the bit, and on the three others standard-bf16: the answer is that of all heads, whatever
// the plan of a kernel that comes first by name, and no kernel drops out because the plan that was started from is as near.
TEST(NearestPlan, IsThatOfFlashOverAllHeads) {
    Capture capture = made_capture({{"flash", plan("standard-bf16")}, {"a", plan("math")}, {"b", plan("fa2")}},
                                   {.heads = 4, .kv_heads = 4, .n = 100, .d = 72});
    std::vector<ObservedKernel>& kernels = capture.layers[0].observed;
    take_first_head(kernels[0], kernels[2]);
    kernels.pop_back();
    const Identification ranked = rank_presets(capture, plan("fa2"));
    EXPECT_EQ(first_kernel(ranked), "flash");
    const std::optional<ChosenPlan> chosen = nearest_plan(ranked, "flash");
    ASSERT_TRUE(chosen);
    EXPECT_EQ(chosen->plan, "standard-bf16");
    EXPECT_LT(chosen->bit_equal, 1) << "the first head is another plan's";
    EXPECT_EQ(nearest_plan(ranked, "a")->plan, "math");
    EXPECT_FALSE(nearest_plan(ranked, "none"));
    // identify()'s ranking is the same one.
    IdentifyOptions without_search;
    without_search.search = false;
    for (const KernelIdentification& kernel : identify(capture, without_search).kernels)
        EXPECT_EQ(nearest_plan(ranked, kernel.kernel)->plan, kernel.nearest);

    AttributionOptions first;
    first.heads = {0};
    const std::optional<ChosenPlan> of_head = nearest_plan(rank_presets(capture, plan("fa2"), first), "flash");
    ASSERT_TRUE(of_head);
    EXPECT_EQ(of_head->plan, "fa2");
    EXPECT_EQ(of_head->bit_equal, 1);

    EXPECT_TRUE(is_nearest_to_some(ranked, "math"));
    EXPECT_TRUE(is_nearest_to_some(ranked, "standard-bf16"));
    EXPECT_FALSE(is_nearest_to_some(ranked, "fa2"));
}

// Plans that no element tells apart are all named.
TEST(NearestPlan, SaysWhoIsAsNear) {
    const Capture capture =
        made_capture({{"k", plan("fa3")}}, {.n = 40, .d = 64, .gradient = false});  // one tile: fa2's forward is fa3's
    const std::optional<ChosenPlan> chosen = nearest_plan(rank_presets(capture, plan("fa2")), "k");
    ASSERT_TRUE(chosen);
    EXPECT_EQ(chosen->plan, "fa2");
    EXPECT_THAT(chosen->as_near, ::testing::Contains("fa3"));
}

// Without --plan every command on a capture works under the same preset, and says which.
TEST(NearestPlan, IsWhatEveryCommandTakes) {
    using namespace ::faultline::test;
    const std::string file = shipped_capture(), chosen = "fa2-unfused-splitkv";
    const auto object_of = [](std::vector<std::string> words) {
        words.insert(words.end(), {"--quiet", "--json"});
        const Outcome run = run_program(words);
        EXPECT_LE(run.status, 1) << run.err;
        return nlohmann::json::parse(run.out);
    };
    const std::vector<nlohmann::json> objects{
        object_of({"attribute", file, "--outputs", "o", "--sites", "o_cast", "--correction", "none"}),
        object_of({"bisect", file, "--until", "o.rel_error < 1"}),
        object_of({"check", file, "--kernel", "flash", "--outputs", "o", "--runs", "8"})};
    for (const auto& object : objects) {
        EXPECT_EQ(object["plan"], chosen) << object["schema"];
        EXPECT_EQ(object["chosen_plan"]["plan"], chosen) << object["schema"];
        EXPECT_EQ(object["chosen_plan"]["kernel"], "flash") << object["schema"];
        EXPECT_GT(object["chosen_plan"]["bit_equal"], 0.999) << object["schema"];
    }
    // check's is the kernel that it judges.
    const auto math = object_of({"check", file, "--kernel", "math", "--outputs", "o", "--runs", "8"});
    EXPECT_EQ(math["plan"], "math");
    EXPECT_EQ(math["chosen_plan"]["kernel"], "math");
}

// A hint, and no more: verdict and exit status are by the plan that was named.
TEST(NearerPlans, AreAHintOfCheck) {
    using namespace ::faultline::test;
    const std::vector<std::string> words{"check", shipped_capture(), "--kernel", "flash", "--quiet", "--outputs",
                                         "dq",    "--runs",          "8",        "--plan"};
    const auto under = [&](const std::string& plan) {
        std::vector<std::string> all = words;
        all.push_back(plan);
        return run_program(all);
    };
    const Outcome own = under("fa2-unfused-splitkv"), other = under("fa2");
    for (const Outcome& run : {own, other})
        EXPECT_EQ(run.status, run.out.find("verdict: within its rounding") == std::string::npos ? 1 : 0) << run.out;
    EXPECT_EQ(own.out.find("nearer"), std::string::npos) << own.out;
    EXPECT_EQ(other.status, 0) << other.out;
    EXPECT_THAT(
        other.out,
        HasSubstr("\nflash is nearer to --plan fa2-unfused-splitkv, which has >99.9% of its elements, than to"));
    EXPECT_EQ(other.out.find("math is nearer"), std::string::npos) << "of the kernel that is judged alone";
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
            "flash is nearer to --plan fa2-unfused-splitkv, which has >99.9% of its elements, than to plan fa2, which"));
    EXPECT_THAT(text.out, HasSubstr("(all heads of layer1)"));
    const auto nearer = nlohmann::json::parse(object.out)["nearer_plans"];
    ASSERT_EQ(nearer.size(), 2u);
    EXPECT_EQ(nearer[0]["kernel"], "flash");
    EXPECT_EQ(nearer[0]["plan"], "fa2-unfused-splitkv");
    EXPECT_GT(nearer[0]["bit_equal"], 0.999);
    EXPECT_LT(nearer[0]["bit_equal_to_asked"], 0.9);
    EXPECT_TRUE(nearer[0]["heads"].is_null()) << "all";
}

}  // namespace
}  // namespace faultline::testing
