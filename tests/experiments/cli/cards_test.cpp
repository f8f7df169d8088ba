// SPDX-License-Identifier: Apache-2.0
// faultline train on two cards as a user starts it, against one card. Skipped where there are not two.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
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

class TwoCards : public testing::Test {
  protected:
    void SetUp() override {
        if (cards() < 2) GTEST_SKIP() << "there are not two cards of compute capability 9.0";
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
    Folder folder;

  private:
    /// Without the header, in which the number of ranks is.
    [[nodiscard]] std::string tensors(const std::string& name) const {
        std::ifstream in(folder / name, std::ios::binary);
        const std::string all{std::istreambuf_iterator<char>(in), {}};
        std::uint64_t header = 0;
        std::memcpy(&header, all.data(), sizeof header);
        return all.substr(sizeof header + header);
    }
};

TEST_F(TwoCards, MakeTheRunOfOne) {
    for (const char* optimizer : {"adamw", "muon"})
        for (const char* precision : {"bf16", "fp32"}) {
            const std::string name = std::string(optimizer) + precision;
            const std::vector<std::string> how{"--optimizer", optimizer, "--precision", precision};
            const auto with = [&](std::vector<std::string> more) {
                more.insert(more.end(), how.begin(), how.end());
                return more;
            };
            train(name + "-one", with({"--accumulate", "2"}));
            train(name + "-two", with({"--accumulate", "2", "--ranks", "2"}));
            train(name + "-end", with({"--accumulate", "2", "--ranks", "2", "--no-overlap"}));
            EXPECT_THAT(attribute(name + "-two", "reductions"), HasSubstr("copied from card to card, layer by layer"));
            expect_same(name + "-one", name + "-two");
            expect_same(name + "-one", name + "-end");
        }
}

TEST_F(TwoCards, GatherWhatNcclAddsUp) {
    if (std::getenv("FAULTLINE_NCCL") == nullptr) GTEST_SKIP() << "FAULTLINE_NCCL names no NCCL";
    for (const char* accumulate : {"2", "6"}) {
        const std::string a = std::string("gather") + accumulate, b = std::string("nccl") + accumulate;
        train(a, {"--accumulate", accumulate, "--ranks", "2", "--reduce", "gather", "--capture", "4"});
        train(b, {"--accumulate", accumulate, "--ranks", "2", "--reduce", "fp32", "--capture", "4"});
        EXPECT_THAT(attribute(b, "reductions"), HasSubstr("NCCL"));
        expect_same(a, b);
    }
}

TEST_F(TwoCards, GoOnAfterAnInterruptBitForBit) {
    const std::vector<std::string> two{"--accumulate", "2", "--ranks", "2", "--steps", "3000", "--validate-every", "0"};
    train("whole", two);
    std::vector<std::string> cut = two;
    cut.insert(cut.end(), {"--checkpoint-every", "100", "-o", folder / "cut.h5"});
    Child run(arguments(cut), folder / "err");
    for (int i = 0; i < 4000 && !std::filesystem::exists(folder / "cut.checkpoint.safetensors"); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    run.signal(SIGINT);
    EXPECT_EQ(run.wait(), 1);
    EXPECT_THAT(run.error(), AllOf(HasSubstr("interrupted after step"), HasSubstr("--resume")));
    std::vector<std::string> rest = two;
    rest.insert(rest.end(), {"--resume", folder / "cut.h5"});
    const Outcome outcome = run_program(arguments(rest));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    expect_same("whole", "cut");
}

// A card that waits for the copies of a rank that is gone would wait for ever.
TEST_F(TwoCards, ALostRankIsNamedOnce) {
    for (const bool first : {true, false}) {
        SCOPED_TRACE(first ? "the first is killed" : "the second is killed");
        const std::string stem = first ? "a" : "b";
        Child run(arguments({"--steps", "1000000", "--accumulate", "2", "--ranks", "2", "--checkpoint-every", "50",
                             "--validate-every", "0", "-o", folder / (stem + ".h5")}),
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
    }
}

}  // namespace
}  // namespace faultline::test
