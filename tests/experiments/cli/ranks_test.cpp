// SPDX-License-Identifier: Apache-2.0
// faultline train on several ranks as a user starts it: --ranks, and mpirun where there is one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include <faultline/record/record_reader.hpp>

#include "paths.hpp"
#include "support.hpp"
#include "texts.hpp"

namespace faultline::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

class RanksOfTrain : public testing::Test {
  protected:
    RanksOfTrain() { folder.write("text", text_of_squares(3000)); }
    [[nodiscard]] std::vector<std::string> arguments(std::vector<std::string> more) const {
        // 64 sequences of 32 tokens are eight groups.
        std::vector<std::string> all{"train",
                                     "--data",
                                     folder / "text",
                                     "--layers",
                                     "1",
                                     "--width",
                                     "16",
                                     "--context",
                                     "32",
                                     "--batch",
                                     "64",
                                     "--warmup",
                                     "5",
                                     "--threads",
                                     "1",
                                     "--quiet",
                                     "--monitor-every",
                                     "3",
                                     "--validation-batches",
                                     "2"};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    [[nodiscard]] Outcome train(const std::vector<std::string>& more) const { return run_program(arguments(more)); }
    static void expect_same_steps(const std::string& a, const std::string& b) {
        const RecordReader one(a), two(b);
        EXPECT_EQ(one.datasets(), two.datasets());
        for (const std::string& path : one.datasets())
            EXPECT_TRUE(one.read(path).bytes == two.read(path).bytes) << path;
    }
    Folder folder;
};

std::string contents(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

/// `mpirun -n 2 faultline ARGUMENTS…` in a shell, or nothing where there is no mpirun.
class WithMpi : public RanksOfTrain {
  protected:
    void SetUp() override {
        if (std::system("command -v mpirun >/dev/null 2>&1") != 0) GTEST_SKIP() << "there is no mpirun here";
        if (!std::filesystem::exists(std::filesystem::path(program()).parent_path() /
                                     "../../lib/ranks/libfaultline_mpi.so"))
            GTEST_SKIP() << "this build found no MPI";
    }
    [[nodiscard]] Outcome mpirun(const std::vector<std::string>& more) const {
        return started(" -n 2" + words(arguments(more)));
    }
    /// Two ranks with options of their own.
    [[nodiscard]] Outcome mpirun(const std::vector<std::string>& one, const std::vector<std::string>& two) const {
        return started(" -n 1" + words(arguments(one)) + " : -n 1" + words(arguments(two)));
    }

  private:
    static std::string words(const std::vector<std::string>& all) {
        std::string line = " '" + program() + "'";
        for (const std::string& word : all) line += " '" + word + "'";
        return line;
    }
    [[nodiscard]] Outcome started(const std::string& what) const {
        const std::string line =
            "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none "
            "timeout 100 mpirun --oversubscribe" +
            what;
        const int status = std::system((line + " >" + (folder / "out") + " 2>" + (folder / "err")).c_str());
        return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents(folder / "out"), contents(folder / "err")};
    }
};

TEST_F(RanksOfTrain, WriteWhatOneWrites) {
    const std::vector<std::string> rest{"--steps",   "12", "--inject", "delta:multiplicative:0.3",
                                        "--capture", "5",  "-o"};
    const auto with = [&](std::vector<std::string> more, const char* file) {
        more.insert(more.end(), rest.begin(), rest.end());
        more.push_back(folder / file);
        return train(more);
    };
    ASSERT_EQ(with({}, "one.h5").status, 0);
    const Outcome two = with({"--ranks", "2"}, "two.h5");
    ASSERT_EQ(two.status, 0) << two.err;
    EXPECT_EQ(two.err, "");
    expect_same_steps(folder / "one.h5", folder / "two.h5");
    for (const char* beside : {".checkpoint.safetensors", ".step000005.safetensors"})
        EXPECT_EQ(contents(folder / ("one" + std::string(beside))), contents(folder / ("two" + std::string(beside))))
            << beside;
}

TEST_F(RanksOfTrain, GoOnWithAnotherNumberOfThem) {
    ASSERT_EQ(train({"--steps", "9", "-o", folder / "whole.h5"}).status, 0);
    ASSERT_EQ(train({"--steps", "4", "--ranks", "3", "-o", folder / "cut.h5"}).status, 0);
    const Outcome rest = train({"--steps", "9", "--ranks", "2", "--resume", folder / "cut.h5"});
    ASSERT_EQ(rest.status, 0) << rest.err;
    const auto cut = [&] { return RecordReader(folder / "cut.h5"); };
    EXPECT_TRUE(RecordReader(folder / "whole.h5").read("steps/loss").bytes == cut().read("steps/loss").bytes);
    const std::string chain = cut().manifest().reductions;
    EXPECT_THAT(chain, HasSubstr("along a chain"));  // of three ranks and of two: the same additions, said once
    EXPECT_EQ(cut().manifest().ranks, 2);
    ASSERT_EQ(train({"--steps", "12", "--resume", folder / "cut.h5"}).status, 0);
    EXPECT_EQ(cut().manifest().ranks, 1);
    EXPECT_THAT(cut().manifest().reductions, StartsWith(chain + "; from step 9 on: none: "));
}

TEST_F(RanksOfTrain, AreRefusedInOneSentence) {
    const auto refused = [&](const std::vector<std::string>& more, const std::string& sentence) {
        const Outcome outcome = train(more);
        EXPECT_EQ(outcome.status, 2);
        EXPECT_EQ(lines(outcome.err).size(), 1U) << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr(sentence));
        EXPECT_EQ(outcome.out, "");
    };
    refused({"--ranks", "2", "--data", folder / "absent"}, "absent: cannot be opened");
    refused({"--ranks", "2", "--heads", "3"}, "heads: 3: expected a divisor of the width 16");
    refused({"--ranks", "9"}, "ranks: 9: a batch of 64 is cut into 8 groups: expected at most so many");
    refused({"--ranks", "0"}, "--ranks: \"0\": expected an integer from 1");
    refused({"--ranks", "2", "--resume", folder / "none.h5"}, "checkpoint");
    refused({"--ranks", "1000"}, "ranks: 1000: a batch of 64 is cut into 8 groups");
    // Said once, before a step, and no file is left.
    folder.write("order", "0\n0,1,2\n");
    refused({"--ranks", "2", "--replay", folder / "order", "--batch", "1", "--accumulate", "2", "--steps", "2", "-o",
             folder / "run.h5"},
            "order: step 0: 1 offsets: expected batch times accumulation, 2");
    folder.write("order", "0,1\n0,3000000\n");
    refused({"--ranks", "2", "--replay", folder / "order", "--batch", "1", "--accumulate", "2", "--steps", "2", "-o",
             folder / "run.h5"},
            "order: step 1: offset 3000000: expected at most");
    std::filesystem::remove(folder / "order");
    EXPECT_THAT(folder.files(), testing::ElementsAre("text"));
}

TEST_F(RanksOfTrain, TheCpuIsNotAskedForWhatCardsHave) {
    const auto refused = [&](const std::vector<std::string>& more, const std::string& sentence) {
        const Outcome outcome = train(more);
        EXPECT_EQ(outcome.status, 2);
        EXPECT_THAT(outcome.err, HasSubstr(sentence));
    };
    refused({"--reduce", "nonsense"}, "--reduce: \"nonsense\": expected auto, gather, fp32 or bf16");
    refused({"--reduce", "bf16"}, "--reduce: bf16: the CPU has no choice of it: expected --device cuda");
    for (const char* key : {"overlap", "deterministic", "monitors"})
        refused({std::string("--no-") + key}, "--" + std::string(key) + ": false: the CPU has no choice of it");
    refused({"--share-card", "--ranks", "2"}, "--share-card: true: the CPU has no choice of it");
    refused({"--share-card"}, "--share-card: a single rank has its card to itself: expected several");
    refused({"--share-card", "--ranks", "2", "--reduce", "fp32"},
            "--reduce: fp32: NCCL takes no two ranks on one card");
    EXPECT_EQ(train({"--steps", "1", "--deterministic", "--overlap", "--monitors", "--reduce", "fp32"}).status, 0);
}

// As many as a limit of 1024 open files lets no square of sockets have.
TEST_F(RanksOfTrain, ManyOfThem) {
    ASSERT_EQ(train({"--steps", "1", "--batch", "1", "--accumulate", "48", "-o", folder / "one.h5"}).status, 0);
    const Outcome many =
        train({"--steps", "1", "--batch", "1", "--accumulate", "48", "--ranks", "48", "-o", folder / "many.h5"});
    ASSERT_EQ(many.status, 0) << many.err;
    expect_same_steps(folder / "one.h5", folder / "many.h5");
}

// Whoever of them is killed, the others end, and one of them says why.
TEST_F(RanksOfTrain, ALostRankIsNamedOnce) {
    for (const bool first : {true, false}) {
        SCOPED_TRACE(first ? "the first is killed" : "another is killed");
        const std::string stem = first ? "a" : "b", file = folder / (stem + ".h5");
        Child run(arguments({"--steps", "100000", "--ranks", "3", "--checkpoint-every", "5", "-o", file}),
                  folder / (stem + ".err"));
        for (int i = 0; i < 4000 && !std::filesystem::exists(folder / (stem + ".checkpoint.safetensors")); ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        const int killed = first ? run.id() : run.child();
        ASSERT_GT(killed, 0);
        ::kill(killed, SIGKILL);
        EXPECT_EQ(run.wait(), first ? -SIGKILL : 1);
        for (int i = 0; i < 2000 && run.error().empty(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        std::this_thread::sleep_for(std::chrono::milliseconds(200));  // a second sentence would come at once
        EXPECT_EQ(lines(run.error()).size(), 1U) << run.error();
        EXPECT_THAT(run.error(), AllOf(HasSubstr("faultline train: rank "), HasSubstr("of 3 is gone: expected it to")));
    }
}

TEST_F(RanksOfTrain, StopTogether) {
    const std::string file = folder / "run.h5";
    Child child(arguments({"--steps", "100000", "--ranks", "2", "--checkpoint-every", "5", "-o", file}),
                folder / "err");
    for (int i = 0; i < 4000 && !std::filesystem::exists(folder / "run.checkpoint.safetensors"); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    child.signal(SIGTERM);
    EXPECT_EQ(child.wait(), 1);
    EXPECT_THAT(child.error(), AllOf(HasSubstr("interrupted after step"), HasSubstr("--resume")));
    EXPECT_EQ(lines(child.error()).size(), 1U) << child.error();
}

TEST_F(RanksOfTrain, ALauncherWithoutMpiIsRefusedOnce) {
    // As a launcher of another kind would start the two.
    int sentences = 0;
    for (const char* rank : {"0", "1"}) {
        const Outcome outcome = run_program(arguments({}), {{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", rank}});
        EXPECT_EQ(outcome.status, 2) << outcome.out;
        sentences += static_cast<int>(lines(outcome.err).size());
        if (std::string(rank) == "0") {
            EXPECT_THAT(outcome.err,
                        HasSubstr("SLURM_STEP_NUM_TASKS: says 2 ranks, and srun has not told MPI of them"));
        }
    }
    EXPECT_EQ(sentences, 1);
}

// What the first rank gives to those that it starts, left behind in somebody's environment.
TEST_F(RanksOfTrain, AnEnvironmentOfNoRankIsRefused) {
    for (const char* text : {"", "1", "1/2:3", "2/2:3:4,5", "1/2:987:988,-1"}) {
        const Outcome outcome = run_program({"train"}, {{"FAULTLINE_LOCAL_RANK", text}});
        EXPECT_EQ(outcome.status, 2) << text;
        EXPECT_EQ(outcome.err,
                  "faultline train: FAULTLINE_LOCAL_RANK: is for the program's own use: expected it to be unset\n");
    }
}

TEST_F(WithMpi, WriteWhatOneWrites) {
#ifdef __SANITIZE_ADDRESS__
    GTEST_SKIP() << "AddressSanitizer's dlopen does not see the program's run path, where the part for MPI is";
#endif
    const std::vector<std::string> rest{"--steps", "6", "--accumulate", "2", "--batch", "16", "-o"};
    const auto with = [&](const char* file) {
        std::vector<std::string> more = rest;
        more.push_back(folder / file);
        return more;
    };
    ASSERT_EQ(train(with("one.h5")).status, 0);
    const Outcome two = mpirun(with("two.h5"));
    ASSERT_EQ(two.status, 0) << two.err;
    expect_same_steps(folder / "one.h5", folder / "two.h5");
    EXPECT_EQ(contents(folder / "one.checkpoint.safetensors"), contents(folder / "two.checkpoint.safetensors"));
}

TEST_F(WithMpi, AreRefusedOnce) {
    const Outcome outcome = mpirun({"--heads", "3"});
    EXPECT_EQ(outcome.status, 2);
    std::size_t ours = 0;  // mpirun says more
    for (const std::string& line : lines(outcome.err)) ours += line.starts_with("faultline");
    EXPECT_EQ(ours, 1U) << outcome.err;
}

TEST_F(WithMpi, OtherSettingsOrDataOnARankAreRefusedOnce) {
    folder.write("other", text_of_squares(3001));
    const auto refused = [&](const std::vector<std::string>& theirs, const std::string& sentence) {
        const Outcome outcome = mpirun({"--steps", "3", "-o", folder / "run.h5"}, theirs);
        EXPECT_EQ(outcome.status, 2) << outcome.err;
        std::vector<std::string> ours;  // mpirun says more
        for (const std::string& line : lines(outcome.err))
            if (line.starts_with("faultline")) ours.push_back(line);
        EXPECT_THAT(ours, testing::ElementsAre(AllOf(testing::StartsWith("faultline train: " + sentence),
                                                     testing::EndsWith(": expected the same on all ranks"))));
        EXPECT_FALSE(std::filesystem::exists(folder / "run.h5"));
    };
    refused({"--steps", "3", "--seed", "1"}, "--seed: is 1 on rank 1 and 0 on rank 0");
    refused({"--steps", "4"}, "--steps: is 4 on rank 1 and 3 on rank 0");
    refused({"--steps", "3", "--inject", "delta:multiplicative:0.3"},
            "--inject: is [\"delta:multiplicative:0.3\"] on rank 1 and [] on rank 0");
    refused({"--steps", "3", "--data", folder / "other"}, "data: is xxh3-128:");
    // Names of files are each machine's own.
    std::filesystem::copy_file(folder / "text", folder / "same");
    EXPECT_EQ(mpirun({"--steps", "3"}, {"--steps", "3", "--data", folder / "same", "--threads", "2"}).status, 0);
}

}  // namespace
}  // namespace faultline::test
