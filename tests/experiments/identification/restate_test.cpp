// SPDX-License-Identifier: Apache-2.0
// How a plan that a search found is said: with fewer changes where what they lose is no more than no plan models, and with all of
// them where the kernel is modelled whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/identification/restate.hpp>
#include <faultline/plan/presets.hpp>

#include "made_captures.hpp"

namespace faultline::testing {
namespace {

using namespace identification;

struct Change {
    const char* field;
    void (*make)(Schedule&);
};
/// One that decides much of every output, and two that decide the last bits of three and of 28 of 98,304 elements.
constexpr Change large{"schedule.row_sum_adds", [](Schedule& s) { s.row_sum_adds = RowSumAdds::rounded; }};
constexpr Change small[] = {{"schedule.lse_form", [](Schedule& s) { s.lse_form = LseForm::log2; }},
                            {"schedule.bwd_exp_base", [](Schedule& s) { s.bwd_exp_base = ExpBase::e; }}};

RoundingPlan with(RoundingPlan plan, const Change& change) {
    change.make(plan.schedule);
    return plan;
}

/// A kernel of one layer of four heads, two searched and two held out.
class Kernel {
  public:
    explicit Kernel(const RoundingPlan& plan)
        : capture_(made_capture({{"kernel", plan}}, {.heads = 4, .kv_heads = 4, .n = 192, .d = 32})) {}
    /// Elements of each head's O that no plan has.
    void spoil(std::size_t each) {
        HeadArray& o = *capture_.layers[0].observed[0].outputs[0];
        const std::size_t head = o.values.size() / 4;
        for (std::size_t h = 0; h < 4; ++h)
            for (std::size_t i = 0; i < each; ++i) o.values[h * head + 31 * i] += 1;
    }
    /// The fields in which what is said of `found` differs from `preset`, after the search came to it from there.
    [[nodiscard]] std::vector<std::string> said(const RoundingPlan& preset, const RoundingPlan& found) const {
        const Units units(capture_);
        SearchedPlan plan;
        plan.plan = found;
        plan.base = units.searched.baseline(found);
        restate({units.searched, units.held_out}, {preset}, preset, {}, plan);
        std::vector<std::string> fields;
        for (const Difference& d : differences(preset, plan.plan)) fields.push_back(d.field);
        return fields;
    }
    /// The share of its elements that one of two plans has and the other not.
    [[nodiscard]] double flipped(const RoundingPlan& a, const RoundingPlan& b) const {
        const Units units(capture_);
        Flips all;
        std::size_t total = 0;
        for (const Evaluator* part : {&units.searched, &units.held_out}) {
            const Baseline of_a = part->baseline(a), of_b = part->baseline(b);
            for (std::size_t u = 0; u < of_a.equal.size(); ++u) {
                all.add(flips(of_a.equal[u], of_b.equal[u]));
                total += of_a.matches[u].all().total;
            }
        }
        return static_cast<double>(all.won + all.lost) / static_cast<double>(total);
    }

  private:
    struct Units {
        explicit Units(const Capture& capture) : first(every_other(capture, 0)), second(every_other(capture, 1)) {}
        static std::vector<Unit> every_other(const Capture& capture, std::size_t from) {
            std::vector<Unit> units;
            std::vector<attribution::Group> groups = attribution::groups_of(capture.layers[0], {}, 0);
            for (std::size_t g = from; g < groups.size(); g += 2)
                units.push_back({&capture.layers[0], 0, std::move(groups[g])});
            return units;
        }
        std::vector<Unit> first, second;
        std::string name = "kernel";
        WorkCount::Progress progress;
        std::function<bool()> cancelled;
        WorkCount work{progress, cancelled};
        Evaluator searched{first, name, 1, work, cpu_backend()}, held_out{second, name, 1, work, cpu_backend()};
    };
    Capture capture_;
};

TEST(Restate, SmallChangesRideOnlyWhereTheKernelIsModelledWhole) {
    const RoundingPlan preset = for_head_dim(plan("fa2"), 32, true), main = with(preset, large);
    for (const Change& rider : small) {
        SCOPED_TRACE(rider.field);
        const RoundingPlan both = with(main, rider);
        Kernel kernel(both);
        const double decides = kernel.flipped(main, both);
        ASSERT_TRUE(decides > 0 && decides < unmodelled_share / 2) << decides << ": it shows nothing here";
        // Every element is the two changes': the small one is real, and stays.
        EXPECT_THAT(kernel.said(preset, both), ::testing::UnorderedElementsAre(large.field, rider.field));
        // Elements that no plan has may as well be those that the small one decides: it is not said.
        kernel.spoil(3);
        EXPECT_THAT(kernel.said(preset, both), ::testing::ElementsAre(large.field));
    }
}

// Beside the same elements that no plan has, a change that decides more than those stays.
TEST(Restate, AChangeThatDecidesMoreThanIsNotModelledStays) {
    const RoundingPlan preset = for_head_dim(plan("fa2"), 32, true);
    const Change second{"schedule.ds_scale", [](Schedule& s) { s.ds_scale = DsScale::before; }};
    const RoundingPlan both = with(with(preset, large), second);
    Kernel kernel(both);
    ASSERT_GT(kernel.flipped(with(preset, large), both), 2 * unmodelled_share);
    kernel.spoil(3);
    EXPECT_THAT(kernel.said(preset, both), ::testing::UnorderedElementsAre(large.field, second.field));
}

}  // namespace
}  // namespace faultline::testing
