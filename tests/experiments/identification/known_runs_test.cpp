// SPDX-License-Identifier: Apache-2.0
// Runs that the search keeps: they answer as the runs made anew would, and are not made again.
#include <atomic>

#include <gtest/gtest.h>

#include <faultline/identification/evaluate.hpp>
#include <faultline/identification/neighbourhood.hpp>
#include <faultline/plan/presets.hpp>

#include "made_captures.hpp"

namespace faultline::testing {
namespace {

using namespace identification;

/// The CPU's, which counts.
class CountingBackend final : public AttentionBackend {
  public:
    [[nodiscard]] std::string_view name() const override { return "counting"; }
    [[nodiscard]] int calls_at_once(int threads) const override { return cpu_backend().calls_at_once(threads); }
    [[nodiscard]] GroupForward forward(const HeadGroup& in, const RoundingPlan& plan,
                                       Instrument* instrument) const override {
        ++forwards;
        return cpu_backend().forward(in, plan, instrument);
    }
    [[nodiscard]] GroupBackward backward(const HeadGroup& in, const GroupForward& fwd, const RoundingPlan& plan,
                                         Instrument* instrument) const override {
        ++backwards;
        return cpu_backend().backward(in, fwd, plan, instrument);
    }
    [[nodiscard]] GroupTruth truth(const TruthProblem& problem, const TruthOptions& options) const override {
        return cpu_backend().truth(problem, options);
    }
    mutable std::atomic<int> forwards = 0, backwards = 0;
};

/// A kernel that is fa2 with another order of ds, and units of it.
struct Searched {
    RoundingPlan preset = for_head_dim(plan("fa2"), 16, true);
    Capture capture;
    std::string name = "kernel";
    WorkCount::Progress progress;
    std::function<bool()> cancelled;
    WorkCount work{progress, cancelled};
    CountingBackend backend;

    Searched() {
        RoundingPlan other = preset;
        other.schedule.ds_scale = DsScale::before;
        capture = made_capture({{name, other}}, {.n = 33, .d = 16});  // an odd number of rows
    }
    [[nodiscard]] std::vector<Unit> units(Rows rows) const {
        Unit unit{&capture.layers[0], 0, attribution::groups_of(capture.layers[0], {}, 0).front()};
        unit.rows = rows;
        return {unit};
    }
};

TEST(KnownRuns, ServeEveryChoiceOfRowsAsRunsMadeAnew) {
    Searched s;
    std::vector<Neighbour> some = neighbours(s.preset, {});
    some.resize(std::min<std::size_t>(some.size(), 40));
    some.push_back(neighbours(s.preset, {}).back());
    const auto known = std::make_shared<KnownRuns>();
    std::size_t all = 0, halves = 0;
    for (const Rows rows : {Rows::all, Rows::even, Rows::odd}) {
        const std::vector<Unit> units = s.units(rows);
        const Evaluator shared(units, s.name, 1, s.work, s.backend, known),
            fresh(units, s.name, 1, s.work, cpu_backend());
        Baseline base = shared.baseline(s.preset), anew = fresh.baseline(s.preset);
        EXPECT_EQ(base.matches, anew.matches);
        EXPECT_EQ(base.equal, anew.equal);
        const std::vector<Evaluated> of_shared = shared.evaluate(some, base), of_fresh = fresh.evaluate(some, anew);
        for (std::size_t i = 0; i < some.size(); ++i) {
            EXPECT_EQ(of_shared[i].match, of_fresh[i].match) << some[i].field;
            EXPECT_EQ(of_shared[i].flips, of_fresh[i].flips) << some[i].field;
        }
        // What compare() says of these rows at once.
        const attribution::RunOutputs run = attribution::run_plan(units[0].group, s.preset);
        OutputMatches direct = compare(units[0], run, observed(units[0], s.name));
        direct.lse = {};
        EXPECT_EQ(base.matches[0], direct);
        (rows == Rows::all ? all : halves) += direct.all().total;
    }
    EXPECT_EQ(all, halves);
    EXPECT_EQ(s.backend.backwards, static_cast<int>(some.size()) + 1);  // of the first choice of rows
}

// A change of the backward alone asks for the forward of a baseline that was known, once.
TEST(KnownRuns, AKnownBaselineRunsItsForwardWhereAChangeNeedsIt) {
    Searched s;
    const std::vector<Unit> units = s.units(Rows::all);
    const auto known = std::make_shared<KnownRuns>();
    const Evaluator evaluator(units, s.name, 1, s.work, s.backend, known);
    (void)evaluator.baseline(s.preset);
    Baseline again = evaluator.baseline(s.preset);
    EXPECT_EQ(s.backend.forwards, 1);
    std::vector<Neighbour> backward_only;
    for (Neighbour& n : neighbours(s.preset, {}))
        if (n.backward_only && backward_only.size() < 2) backward_only.push_back(std::move(n));
    ASSERT_EQ(backward_only.size(), 2u);
    const std::vector<Evaluated> found = evaluator.evaluate(backward_only, again);
    EXPECT_EQ(s.backend.forwards, 2);
    const Evaluator fresh(units, s.name, 1, s.work, cpu_backend());
    Baseline anew = fresh.baseline(s.preset);
    const std::vector<Evaluated> expected = fresh.evaluate(backward_only, anew);
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_EQ(found[i].flips, expected[i].flips);
}

TEST(KnownRuns, KnowAPlanByWhatItComputes) {
    RoundingPlan a = plan("fa2"), b = a;
    b.name = "another";
    b.description = "of another name";
    EXPECT_EQ(key_of(a), key_of(b));
    b.set(Site::delta, Rule{});
    EXPECT_NE(key_of(a), key_of(b));
    a.schedule.ds_scale = DsScale::before;
    EXPECT_NE(key_of(a), key_of(plan("fa2")));
}

}  // namespace
}  // namespace faultline::testing
