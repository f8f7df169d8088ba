// SPDX-License-Identifier: Apache-2.0
// A sweep under a real Slurm on this machine, Debian's slurm-wlm, whose daemons live in a temporary folder as long as the test.
#include <fstream>
#include <iterator>

#include <gmock/gmock.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "paths.hpp"
#include "small_sweep.hpp"

namespace faultline::test {
namespace {

constexpr int skipped = 77;  // of with_slurm.sh

std::string slurp(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

/// Runs a script under a Slurm of its own. What its daemons leave behind is reaped here, and nowhere left.
int with_slurm(const Folder& folder, const std::string& script) {
    (void)::prctl(PR_SET_CHILD_SUBREAPER, 1);
    folder.write("script", script);
    const std::string runner = (source_dir() / "tests/experiments/sweep/with_slurm.sh").string();
    const std::string command =
        fmt::format("timeout -k 10 60 '{}' bash '{}' >'{}' 2>&1", runner, folder / "script", folder / "said");
    const int status = std::system(command.c_str());
    for (int i = 0; i < 500 && ::waitpid(-1, nullptr, WNOHANG) >= 0; ++i) ::usleep(10000);
    (void)::prctl(PR_SET_CHILD_SUBREAPER, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Submitted, run task by task and merged by the job that waits for them; submitted again there is nothing to do, and a run
// that is removed is the only one that is submitted then.
TEST(Sweep, RunsAsASlurmJobArray) {
    const Folder folder;
    const std::string file = small_sweep(folder, 20, "seeds = [0, 1]");
    const int status = with_slurm(folder, fmt::format(R"(
set -eu
sweep() {{ '{0}' sweep '{1}' -o '{2}' --slurm --time 00:05:00 "$@"; }}
rest() {{ for _ in $(seq 200); do squeue -h | grep -q . || return 0; sleep 0.1; done; squeue; return 1; }}
sweep --jobs 4
rest
sweep
rm '{2}'/runs/none__none__seed1__*.h5
sweep
rest
)",
                                                      program(), file, folder / "s"));
    const std::string said = slurp(folder / "said");
    if (status == skipped) GTEST_SKIP() << said;
    ASSERT_EQ(status, 0) << said;
    EXPECT_THAT(said, ::testing::HasSubstr("4 runs in 1 array; 0 of 4 runs are done, 4 to do"));
    EXPECT_THAT(said, ::testing::HasSubstr("nothing to submit: 4 of 4 runs are done"));
    EXPECT_THAT(said, ::testing::HasSubstr("1 run in 1 array; 3 of 4 runs are done"));
    EXPECT_EQ(status_of(folder / "s")["complete"], true);
    // The merge's job printed the table, which is that of the same sweep made here.
    const Outcome local = run_program({"sweep", file, "-o", folder / "local", "--quiet"});
    EXPECT_EQ(local.status, 0) << local.err;
    EXPECT_THAT(slurp(folder / "s/slurm/merge.log"), ::testing::EndsWith(local.out));
}

}  // namespace
}  // namespace faultline::test
