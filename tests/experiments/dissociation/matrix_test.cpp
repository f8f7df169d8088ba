// SPDX-License-Identifier: Apache-2.0
// The matrix on a model of a few thousand parameters: threads, interruption, resumption, records of others.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <set>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt/run.hpp>
#include <faultline/record/record_reader.hpp>

#include "matrix_support.hpp"

namespace faultline {
namespace {

namespace fs = std::filesystem;
using test::expect_same;
using test::Folder;
using test::run;
using test::small;
using test::text;
using ::testing::HasSubstr;

TEST(Matrix, ListsControlsFirst) {
    const std::vector<RunPlan> runs = runs_of(small());
    ASSERT_EQ(runs.size(), 2U * (2 + 2 * 3));
    EXPECT_EQ(runs[0].source, "none");
    EXPECT_EQ(runs[0].intervention, "none");
    EXPECT_EQ(runs[1].intervention, "project");
    EXPECT_EQ(runs[2].source, "delta:multiplicative:0.5");
    EXPECT_EQ(runs[8].seed, 1U);
}

TEST(Matrix, DoesNotDependOnThreadsOrFiles) {
    const Folder folder;
    const RunMatrix one = run(small(), "", 1), three = run(small(), folder / "m.runs", 3);
    EXPECT_TRUE(one.complete());
    expect_same(one, three);
    // What was asked for was done.
    for (const RunResult& r : one.runs) {
        EXPECT_EQ(r.steps, 25);
        EXPECT_EQ(r.injected_rms > 0, r.source != "none") << r.source;
        EXPECT_EQ(r.removed_fraction > 0, r.intervention == "project") << r.intervention;
        EXPECT_EQ(r.triggered_at >= 0, r.intervention.starts_with("guard")) << r.intervention;
        EXPECT_TRUE(std::isfinite(r.validation_loss));
    }
    EXPECT_NEAR(one.runs[2].injected_rms, 0.5, 1e-6);  // of floats
    EXPECT_NE(one.runs[2].loss, one.runs[0].loss);
    // All over again from the records alone.
    int told = 0;  // of steps made
    expect_same(one, run_matrix(small(), text(), {.folder = folder / "m.runs", .replace = false, .command_line = ""}, 2,
                                [&](auto, auto, auto&) { ++told; }, {}));
    EXPECT_EQ(told, 0);
}

/// The CPU's trainer as a device's reports: the spectra are left to be finished.
class LateTrainer final : public gpt::Training {
  public:
    explicit LateTrainer(std::unique_ptr<gpt::Trainer> made) : made_(std::move(made)) {}
    [[nodiscard]] const gpt::TrainConfig& config() const override { return made_->config(); }
    [[nodiscard]] std::ptrdiff_t parameters() const override { return made_->parameters(); }
    [[nodiscard]] std::string reductions() const override { return made_->reductions(); }
    [[nodiscard]] std::int64_t next_step() const override { return made_->next_step(); }
    [[nodiscard]] bool finished() const override { return made_->finished(); }
    const gpt::StepReport& step() override {
        report_ = made_->step();
        gpt::clear_spectra(report_);
        report_.finish = [of = made_->report()](gpt::StepReport& report) { gpt::copy_spectra(of, report); };
        return report_;
    }
    [[nodiscard]] const std::optional<gpt::NonFinite>& failure() const override { return made_->failure(); }
    [[nodiscard]] const gpt::StepReport& report() const override {
        if (report_.finish) std::exchange(report_.finish, nullptr)(report_);
        return report_;
    }
    void capture(std::function<bool(std::int64_t)>, std::function<void(std::int64_t, int, const Captured&)>) override {}
    void save(const std::string& path) const override { made_->save(path); }
    void restore(const std::string& path) override { made_->restore(path); }

  private:
    std::unique_ptr<gpt::Trainer> made_;
    mutable gpt::StepReport report_;
};

class LateTrainers final : public TrainerSource {
  public:
    void check(const gpt::TrainConfig&, const std::vector<Fault>&, const Intervention&) const override {}
    [[nodiscard]] std::unique_ptr<gpt::Training> make(const gpt::TrainConfig& config, const gpt::TokenData& data,
                                                      const gpt::WindowOrder& windows, gpt::PlantedFaults&,
                                                      gpt::PlantedProjection*, const gpt::Hooks& hooks) const override {
        return std::make_unique<LateTrainer>(std::make_unique<gpt::Trainer>(config, data, windows, hooks));
    }
    [[nodiscard]] bool projects(const gpt::Projection&, int) const override { return false; }
};

// What a device leaves to be finished is in the outcome and in the record: without it nothing could be called a runaway.
TEST(Matrix, HasTheSpectraThatAStepLeavesToBeFinished) {
    MatrixConfig config = small();
    config.sources = {};
    config.seeds = {0};
    const RunMatrix at_once = run(config);
    const LateTrainers late;
    config.trainers = &late;
    const Folder folder;
    for (const std::string& records : {std::string(), folder / "runs"}) {
        const RunMatrix later = run(config, records);
        ASSERT_EQ(later.runs.at(1).intervention, "project");
        ASSERT_EQ(later.runs[1].sigma_q.size(), 6u);
        expect_same(later, at_once);
    }
}

TEST(Matrix, GoesOnAfterAnInterruption) {
    const Folder folder;
    const RunMatrix whole = run(small());
    std::atomic<std::int64_t> steps{0};
    std::int64_t stop_at = 37;
    int rounds = 0;
    RunMatrix matrix;
    do {
        steps = 0;
        matrix = run_matrix(
            small(), text(), {.folder = folder / "m.runs", .replace = false, .command_line = ""}, 2,
            [&](std::int64_t done, std::int64_t, const std::string&) { steps = done; },
            [&] { return steps >= stop_at; });
        stop_at += 90;
        ASSERT_LT(++rounds, 12);
    } while (!matrix.complete());
    EXPECT_GT(rounds, 2);
    expect_same(whole, matrix);
}

void expect_same_record(const std::string& a, const std::string& b) {
    const RecordReader one(a), two(b);
    ASSERT_EQ(one.datasets(), two.datasets());
    for (const std::string& name : one.datasets()) EXPECT_TRUE(one.read(name).bytes == two.read(name).bytes) << name;
}

// An interrupt during a step, in its passes or in its validation, gives the step up: what is resumed has the bits of what was not
// stopped, the directions that a projection follows and the faults' own numbers too.
TEST(Matrix, GivesUpAStepThatIsInterrupted) {
    const Folder folder;
    MatrixConfig config = small();
    config.train.steps = 3;
    config.train.validate_every = 1;
    config.train.validation_batches = 2;
    config.sources = {"delta:multiplicative:0.5"};
    config.seeds = {0};
    std::int64_t asked = 0;
    const RunMatrix whole =
        run_matrix(config, text(), {.folder = folder / "whole", .replace = false, .command_line = "test"}, 1, {},
                   [&] { return ++asked < 0; });
    const auto made = static_cast<std::int64_t>(whole.runs.size()) * config.train.steps;
    EXPECT_GT(asked, 4 * made) << "nobody asks during a step";
    RunMatrix matrix;
    std::int64_t most = 0;  // asked so often, and then there is an interrupt: at each of a step's places in some run
    int rounds = 0;
    do {
        asked = 0;
        matrix = run_matrix(config, text(), {.folder = folder / "parts", .replace = false, .command_line = "test"}, 1,
                            {}, [&] { return ++asked > most; });
        most = most % 97 + 29;
        ASSERT_LT(++rounds, 60);
    } while (!matrix.complete());
    EXPECT_GT(rounds, 4);
    expect_same(whole, matrix);
    for (const RunResult& run : whole.runs)
        expect_same_record(folder / ("whole/" + run.file), folder / ("parts/" + run.file));
}

// Until its trigger, a guard's run is the run without intervention, and takes its steps over: triggered in the first steps,
// in the middle, in the last step, never.
TEST(Matrix, AGuardThatWaitsIsTheRunWithoutIntervention) {
    const Folder folder;
    MatrixConfig config = small();
    config.sources = {"delta:multiplicative:0.5"};
    config.interventions = {"none"};
    config.controls = {};
    config.seeds = {0};
    std::vector<double> logits;
    {
        const RunMatrix matrix = run(config, "", 1);
        logits = matrix.runs[1].max_logit;
    }
    ASSERT_EQ(logits.size(), 6U);  // of steps 0, 5, …, 20, and 24
    const std::vector<std::string> guards{"guard:threshold=0.001", fmt::format("guard:threshold={:.17g}", logits[2]),
                                          "guard:threshold=1000",
                                          "guard:action=lower_rate:threshold=" + fmt::format("{:.17g}", logits[3])};
    config.interventions.insert(config.interventions.end(), guards.begin(), guards.end());
    const RunMatrix shared = run(config, folder / "shared", 1);
    config.interventions = guards;  // no run to take steps over from
    const RunMatrix alone = run(config, folder / "alone", 1);
    ASSERT_EQ(shared.runs.size(), 6U);
    ASSERT_EQ(alone.runs.size(), 5U);
    std::set<std::int64_t> triggers;
    for (std::size_t i = 0; i < guards.size(); ++i) {
        const RunResult &one = shared.runs[i + 2], &two = alone.runs[i + 1];
        ASSERT_EQ(one.intervention, two.intervention);
        EXPECT_TRUE(one.finished);
        EXPECT_EQ(one.loss, two.loss);
        EXPECT_EQ(one.triggered_at, two.triggered_at);
        triggers.insert(one.triggered_at);
        expect_same_record(folder / ("shared/" + one.file), folder / ("alone/" + two.file));
        EXPECT_TRUE(fs::exists(gpt::checkpoint_path(folder / ("shared/" + one.file))));
    }
    EXPECT_TRUE(triggers.contains(0));
    EXPECT_TRUE(triggers.contains(-1));
    EXPECT_GE(triggers.size(), 3U);
    config.interventions.insert(config.interventions.begin(), "none");
    expect_same(shared, run(config, "", 3));
}

TEST(Matrix, RefusesRecordsOfAnotherConfiguration) {
    const Folder folder;
    MatrixConfig config = small();
    config.sources = {"delta:multiplicative:0.5"};
    config.interventions = {"none"};
    config.controls = {};
    config.seeds = {0};
    (void)run(config, folder / "m.runs");
    config.train.schedule.learning_rate *= 2;
    try {
        (void)run(config, folder / "m.runs");
        FAIL() << "was not refused";
    } catch (const RequestError& error) {
        EXPECT_THAT(error.what(), HasSubstr("another configuration"));
    }
    const RunMatrix again =
        run_matrix(config, text(), {.folder = folder / "m.runs", .replace = true, .command_line = ""}, 1, {}, {});
    expect_same(again, run(config));
}

TEST(Matrix, RefusesBeforeTheFirstStep) {
    MatrixConfig config = small();
    config.sources.push_back("ffn_output:fixed:1ulp");
    int steps = 0;
    EXPECT_THROW((void)run_matrix(config, text(), {}, 1, [&](auto, auto, auto&) { ++steps; }, {}), RequestError);
    EXPECT_EQ(steps, 0);
}

TEST(Matrix, AnUnwritableFolderIsSaid) {
    const Folder folder;
    std::ofstream(folder / "file") << "not a folder";
    EXPECT_THROW((void)run(small(), folder / "file/m.runs"), WorkError);
}

}  // namespace
}  // namespace faultline
