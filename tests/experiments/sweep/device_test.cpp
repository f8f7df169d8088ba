// SPDX-License-Identifier: Apache-2.0
// A sweep whose runs a card makes, with faults planted there and hooks in its trainer; skipped where there is no card.
#include <csignal>
#include <thread>

#include <gmock/gmock.h>

#include "small_sweep.hpp"

namespace faultline::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

/// Whether runs can be made there; `said` is of a sweep that was tried.
bool no_card(const Outcome& said) {
    return !fs::exists("/dev/nvidiactl") || said.err.find("this build has no device") != std::string::npos;
}

// The guard's threshold is passed in the first steps; projection and guard go through the trainer's hooks, the faults are planted.
constexpr const char* crossed =
    "intervention = [\"none\", \"project\", \"qk_norm\", \"guard:threshold=0.001\"]\n"
    "control = [\"none\", \"project\", \"qk_norm\"]";

TEST(SweepOnACard, PrintsTheTableOfDissociate) {
    const Folder folder;
    const std::string file = small_sweep(folder, 40, crossed, "device = \"cuda\"");
    const Outcome run = run_program({"sweep", file, "-o", folder / "s", "--quiet", "--jobs", "4"});
    if (no_card(run)) GTEST_SKIP() << "no card";
    ASSERT_EQ(run.status, 0) << run.err;
    std::vector<std::string> words{"dissociate", "--quiet", "--device", "cuda", "--source", "delta:multiplicative:0.2"};
    for (const char* what : {"none", "project", "qk_norm", "guard:threshold=0.001"})
        words.insert(words.end(), {"--intervention", what});
    for (const char* what : {"project", "qk_norm"}) words.insert(words.end(), {"--control", what});
    for (const auto& [key, value] : std::map<std::string, std::string>{{"layers", "2"},
                                                                       {"width", "16"},
                                                                       {"heads", "2"},
                                                                       {"context", "16"},
                                                                       {"batch", "2"},
                                                                       {"steps", "40"},
                                                                       {"validation-batches", "1"},
                                                                       {"data", folder / "text"}})
        words.insert(words.end(), {"--" + key, value});
    const Outcome in_one_process = run_program(words);
    ASSERT_EQ(in_one_process.status, 0) << in_one_process.err;
    EXPECT_EQ(run.out, in_one_process.out);
    EXPECT_THAT(run.out, HasSubstr("at step "));  // the guard acted
}

TEST(SweepOnACard, KilledAndTakenUpIsTheSweepThatNeverStopped) {
    const Folder folder;
    const std::string file = small_sweep(folder, 3000, crossed, "device = \"cuda\"");
    const Outcome whole = run_program({"sweep", file, "-o", folder / "whole", "--quiet", "--jobs", "4"});
    if (no_card(whole)) GTEST_SKIP() << "no card";
    ASSERT_EQ(whole.status, 0) << whole.err;
    const std::vector<std::string> cut{"sweep", file, "-o", folder / "cut", "--quiet", "--jobs", "4"};
    {
        Child launcher(cut, folder / "err");
        const auto saved = [&] { return run_files(folder / "cut", ".checkpoint.safetensors").size(); };
        for (int i = 0; i < 6000 && saved() < 3; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        launcher.signal(SIGINT);
        EXPECT_EQ(launcher.wait(), 1);
    }
    EXPECT_GE(status_of(folder / "cut")["counts"]["stopped"], 1);
    const Outcome rest = run_program(cut);
    EXPECT_EQ(rest.status, 0) << rest.err;
    EXPECT_EQ(rest.out, whole.out);
    EXPECT_EQ(series_of(folder / "cut"), series_of(folder / "whole"));
}

// What the device cannot plant is said before a run begins.
TEST(SweepOnACard, RefusesFaultsThatTheDeviceHasNot) {
    const Folder folder;
    const std::string file =
        small_sweep(folder, 40, "site = [\"s_accumulate\"]\nlaw = [\"fixed\"]\nmagnitude = [0.1]", "device = \"cuda\"");
    const Outcome run = run_program({"sweep", file, "-o", folder / "s", "--quiet"});
    if (no_card(run)) GTEST_SKIP() << "no card";
    EXPECT_EQ(run.status, 2);
    EXPECT_THAT(run.err, HasSubstr("source \"s_accumulate:fixed:0.1\", intervention \"none\": device cuda: fault"));
    EXPECT_FALSE(fs::exists(folder / "s"));
}

}  // namespace
}  // namespace faultline::test
