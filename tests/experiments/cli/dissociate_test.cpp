// SPDX-License-Identifier: Apache-2.0
// faultline dissociate as a user meets it, on a small text and a small model: table, JSON, file, resumption, refusals, and
// that the configurations that come with it can be read.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/record/record_reader.hpp>

#include "paths.hpp"
#include "support.hpp"
#include "texts.hpp"

namespace faultline::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

std::vector<std::string> small(const Folder& folder, const std::vector<std::string>& more) {
    folder.write("text", text_of_letters());
    std::vector<std::string> arguments{"dissociate",
                                       "--data",
                                       folder / "text",
                                       "--layers",
                                       "1",
                                       "--width",
                                       "16",
                                       "--heads",
                                       "1",
                                       "--context",
                                       "16",
                                       "--batch",
                                       "2",
                                       "--steps",
                                       "20",
                                       "--validation-batches",
                                       "1",
                                       "--source",
                                       "delta:multiplicative:0.2",
                                       "--intervention",
                                       "none",
                                       "--intervention",
                                       "project",
                                       "--control",
                                       "none"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
}

TEST(Dissociate, UnderALauncherIsRefusedOnce) {
    const Folder folder;
    const Outcome first = run_program(small(folder, {"-o", folder / "a.h5"}),
                                      {{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "0"}});
    EXPECT_EQ(first.status, 2);
    EXPECT_THAT(first.err, HasSubstr("OMPI_COMM_WORLD_SIZE: says 2 ranks, and each would make all runs: expected one"));
    const Outcome second = run_program(small(folder, {"-o", folder / "a.h5"}),
                                       {{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}});
    EXPECT_EQ(second.status, 2);
    EXPECT_EQ(second.err, "");
}

TEST(Dissociate, PrintsATableAndJson) {
    const Folder folder;
    const Outcome run = run_program(small(folder, {"--quiet"}));
    EXPECT_EQ(run.status, 0) << run.err;
    EXPECT_EQ(run.err, "");
    EXPECT_THAT(run.out, ::testing::StartsWith("1 layer, width 16, 1 head, context 16, batch 2, "));
    for (const char* wanted : {"no fault", "delta:multiplicative:0.2", "project", "% of energy", "validation"})
        EXPECT_THAT(run.out, HasSubstr(wanted));
    const Outcome as_json = run_program(small(folder, {"--json", "--quiet", "--threads", "1"}));
    const json object = json::parse(as_json.out);
    EXPECT_EQ(object["complete"], true);
    EXPECT_EQ(object["runs"].size(), 3U);
    // Settings are what they are: numbers, truth values, names.
    const json& training = object["training"];
    EXPECT_EQ(training["optimizer"], "adamw");
    EXPECT_EQ(training["qk-norm"], "none");
    EXPECT_EQ(training["layers"], 1);
    EXPECT_EQ(training["lr"], 0.003);
    EXPECT_EQ(training["bf16"], true);
    EXPECT_NEAR(object["runs"][1]["injected_rms"].get<double>(), 0.2, 1e-6);  // of floats
}

TEST(Dissociate, WritesAFileWithItsRuns) {
    const Folder folder;
    const Outcome run = run_program(small(folder, {"-o", folder / "m.h5", "--seeds", "0,1"}));
    EXPECT_EQ(run.status, 0) << run.err;
    const RecordReader reader(folder / "m.h5");
    EXPECT_EQ(reader.manifest().kind, "dissociation");
    EXPECT_EQ(reader.read("outcome/train_loss").shape, (std::vector<std::int64_t>{2, 2, 2}));
    EXPECT_EQ(reader.attribute("", "complete"), "1");
    EXPECT_TRUE(std::filesystem::exists(folder / "m.runs/none__none__seed1.h5"));
    // It stands, so the same command is refused; with --force the runs are read and not made again.
    EXPECT_EQ(run_program(small(folder, {"-o", folder / "m.h5"})).status, 2);
    const auto before = std::filesystem::last_write_time(folder / "m.runs/none__none__seed1.h5");
    const Outcome again = run_program(small(folder, {"-o", folder / "m.h5", "--seeds", "0,1", "--force"}));
    EXPECT_EQ(again.status, 0) << again.err;
    EXPECT_EQ(again.out, run.out);
    EXPECT_EQ(std::filesystem::last_write_time(folder / "m.runs/none__none__seed1.h5"), before);
}

TEST(Dissociate, ControlsAreThoseOfTheInterventionsAskedFor) {
    const Folder folder;
    const auto controls = [&](const std::vector<std::string>& interventions) {
        std::vector<std::string> arguments = small(folder, {"--json", "--quiet", "--steps", "2"});
        // small() asks for two interventions and no control but none.
        const auto first = std::ranges::find(arguments, "--intervention");
        const auto last = std::ranges::find(arguments, "--control") + 2;
        const auto at = arguments.erase(first, last);
        std::vector<std::string> words;
        for (const std::string& word : interventions) words.insert(words.end(), {"--intervention", word});
        arguments.insert(at, words.begin(), words.end());
        std::vector<std::string> found;
        const json printed = json::parse(run_program(arguments).out);
        for (const json& run : printed["runs"])
            if (run["source"] == "none") found.push_back(run["intervention"]);
        return found;
    };
    EXPECT_EQ(controls({"none"}), std::vector<std::string>{"none"});
    EXPECT_EQ(controls({"none", "qk_norm", "project:removal=shrink"}), (std::vector<std::string>{"none", "qk_norm"}));
}

TEST(Dissociate, AnInterventionThatNeverComesIsRefused) {
    const Folder folder;
    const Outcome never = run_program(small(folder, {"--intervention", "repair:from=20"}));
    EXPECT_EQ(never.status, 2);
    EXPECT_THAT(never.err, HasSubstr("repair:from=20\": from: 20: expected a step of the run, 0 to 19"));
}

TEST(Dissociate, ASeedIsGivenOnce) {
    const Folder folder;
    const Outcome twice = run_program(small(folder, {"--seeds", "3,0,3"}));
    EXPECT_EQ(twice.status, 2);
    EXPECT_THAT(twice.err, HasSubstr("--seeds: 3: is there twice: expected it once"));
}

// The run has no step, hence no record and no numbers; the others are done and stand in table and file.
TEST(Dissociate, ARunThatEndsInItsFirstStep) {
    const Folder folder;
    const Outcome run = run_program(small(folder, {"-o", folder / "m.h5", "--source", "ffn_output:fixed:1e45"}));
    EXPECT_EQ(run.status, 0) << run.err;
    EXPECT_THAT(run.out, HasSubstr("ffn_output:fixed:1e45, none, seed 0: stopped, step 0, "));
    EXPECT_THAT(run.out, testing::ContainsRegex("\nffn_output:fixed:1e45\n  none +loss +- +- +- +- +- +-"));
    EXPECT_TRUE(run.out.ends_with("\n"));
    EXPECT_TRUE(std::filesystem::exists(folder / "m.h5"));
    EXPECT_FALSE(std::filesystem::exists(folder / "m.runs/ffn_output-fixed-1e45__none__seed0.h5"));
}

// Killed three times, once while nothing but checkpoints of runs stands there, and taken up each time: the table and the
// records are those of a matrix that was never stopped. The interventions are those of the full matrix, a guard's among
// them, which takes over what the run without intervention did.
TEST(Dissociate, KilledAndStartedAgainIsTheMatrixThatNeverStopped) {
    const Folder folder;
    const auto matrix = [&](const std::string& name) {
        return small(folder, {"-o", folder / name, "--steps", "300", "--intervention", "guard:threshold=0.5",
                              "--intervention", "project:removal=shrink", "--threads", "2"});
    };
    const Outcome whole = run_program(matrix("whole.h5"));
    ASSERT_EQ(whole.status, 0) << whole.err;
    const auto records = [&](const std::string& name) {
        std::vector<std::string> found;
        if (!std::filesystem::exists(folder / name)) return found;
        for (const auto& entry : std::filesystem::directory_iterator(folder / name))
            if (entry.path().extension() == ".h5") found.push_back(entry.path().filename().string());
        std::ranges::sort(found);
        return found;
    };
    const auto checkpoints = [&] {
        std::size_t count = 0;
        if (std::filesystem::exists(folder / "cut.runs"))
            for (const auto& entry : std::filesystem::directory_iterator(folder / "cut.runs"))
                count += entry.path().extension() == ".safetensors" ? 1 : 0;
        return count;
    };
    for (const std::size_t stand : {1U, 2U, 4U}) {  // checkpoints at which it is killed
        Child child(matrix("cut.h5"), folder / "err");
        for (int i = 0; i < 20000 && checkpoints() < stand; ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        child.signal(SIGKILL);
        EXPECT_EQ(child.wait(), -SIGKILL);
        EXPECT_FALSE(std::filesystem::exists(folder / "cut.h5"));
    }
    const Outcome rest = run_program(matrix("cut.h5"));
    EXPECT_EQ(rest.status, 0) << rest.err;
    EXPECT_EQ(rest.out, whole.out);
    ASSERT_EQ(records("cut.runs"), records("whole.runs"));
    EXPECT_EQ(records("cut.runs").size(), 5U);
    for (const std::string& name : records("whole.runs")) {
        const RecordReader one(folder / ("whole.runs/" + name)), two(folder / ("cut.runs/" + name));
        ASSERT_EQ(one.datasets(), two.datasets()) << name;
        for (const std::string& set : one.datasets())
            EXPECT_TRUE(one.read(set).bytes == two.read(set).bytes) << name << " " << set;
    }
}

// Rate and remaining time, every few seconds where standard error is no terminal.
TEST(Dissociate, SaysHowFarItIs) {
    const Folder folder;
    Child child(small(folder, {"--steps", "1000000", "--threads", "1"}), folder / "err");
    for (int i = 0; i < 2000 && child.error().empty(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    child.signal(SIGINT);
    EXPECT_EQ(child.wait(), 1);
    EXPECT_THAT(child.error(), ::testing::ContainsRegex("%  [0-9]+ of 3000000, [0-9.e+]+/s, .* left  .*, seed 0\n"));
    EXPECT_THAT(child.error(), HasSubstr("interrupted; nothing was written"));
}

TEST(Dissociate, RefusesInOneSentence) {
    const Folder folder;
    const auto said = [&](const std::vector<std::string>& more) {
        const Outcome run = run_program(small(folder, more));
        EXPECT_EQ(run.status, 2) << run.err;
        EXPECT_EQ(lines(run.err).size(), 1U);
        return run.err;
    };
    EXPECT_THAT(said({"--source", "detla:fixed:1"}), HasSubstr("--source: fault \"detla:fixed:1\""));
    EXPECT_THAT(said({"--intervention", "guard:threshold=x"}), HasSubstr("--intervention: intervention"));
    EXPECT_THAT(said({"--monitor-every", "0"}), HasSubstr("sigma_max"));
    // Before any run is made, so that nothing of it is left.
    EXPECT_THAT(
        said({"--source", "delta:multiplicative:0.1", "--source", "plan:fa2:layers=9", "-o", folder / "never.h5"}),
        HasSubstr("source \"plan:fa2:layers=9\", intervention \"none\": attention: layer 9"));
    EXPECT_THAT(said({"--source", "delta:multiplicative:0.1:layers=7", "-o", folder / "never.h5"}),
                HasSubstr("fault \"delta:multiplicative:0.1:layers=7\": layer 7: expected layer 0 at delta"));
    EXPECT_THAT(said({"--source", "ffn_output:fixed:0.1:column=16", "-o", folder / "never.h5"}),
                HasSubstr("column 16: expected less than the 16 columns of ffn_output"));
    // What would be done twice, or not at all. small() has a source and two interventions.
    EXPECT_THAT(
        said({"--source", "delta:multiplicative:20%"}),
        HasSubstr("--source: \"delta:multiplicative:20%\": is there twice, as \"delta:multiplicative:0.2\" too"));
    EXPECT_THAT(
        said({"--source", "delta:multiplicative:0.2:layers=0"}),
        HasSubstr("\"delta:multiplicative:0.2:layers=0\": is there twice, as \"delta:multiplicative:0.2\" too"));
    EXPECT_THAT(said({"--source", "ds:fixed:0"}), HasSubstr("--source: \"ds:fixed:0\": magnitude 0: changes nothing"));
    EXPECT_THAT(said({"--source", "plan:fa2:exact=merge"}), HasSubstr("exact=merge: does nothing"));
    EXPECT_THAT(said({"--intervention", "project:k=3"}),
                HasSubstr("\"project:k=3\": is there twice, as \"project\" too"));
    EXPECT_THAT(said({"--control", "qk_clip", "--control", "qk_clip:tau=100"}),
                HasSubstr("--control: \"qk_clip:tau=100\""));
    EXPECT_THAT(said({"--seed", "3", "--seeds", "1"}), HasSubstr("--seed: means nothing with --seeds"));
    EXPECT_THAT(said({"--source", "delta:multiplicative:0.2:from=20"}),
                HasSubstr("from: 20: expected a step of the run"));
    EXPECT_THAT(said({"--data", folder / "missing"}), HasSubstr("missing"));
    folder.write("short", "too short");
    EXPECT_THAT(said({"--data", folder / "short"}), HasSubstr("short"));
    EXPECT_EQ(folder.files(), (std::vector<std::string>{"short", "text"}));
}

// Without a source only controls are run: another intervention would be in no run.
TEST(Dissociate, AnInterventionMeetsASource) {
    const Folder folder;
    folder.write("text", text_of_letters());
    const auto run = [&](const std::vector<std::string>& more) {
        std::vector<std::string> words{
            "dissociate", "--data", folder / "text", "--layers", "1",       "--width", "16",     "--heads", "1",
            "--context",  "16",     "--batch",       "2",        "--steps", "2",       "--quiet"};
        words.insert(words.end(), more.begin(), more.end());
        return run_program(words);
    };
    folder.write("both.toml", "[dissociate]\nsource = [\"none\"]\nintervention = [\"guard:threshold=0.01\"]\n");
    const Outcome both = run({"--config", folder / "both.toml"});
    EXPECT_EQ(both.status, 2);
    EXPECT_THAT(both.err,
                HasSubstr("both.toml: dissociate.intervention: \"guard:threshold=0.01\": meets no source but none"));
    EXPECT_EQ(run({"--config", folder / "both.toml", "--source", "none"}).status, 0);  // the file's may be for others
    const Outcome guard = run({"--source", "none", "--intervention", "guard:threshold=0.01"});
    EXPECT_EQ(guard.status, 2);
    EXPECT_THAT(guard.err, HasSubstr("--intervention: \"guard:threshold=0.01\": meets no source but none"));
    EXPECT_EQ(run({"--source", "none", "--intervention", "guard", "--control", "guard:threshold=100"}).status, 0);
    EXPECT_EQ(run({"--source", "none", "--intervention", "project"}).status, 0);  // a control by default
    // A repair ends faults; one beside a plan is enough.
    for (const char* repair : {"repair:from=1", "guard:action=repair"}) {
        const Outcome plan = run({"--source", "plan:fa2", "--intervention", repair});
        EXPECT_EQ(plan.status, 2);
        EXPECT_THAT(plan.err, HasSubstr(": meets no source with a fault, which it would end (a plan is none)"));
    }
    EXPECT_EQ(run({"--source", "plan:fa2+delta:fixed:0.1", "--intervention", "repair:from=1"}).status, 0);
    const Outcome over = run({"--source", "delta:fixed:0.1:until=1", "--intervention", "repair:from=1"});
    EXPECT_EQ(over.status, 2);
    EXPECT_THAT(over.err, HasSubstr("--intervention: \"repair:from=1\": ends no fault of the sources"));
    const Outcome control = run({"--source", "none", "--control", "repair:from=1"});
    EXPECT_EQ(control.status, 2);
    EXPECT_THAT(control.err, HasSubstr("--control: \"repair:from=1\": does nothing: a control has no fault"));
    const Outcome clips =
        run({"--source", "delta:fixed:0.1", "--intervention", "qk_clip:tau=0.5", "--qk-clip", "0.001"});
    EXPECT_EQ(clips.status, 2);
    EXPECT_THAT(clips.err, HasSubstr("intervention \"qk_clip:tau=0.5\": the run has qk-clip 0.001"));
    EXPECT_EQ(run({"--source", "none"}).status, 0);  // the quick matrix's interventions, asked for by nobody
}

TEST(Dissociate, ItsConfigurationsAreRead) {
    const std::filesystem::path configs = test::source_dir() / "experiments/configs";
    const std::string quick = run_program({"dissociate", "--print-config"}).out;
    int read = 0;
    for (const auto& entry : std::filesystem::directory_iterator(configs)) {
        const std::string name = entry.path().filename().string();
        if (!name.starts_with("dissociate-")) continue;
        const Outcome run = run_program({"dissociate", "--config", entry.path().string(), "--print-config"});
        EXPECT_EQ(run.status, 0) << run.err;
        if (name == "dissociate-quick.toml") {
            EXPECT_EQ(run.out, quick);  // the defaults, said as a file
        }
        ++read;
    }
    EXPECT_EQ(read, 5);
}

}  // namespace
}  // namespace faultline::test
