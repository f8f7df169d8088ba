// SPDX-License-Identifier: Apache-2.0
// Keys, names and states of runs, without runs.
#include <csignal>
#include <fstream>

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <faultline/base/error.hpp>
#include <faultline/sweep/cell_state.hpp>
#include <faultline/sweep/slurm.hpp>
#include <faultline/sweep/status.hpp>

#include "support.hpp"

namespace faultline::sweep {
namespace {

using test::Folder;

Cell cell() {
    Cell c{"", "delta:multiplicative:0.2", "none", 3, 100, key_of("a run"), ""};
    c.name = name_of(c);
    return c;
}

TEST(SweepCell, KeysAreStableAndNamesSayWhatTheyAre) {
    // XXH3-128 of the text by the xxhsum program (xxHash 0.8.1), its first 12 digits.
    EXPECT_EQ(key_of("a run"), "220ceb77699f");
    EXPECT_EQ(cell().name, std::string("delta-multiplicative-0.2__none__seed3__") + "220ceb77699f");
    Cell longest = cell();
    longest.recipe = longest.source = longest.intervention = std::string(1000, 'x');
    longest.seed = ~0ULL;
    EXPECT_LE(name_of(longest).size() + std::string(".checkpoint.safetensors.partial").size(), 255U);  // NAME_MAX
}

TEST(SweepCell, StateFollowsLockAndResult) {
    const Folder folder;
    std::filesystem::create_directories(folder / "s/runs");
    const Cell c = cell();
    const CellFiles files = files_of(folder / "s", c.name);
    EXPECT_EQ(state_of(folder / "s", c).state, State::to_do);
    int ready[2], go[2];
    ASSERT_EQ(::pipe(ready) + ::pipe(go), 0);
    const pid_t child = ::fork();
    if (child == 0) {  // another process holds the lock
        const auto lock = FileLock::take(files.lock);
        lock->say(41);
        char byte = lock ? 1 : 0;
        (void)!::write(ready[1], &byte, 1);
        (void)!::read(go[0], &byte, 1);
        ::_exit(0);
    }
    char byte = 0;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
    for (int i = 0; i < 3; ++i) {  // looking does not take it away
        const CellState seen = state_of(folder / "s", c);
        EXPECT_EQ(seen.state, State::at_work);
        EXPECT_EQ(seen.steps, 41);
        EXPECT_THAT(seen.what, ::testing::EndsWith(", process " + std::to_string(child)));
        EXPECT_FALSE(FileLock::take(files.lock).has_value());
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    EXPECT_EQ(state_of(folder / "s", c).state, State::stopped);
    EXPECT_EQ(state_of(folder / "s", c).steps, 41);
    write_failed(files, "no room");
    EXPECT_EQ(state_of(folder / "s", c).state, State::failed);
    EXPECT_EQ(state_of(folder / "s", c).what, "no room");
    forget_failure(files);
    EXPECT_EQ(state_of(folder / "s", c).state, State::stopped);
    write_done(files, 100, "");
    EXPECT_EQ(state_of(folder / "s", c).state, State::stopped);  // the record is gone: it is to be made anew
    std::ofstream(files.record) << "record";
    EXPECT_EQ(state_of(folder / "s", c).state, State::done);
    write_done(files, 7, "step 7, loss");
    EXPECT_EQ(state_of(folder / "s", c).state, State::not_finite);
    EXPECT_EQ(state_of(folder / "s", c).what, "step 7, loss");
}

// By the name squeue shows whose jobs they are.
TEST(SweepSlurm, JobsAreNamedAfterTheFolder) {
    EXPECT_EQ(job_name("/data/quick"), "quick");
    EXPECT_EQ(job_name("/data/lr.v2.sweep"), "lr.v2");
    EXPECT_EQ(job_name("/data/new/"), "new");
    EXPECT_EQ(job_name("/data/it's a\nsweep"), "it-s-a-sweep");
    EXPECT_EQ(job_name("/data/-x"), "sweep-x");
    EXPECT_EQ(job_name("/"), "sweep");
    EXPECT_EQ(job_name("/data/" + std::string(200, 'x')).size(), 60U);
    EXPECT_EQ(job_name("."), std::filesystem::current_path().filename().string());
}

// A sentence is printed as it was said; what a file has put in its place cannot reach the terminal as a command.
TEST(SweepStatus, SentencesAreEscapedOnce) {
    EXPECT_EQ(sentence("source \"ds:fixed:1\": a\\n\": expected"), "source \"ds:fixed:1\": a\\n\": expected");
    EXPECT_EQ(sentence("red \x1b[31m\n"), "red \\x1b[31m\\n");
    EXPECT_EQ(sentence(""), "");
    EXPECT_EQ(sentence("\"\""), "\"\"");
}

// More runs than an array has tasks: several arrays, none beyond index 1000 (Slurm's MaxArraySize of 1001).
TEST(SweepSlurm, LongSweepsAreSeveralArrays) {
    const Folder folder;
    std::vector<Cell> cells(2001, cell());
    Slurm slurm;
    slurm.program = {"/opt/a b/faultline", "sweep", "one"};
    slurm.name = "sweep";
    slurm.gres = "gpu:1";
    slurm.lines = {"--account=x"};
    slurm.at_once = 7;
    const auto scripts = write_scripts(folder / "s", cells, slurm, {"faultline", "sweep", "merge"});
    ASSERT_EQ(scripts.size(), 3U);
    EXPECT_EQ(scripts[0].array, "0-999%7");
    EXPECT_EQ(scripts[2].array, "0-0%7");
    std::ifstream in(scripts[0].path);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    for (const char* line :
         {"#!/bin/bash\n", "#SBATCH --gres=gpu:1\n", "#SBATCH --account=x\n", "exec '/opt/a b/faultline' sweep one "})
        EXPECT_THAT(text, ::testing::HasSubstr(line));
    // The shell reads it (bash -n checks the syntax alone).
    EXPECT_EQ(std::system(("bash -n '" + scripts[0].path + "'").c_str()), 0);
}

}  // namespace
}  // namespace faultline::sweep
