// SPDX-License-Identifier: Apache-2.0
// faultline train as two ranks, as a user starts it, against one: on two cards, and on one that both share. Skipped where there are none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include <faultline/record/record_reader.hpp>

#include "support.hpp"
#include "texts.hpp"

namespace faultline::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// That a process sees.
std::size_t cards() {
    if (const char* const chosen = std::getenv("CUDA_VISIBLE_DEVICES"))
        return *chosen == '\0'
                   ? 0
                   : 1 + static_cast<std::size_t>(std::count(chosen, chosen + std::string(chosen).size(), ','));
    FILE* const listed = ::popen("nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null", "r");
    if (listed == nullptr) return 0;
    std::size_t found = 0;
    for (char line[256]; std::fgets(line, sizeof line, listed) != nullptr;)
        found += std::string(line).starts_with("9.0");
    (void)::pclose(listed);
    return found;
}

class TwoRanks : public testing::TestWithParam<std::size_t> {
  protected:
    void SetUp() override {
        if (cards() < GetParam()) GTEST_SKIP() << "cards of compute capability 9.0: " << cards();
        folder.write("text", text_of_squares(3000));
        if (const Outcome trial = run_program(arguments({"--steps", "1"})); trial.status != 0)
            GTEST_SKIP() << "the program does not train on a card: " << trial.err;
    }
    [[nodiscard]] std::vector<std::string> arguments(std::vector<std::string> more) const {
        std::vector<std::string> all{"train",
                                     "--device",
                                     "cuda",
                                     "--data",
                                     folder / "text",
                                     "--layers",
                                     "3",
                                     "--width",
                                     "128",
                                     "--heads",
                                     "2",
                                     "--context",
                                     "128",
                                     "--batch",
                                     "8",
                                     "--warmup",
                                     "5",
                                     "--quiet",
                                     "--monitor-every",
                                     "3",
                                     "--lr",
                                     "0.003",
                                     "--validation-batches",
                                     "2"};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    [[nodiscard]] bool on_one_card() const { return GetParam() == 1; }
    /// Two ranks with a micro-batch each, and what else is said.
    [[nodiscard]] std::vector<std::string> as_two(std::vector<std::string> more = {}) const {
        more.insert(more.begin(), {"--ranks", "2"});
        if (on_one_card()) more.emplace_back("--share-card");
        return more;
    }
    /// 12 steps into NAME.h5, unless `more` says other.
    void train(const std::string& name, const std::vector<std::string>& more) const {
        std::vector<std::string> all{"--steps", "12", "-o", folder / (name + ".h5")};
        all.insert(all.end(), more.begin(), more.end());
        const Outcome outcome = run_program(arguments(all));
        ASSERT_EQ(outcome.status, 0) << outcome.err;
    }
    [[nodiscard]] std::string attribute(const std::string& name, const char* key) const {
        return RecordReader(folder / (name + ".h5")).attribute("/", key).value_or("");
    }
    void expect_same(const std::string& a, const std::string& b) const {
        SCOPED_TRACE(a + " and " + b);
        const RecordReader one(folder / (a + ".h5")), two(folder / (b + ".h5"));
        EXPECT_EQ(one.datasets(), two.datasets());
        for (const std::string& path : one.datasets())
            EXPECT_TRUE(one.read(path).bytes == two.read(path).bytes) << path;
        EXPECT_TRUE(tensors(a + ".checkpoint.safetensors") == tensors(b + ".checkpoint.safetensors"));
    }
    [[nodiscard]] std::string bytes(const std::string& name) const {
        std::ifstream in(folder / name, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), {}};
    }
    Folder folder;

  private:
    /// Without the header, in which the number of ranks is.
    [[nodiscard]] std::string tensors(const std::string& name) const {
        const std::string all = bytes(name);
        std::uint64_t header = 0;
        std::memcpy(&header, all.data(), sizeof header);
        return all.substr(sizeof header + header);
    }
};

std::vector<std::string> joined(std::vector<std::string> a, const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

TEST_P(TwoRanks, MakeTheRunOfOne) {
    for (const char* optimizer : {"adamw", "muon"})
        for (const char* precision : {"bf16", "fp32"}) {
            const std::string name = std::string(optimizer) + precision;
            const std::vector<std::string> how{"--optimizer", optimizer, "--precision", precision, "--accumulate", "2"};
            train(name + "-one", how);
            train(name + "-two", joined(how, as_two()));
            train(name + "-end", joined(how, as_two({"--no-overlap"})));
            EXPECT_THAT(attribute(name + "-two", "reductions"), HasSubstr("copied from card to card, layer by layer"));
            EXPECT_EQ(attribute(name + "-two", "reductions").ends_with("; 2 ranks share a card"), on_one_card());
            expect_same(name + "-one", name + "-two");
            expect_same(name + "-one", name + "-end");
        }
}

// In memory, inside the kernels, of the model and of the update: with what they did, which the record has.
TEST_P(TwoRanks, HaveTheFaultsAndCapturesOfOne) {
    std::vector<std::string> how{"--accumulate", "2", "--capture", "4"};
    for (const char* fault : {"lse:random:1%", "ds:fixed:1%", "ffn_output:random:2%", "optimizer_update:fixed:1%"})
        how.insert(how.end(), {"--inject", fault});
    train("one", how);
    train("two", joined(how, as_two()));
    expect_same("one", "two");
    for (const char* micro_batch : {"", "-1"}) {
        const std::string name = std::string(".step000004") + micro_batch + ".safetensors";
        EXPECT_TRUE(bytes("one" + name) == bytes("two" + name)) << name;
        EXPECT_FALSE(bytes("one" + name).empty());
    }
}

TEST_P(TwoRanks, GatherWhatNcclAddsUp) {
    if (on_one_card()) GTEST_SKIP() << "NCCL takes no two ranks on one card";
    if (std::getenv("FAULTLINE_NCCL") == nullptr) GTEST_SKIP() << "FAULTLINE_NCCL names no NCCL";
    for (const char* accumulate : {"2", "6"}) {
        const std::string a = std::string("gather") + accumulate, b = std::string("nccl") + accumulate;
        train(a, {"--accumulate", accumulate, "--ranks", "2", "--reduce", "gather", "--capture", "4"});
        train(b, {"--accumulate", accumulate, "--ranks", "2", "--reduce", "fp32", "--capture", "4"});
        EXPECT_THAT(attribute(b, "reductions"), HasSubstr("NCCL"));
        expect_same(a, b);
    }
}

TEST_P(TwoRanks, ShareACardOnlyWhereTheyAreToldTo) {
    if (!on_one_card()) GTEST_SKIP() << "on one card";
    const std::vector<std::string> two{"--ranks", "2", "--accumulate", "2", "--steps", "1"};
    const Outcome untold = run_program(arguments(two), {{"CUDA_VISIBLE_DEVICES", "0"}});
    EXPECT_EQ(untold.status, 2);
    EXPECT_EQ(lines(untold.err).size(), 1U) << untold.err;
    EXPECT_THAT(untold.err, AllOf(HasSubstr("ranks 0 and 1 have the same card"), HasSubstr("or --share-card")));
    if (cards() == 1 && std::getenv("CUDA_VISIBLE_DEVICES") == nullptr) {
        const Outcome none = run_program(arguments(two));
        EXPECT_NE(none.status, 0);
        EXPECT_EQ(lines(none.err).size(), 1U) << none.err;
        EXPECT_THAT(none.err, HasSubstr("a card for each of the 2 ranks on this machine, or --share-card"));
    }
    const Outcome nccl = run_program(arguments(joined(two, {"--share-card", "--reduce", "fp32"})));
    EXPECT_EQ(nccl.status, 2);
    EXPECT_EQ(lines(nccl.err).size(), 1U) << nccl.err;
    EXPECT_THAT(nccl.err, HasSubstr("NCCL takes no two ranks on one card: expected auto or gather"));
}

// More ranks than two gather on a card, and make the additions of one rank.
TEST_P(TwoRanks, OfACardMayBeThree) {
    if (!on_one_card()) GTEST_SKIP() << "on one card";
    train("one", {"--accumulate", "3"});
    train("three", {"--accumulate", "3", "--ranks", "3", "--share-card"});
    expect_same("one", "three");
}

TEST_P(TwoRanks, GoOnAfterAnInterruptBitForBit) {
    const std::vector<std::string> two = as_two({"--accumulate", "2", "--steps", "3000", "--validate-every", "0"});
    train("whole", two);
    Child run(arguments(joined(two, {"--checkpoint-every", "100", "-o", folder / "cut.h5"})), folder / "err");
    for (int i = 0; i < 4000 && !std::filesystem::exists(folder / "cut.checkpoint.safetensors"); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    run.signal(SIGINT);
    EXPECT_EQ(run.wait(), 1);
    EXPECT_THAT(run.error(), AllOf(HasSubstr("interrupted after step"), HasSubstr("--resume")));
    const Outcome outcome = run_program(arguments(joined(two, {"--resume", folder / "cut.h5"})));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    expect_same("whole", "cut");
}

// A card that waits for the copies of a rank that is gone would wait for ever.
TEST_P(TwoRanks, ALostRankIsNamedOnce) {
    for (const bool first : {true, false}) {
        SCOPED_TRACE(first ? "the first is killed" : "the second is killed");
        const std::string stem = first ? "a" : "b";
        Child run(arguments(as_two({"--steps", "1000000", "--accumulate", "2", "--checkpoint-every", "50",
                                    "--validate-every", "0", "-o", folder / (stem + ".h5")})),
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
        EXPECT_THAT(run.error(), HasSubstr("is gone: expected"));
        std::cout << (first ? "first" : "second") << " killed: " << run.error();
    }
}

// A capture that cannot be written is one rank's trouble, and ends both.
TEST_P(TwoRanks, AFailureOfOneEndsBothInASentence) {
    const std::string taken = folder / "run.step000003.safetensors";
    std::filesystem::create_directory(taken);
    std::ofstream(taken + "/in the way") << "x";
    const Outcome outcome = run_program(
        arguments(as_two({"--steps", "12", "--accumulate", "2", "--capture", "3", "-o", folder / "run.h5"})));
    EXPECT_THAT(outcome.status, testing::AnyOf(1, 2));
    EXPECT_EQ(lines(outcome.err).size(), 1U) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("run.step000003.safetensors"));
    std::cout << "a capture that cannot be written: " << outcome.err;
}

INSTANTIATE_TEST_SUITE_P(On, TwoRanks, testing::Values(1, 2),
                         [](const auto& cards) { return cards.param == 1 ? "OneCard" : "TwoCards"; });

}  // namespace
}  // namespace faultline::test
