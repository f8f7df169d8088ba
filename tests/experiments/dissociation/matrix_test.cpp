// SPDX-License-Identifier: Apache-2.0
// The matrix on a model of a few thousand parameters: threads, interruption, resumption, what is refused, what is written.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <set>

#include <unistd.h>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/base/error.hpp>
#include <faultline/dissociation/report.hpp>
#include <faultline/dissociation/source.hpp>
#include <faultline/gpt/run.hpp>
#include <faultline/record/record_reader.hpp>

namespace faultline {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Folder {
  public:
    Folder() : path_(fs::temp_directory_path() / ("matrix" + std::to_string(::getpid()) + std::to_string(counter_++))) {
        fs::create_directories(path_);
    }
    ~Folder() { fs::remove_all(path_); }
    std::string operator/(const std::string& name) const { return (path_ / name).string(); }

  private:
    static inline int counter_ = 0;
    fs::path path_;
};

const gpt::TokenData& text() {
    static const gpt::TokenData data = [] {
        std::string words;
        for (int i = 0; i < 30000; ++i) words += "the quick brown fox jumps over the lazy dog "[(i * i + i / 7) % 44];
        return gpt::tokens_of_text(words);
    }();
    return data;
}

MatrixConfig small() {
    MatrixConfig config;
    config.train.model = {.layers = 2, .width = 16, .heads = 2, .context = 16, .attention = {}};
    config.train.steps = 25;
    config.train.batch = 2;
    config.train.schedule.warmup = 2;
    config.train.monitor_every = 5;
    config.train.validate_every = 0;
    config.train.validation_batches = 1;
    config.sources = {"delta:multiplicative:0.5", "ffn_output:per_column:0.1"};
    config.interventions = {"none", "project", "guard:threshold=0.01"};
    config.controls = {"project"};
    config.seeds = {0, 1};
    return config;
}

RunMatrix run(const MatrixConfig& config, const std::string& folder = "", int threads = 2) {
    return run_matrix(config, text(), {.folder = folder, .replace = false, .command_line = "test"}, threads, {}, {});
}

/// What is said of a matrix that cannot be; "" where it was made.
std::string refusal(const MatrixConfig& config) {
    try {
        (void)run(config);
    } catch (const RequestError& error) {
        return error.what();
    }
    return "";
}

void expect_same(const RunMatrix& a, const RunMatrix& b) {
    ASSERT_EQ(a.runs.size(), b.runs.size());
    for (std::size_t i = 0; i < a.runs.size(); ++i) {
        EXPECT_EQ(a.runs[i].sigma_q, b.runs[i].sigma_q) << i;
        EXPECT_EQ(a.runs[i].max_logit, b.runs[i].max_logit) << i;
        EXPECT_EQ(a.runs[i].loss, b.runs[i].loss) << i;
        EXPECT_EQ(a.runs[i].validation_loss, b.runs[i].validation_loss) << i;
        EXPECT_EQ(a.runs[i].injected_rms, b.runs[i].injected_rms) << i;
        EXPECT_EQ(a.runs[i].removed_fraction, b.runs[i].removed_fraction) << i;
        EXPECT_EQ(a.runs[i].triggered_at, b.runs[i].triggered_at) << i;
    }
}

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

TEST(Report, SaysTheSameThreeTimes) {
    const Folder folder;
    const RunMatrix matrix = run(small(), folder / "m.runs");
    const nlohmann::json json = nlohmann::json::parse(to_json(matrix));
    EXPECT_EQ(json["schema"], "faultline.dissociation/1");
    EXPECT_EQ(json["runs"].size(), matrix.runs.size());
    EXPECT_EQ(json["table"].size(), 8U);
    EXPECT_EQ(json["runs"][2]["verdict"]["sigma_ratio"].get<double>(),
              matrix.runs[2].last_sigma_q() / matrix.runs[0].last_sigma_q());
    const std::string shown = table(matrix);
    for (const char* wanted :
         {"no fault", "delta:multiplicative:0.5   (50% of the rms, 50% asked", "project", "% of energy"})
        EXPECT_THAT(shown, HasSubstr(wanted));

    RecordFile file = RecordFile::create(folder / "m.h5", make_manifest("dissociation", "", "", 0));
    write(matrix, file, "m.runs");
    file.commit();
    const RecordReader reader(folder / "m.h5");
    const Tensor sigma = reader.read("outcome/sigma_q");
    EXPECT_EQ(sigma.shape, (std::vector<std::int64_t>{3, 3, 2}));
    EXPECT_EQ(sigma.to_double()[0], matrix.runs[0].last_sigma_q());  // none, none, seed 0
    EXPECT_EQ(sigma.to_double()[1], matrix.runs[8].last_sigma_q());  // none, none, seed 1
    EXPECT_TRUE(std::isnan(sigma.to_double()[4]));                   // no guard without a fault
    EXPECT_EQ(reader.read_strings("outcome/source")[1], "delta:multiplicative:0.5");
    EXPECT_EQ(reader.read("series/loss").shape, (std::vector<std::int64_t>{16, 6}));
    EXPECT_EQ(RecordReader(folder / ("m.runs/" + matrix.runs[3].file)).manifest().kind, "run");
}

// At every site of the trainer's kernel and of the model: where a fault may stand it does something, and elsewhere it is
// refused before the first run. Layer 2 of two is the place of the final norm and the logits.
TEST(Matrix, FaultsStandInLayersAndHeadsOfTheModel) {
    MatrixConfig config = small();
    config.train.steps = 1;
    config.interventions = {"none"};
    config.controls = {};
    config.seeds = {0};
    std::vector<std::string> sites{"delta", "row_max"};
    for (const ModelSiteInfo& site : model_sites()) sites.emplace_back(site.name);
    for (const std::string& site : sites)
        for (int layer = 0; layer <= 3; ++layer) {
            const std::string source = fmt::format("{}:multiplicative:0.1:layers={}", site, layer);
            config.sources = {source};
            const bool stands = site == "logits"                  ? layer == 2
                                : site == "layer_norm_statistics" ? layer <= 2
                                                                  : layer <= 1;
            if (stands) {
                const RunMatrix matrix = run(config);
                ASSERT_EQ(matrix.runs.size(), 2U) << source;
                EXPECT_GT(matrix.runs[1].injected_rms, 0) << source;
                continue;
            }
            const std::string expected = site == "logits"                  ? "expected layer 2 at logits"
                                         : site == "layer_norm_statistics" ? "expected a layer from 0 to 2 at"
                                                                           : "expected a layer from 0 to 1 at";
            EXPECT_THAT(refusal(config),
                        HasSubstr(fmt::format("source \"{0}\", intervention \"none\": fault \"{0}\": layer {1}: {2}",
                                              source, layer, expected)));
        }
    for (const std::string& site : sites) {
        if (site == "layer_norm_statistics") continue;  // has no heads
        config.sources = {site + ":multiplicative:0.1:heads=0,2"};
        EXPECT_THAT(refusal(config), HasSubstr("head 2: expected a head from 0 to 1 at " + site));
    }
    // One of several, and the later fault of a source.
    config.sources = {"delta:multiplicative:0.1+ds:fixed:0.1:layers=1,2"};
    EXPECT_THAT(refusal(config), HasSubstr("fault \"ds:fixed:0.1:layers=1,2\": layer 2: expected"));
}

// A column is one of the model's at the site, and a step one of the run's; what is asked for beyond is refused before the first.
TEST(Matrix, FaultsStandInColumnsOfTheModelAndStepsOfTheRun) {
    MatrixConfig config = small();
    config.interventions = {"none"};
    config.controls = {};
    config.seeds = {0};
    config.train.steps = 2;
    const auto said = [&](const std::string& fault) {
        config.sources = {fault};
        return refusal(config);
    };
    for (const ModelSiteInfo& info : model_sites()) {
        const std::string site(info.name);
        const int columns = site == "logits"                    ? config.train.model.vocabulary
                            : site == "layer_norm_statistics"   ? 2
                            : site == "ffn_activation_gradient" ? 64
                                                                : 16;
        config.sources = {fmt::format("{}:fixed:0.1:column={}", site, columns - 1)};
        const RunMatrix matrix = run(config);
        ASSERT_EQ(matrix.runs.size(), 2U) << site;
        EXPECT_GT(matrix.runs[1].injected_rms, 0) << site;
        EXPECT_THAT(said(fmt::format("{}:fixed:0.1:column={}", site, columns)),
                    HasSubstr(fmt::format("column {0}: expected less than the {0} columns of {1}", columns,
                                          site == "optimizer_update" ? "wte" : site)));
    }
    // A learned gain of QK normalisation has head_dim columns, 8, and stands in a layer.
    config.train.model.qk_norm = gpt::QkNorm::learned;
    EXPECT_THAT(said("optimizer_update:fixed:0.1:column=8:layers=1"), HasSubstr("the 8 columns of layer1."));
    config.train.model.qk_norm = gpt::QkNorm::none;
    config.train.model.vocabulary = 257;
    EXPECT_THAT(said("logits:fixed:0.1:heads=1"), HasSubstr("the 257 columns of logits are no 2 equal blocks"));
    EXPECT_THAT(said("delta:fixed:0.1:from=2"),
                HasSubstr("delta:fixed:0.1:from=2\": from: 2: expected a step of the run, 0 to 1"));
}

// A matrix of width 16 has 16 directions; along all of them lies the whole update.
TEST(Matrix, AProjectionHasNoMoreDirectionsThanTheWidth) {
    MatrixConfig config = small();
    config.train.steps = 2;
    config.sources = {"delta:multiplicative:0.1"};
    config.controls = {};
    config.seeds = {0};
    config.interventions = {"project:k=16"};
    const RunMatrix matrix = run(config);
    ASSERT_EQ(matrix.runs.size(), 2U);
    constexpr double of_doubles = 1e-9;  // bases of 16 columns in doubles
    EXPECT_NEAR(matrix.runs[1].removed_fraction, 1, of_doubles);
    config.interventions = {"project:k=17"};
    const std::string expected =
        "intervention \"project:k=17\": k: 17: expected directions that W_Q and W_K have, 1 to 16";
    EXPECT_EQ(refusal(config), expected);
    config.interventions = {"none"};
    config.controls = {"project:removal=shrink:k=17"};
    EXPECT_THAT(refusal(config), HasSubstr("k: 17: expected directions"));
}

TEST(Source, IsFaultsAndPlans) {
    const Source s = parse_source("plan:exact+plan:repo-2510.04212:layers=1:heads=0:untiled+delta:fixed:0.1", 32);
    ASSERT_EQ(s.attention.size(), 2U);
    EXPECT_EQ(s.attention[0].layer, -1);
    EXPECT_EQ(s.attention[1].layer, 1);
    EXPECT_EQ(s.attention[1].heads, std::vector<int>{0});
    EXPECT_EQ(s.attention[1].plan->schedule.block_k, 0);
    EXPECT_EQ(s.faults.size(), 1U);
    EXPECT_TRUE(parse_source("none", 32).is_none());
    EXPECT_EQ(parse_source("plan:fa2:correction=delta_p_dp", 32).attention[0].plan->schedule.delta_from,
              DeltaFrom::p_dp);
    EXPECT_TRUE((*parse_source("plan:fa2:exact=o_cast,lse", 32).attention[0].plan)[Site::o_cast].is_exact());
    for (const char* word :
         {"plan", "plan:nokernel", "plan:fa2:layers=0:layers=1", "plan:fa2:untiled:untiled", "plan:fa2:exact=ocast",
          "plan:fa2:layer=1", "plan:fa2:layers=x", "plan:fa2:correction=qk_norm", ""})
        EXPECT_THROW((void)parse_source(word, 32), RequestError) << word;
}

}  // namespace
}  // namespace faultline
