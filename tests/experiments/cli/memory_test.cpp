// SPDX-License-Identifier: Apache-2.0
// Memory that is not there, as a user meets it: said before it is taken and before anything is written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "support.hpp"
#include "texts.hpp"

namespace faultline::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

class Memory : public testing::Test {
  protected:
    Memory() {
        folder.write("text", text_of_squares(900));
        folder.write("sweep.toml",
                     "[matrix]\nsource = [\"delta:multiplicative:0.1\"]\n[train]\ndata = \"text\"\n"
                     "layers = 1\nwidth = 16\ncontext = 32\nbatch = 8\nsteps = 2\n");
    }
    /// Exit 1, one sentence, and the folder has what it had.
    void expect_refused(const std::vector<std::string>& command, const std::string& mib, const std::string& why) const {
        const auto files = [&] {
            return std::distance(std::filesystem::directory_iterator(folder / ""),
                                 std::filesystem::directory_iterator());
        };
        const auto before = files();
        const Outcome outcome = run_program(command, {{"FAULTLINE_MEMORY_MIB", mib}});
        EXPECT_EQ(outcome.status, 1);
        EXPECT_THAT(outcome.out, IsEmpty());
        EXPECT_THAT(lines(outcome.err), ElementsAre(AllOf(StartsWith("faultline " + command.front() + ": "),
                                                          HasSubstr("not enough memory: "), HasSubstr(why),
                                                          HasSubstr(": expected at most the "))));
        EXPECT_EQ(files(), before);
    }
    std::vector<std::string> train(const std::vector<std::string>& more) const {
        std::vector<std::string> all{"train", "--data", folder / "text", "--threads", "1", "-o", folder / "run.h5"};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    Folder folder;
};

// A million layers have 49,280 parameters each, and a vocabulary of a hundred million 64 a word: in fp32 and once more as bf16
// operands held in fp32, 8 bytes of each.
TEST_F(Memory, OfAModelThatNoMachineHolds) {
    expect_refused(train({"--layers", "1000000"}), "", " GiB: weights 367.16, ");
    expect_refused(train({"--vocab", "99999999"}), "", " GiB: weights 47.68, ");
    expect_refused(train({"--layers", "1048576", "--width", "1048576", "--heads", "1048576", "--vocab", "1073741824",
                          "--context", "100", "--batch", "1048576"}),
                   "", "the run needs more than 16 EiB");
}

TEST_F(Memory, OfARunIsPlannedAndPrinted) {
    expect_refused(train({"--steps", "1"}), "9", "the 9.0 MiB that FAULTLINE_MEMORY_MIB allows");
    expect_refused(train({"--steps", "1", "--ranks", "2"}), "20", "a rank needs 1");
    const Outcome done = run_program(train({"--steps", "1"}), {{"FAULTLINE_MEMORY_MIB", "20"}});
    EXPECT_EQ(done.status, 0) << done.err;
    EXPECT_THAT(done.err, HasSubstr("memory 1"));
    EXPECT_THAT(done.err, AllOf(HasSubstr(" MiB: weights 0.9, gradient "), HasSubstr(", moments 0.9, activations ")));
}

TEST_F(Memory, OfSeveralRunsAtATime) {
    const std::vector<std::string> matrix{
        "dissociate", "--data", folder / "text", "--layers", "1",  "--width",      "16", "--context", "32",
        "--batch",    "8",      "--steps",       "2",        "-o", folder / "m.h5"};
    std::vector<std::string> many = matrix;
    many.insert(many.end(), {"--threads", "4"});
    expect_refused(many, "5", ", and 4 at a time ");
    expect_refused(matrix, "1", "a run needs 2");
    const std::vector<std::string> sweep{"sweep", folder / "sweep.toml", "-o", folder / "s"};
    many = sweep;
    many.insert(many.end(), {"--jobs", "2"});
    expect_refused(many, "3", ", and 2 at a time ");
    // Where nobody says how many, as many as there is room for.
    const Outcome done = run_program(sweep, {{"FAULTLINE_MEMORY_MIB", "3"}});
    EXPECT_EQ(done.status, 0) << done.err;
}

TEST_F(Memory, OfData) {
    std::filesystem::resize_file(folder / "text", 1 << 20);
    expect_refused(train({}), "4", "text: not enough memory: 1.0 MiB as token ids need 5.0 MiB");
}

TEST_F(Memory, IsAWholeNumberOfMib) {
    const Outcome outcome = run_program(train({}), {{"FAULTLINE_MEMORY_MIB", "4G"}});
    EXPECT_EQ(outcome.status, 2);
    EXPECT_EQ(outcome.err,
              "faultline train: FAULTLINE_MEMORY_MIB: \"4G\": expected the MiB of memory that a run may use, 1 "
              "or more\n");
}

}  // namespace
}  // namespace faultline::test
