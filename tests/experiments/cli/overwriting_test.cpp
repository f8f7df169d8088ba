// SPDX-License-Identifier: Apache-2.0
// What faultline train and dissociate leave beside their record replaces nothing that they read, and without --force nothing that is
// there; it is said before the first step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "train_fixture.hpp"

namespace faultline::test {
namespace {

using testing::HasSubstr;

std::string content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

class Overwriting : public Train {
  protected:
    /// Exit 2 with `why`; `file` and its neighbours are as they were.
    void expect_refused(const std::vector<std::string>& arguments, const std::string& file,
                        const std::string& why) const {
        const std::string before = content(file);
        const std::vector<std::string> files = folder.files();
        const Outcome outcome = run_program(arguments);
        EXPECT_EQ(outcome.status, 2) << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr(why));
        EXPECT_EQ(content(file), before);
        EXPECT_EQ(folder.files(), files);
    }
    std::string text() const { return text_of_squares(3000); }
};

TEST_F(Overwriting, TrainLeavesWhatItReads) {
    for (const std::string name : {"a.checkpoint.safetensors", "a.step000002.safetensors"}) {
        folder.write(name, text());
        for (const bool force : {false, true}) {
            std::vector<std::string> more{"--data", folder / name, "--data-format", "text", "--capture",
                                          "2",      "-o",          folder / "a.h5"};
            if (force) more.emplace_back("--force");
            expect_refused(arguments("4", more), folder / name, "is what --data reads: expected another file");
        }
        std::filesystem::remove(folder / name);
    }
    folder.write("b.checkpoint.safetensors", "[train]\nsteps = 4\n");
    expect_refused(arguments("4", {"--config", folder / "b.checkpoint.safetensors", "-o", folder / "b.h5", "--force"}),
                   folder / "b.checkpoint.safetensors", "is what --config reads: expected another file");
}

TEST_F(Overwriting, TrainReplacesNothingWithoutForce) {
    for (const std::string name : {"a.checkpoint.safetensors", "a.step000002.safetensors"}) {
        folder.write(name, "precious");
        const std::vector<std::string> more{"--capture", "2", "-o", folder / "a.h5"};
        expect_refused(arguments("4", more), folder / name, "exists already: expected a new name, or --force");
        std::vector<std::string> forced = more;
        forced.emplace_back("--force");
        EXPECT_EQ(train("4", forced).status, 0);
        EXPECT_NE(content(folder / name), "precious");
        for (const char* const left : {"a.h5", "a.checkpoint.safetensors", "a.step000002.safetensors"})
            std::filesystem::remove(folder / left);
    }
    // A step that is not captured, a micro-batch that there is not, another run's.
    for (const char* const other :
         {"a.step000003.safetensors", "a.step000002-1.safetensors", "a.step2.safetensors", "b.step000002.safetensors"})
        folder.write(other, "precious");
    EXPECT_EQ(train("4", {"--capture", "2", "-o", folder / "a.h5"}).status, 0);
    EXPECT_EQ(content(folder / "a.step000002-1.safetensors"), "precious");
    EXPECT_EQ(content(folder / "a.step000003.safetensors"), "precious");
}

TEST_F(Overwriting, ASecondRunDoesNotTakeTheCheckpointOfTheFirst) {
    ASSERT_EQ(train("4", {"-o", folder / "two.h5"}).status, 0);
    for (const std::string name : {"two", "two.hdf5"})
        expect_refused(arguments("4", {"--seed", "5", "-o", folder / name}), folder / "two.checkpoint.safetensors",
                       "two.checkpoint.safetensors: exists already");
    EXPECT_EQ(train("6", {"--resume", folder / "two.h5"}).status, 0);
}

TEST_F(Overwriting, WhatIsNoFileIsFoundBeforeTheFirstStep) {
    std::filesystem::create_directory(folder / "a.checkpoint.safetensors");
    for (const std::string option : {"", "--force"}) {
        std::vector<std::string> more{"-o", folder / "a.h5"};
        if (!option.empty()) more.push_back(option);
        expect_refused(arguments("4", more), folder / "text", "a.checkpoint.safetensors: exists");
        EXPECT_TRUE(std::filesystem::is_directory(folder / "a.checkpoint.safetensors"));
    }
    const std::string longest(240, 'x');
    expect_refused(arguments("4", {"-o", folder / longest}), folder / "text", "the name is too long: expected at most");
}

TEST_F(Overwriting, DissociateLeavesWhatItReadsAndRunsOfAnotherFile) {
    const auto matrix = [&](const std::string& data, const std::string& output, const std::vector<std::string>& more) {
        std::vector<std::string> all{"dissociate",
                                     "--data",
                                     data,
                                     "--data-format",
                                     "text",
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
                                     "4",
                                     "--warmup",
                                     "1",
                                     "--validation-batches",
                                     "1",
                                     "--source",
                                     "delta:multiplicative:0.2",
                                     "--intervention",
                                     "none",
                                     "--control",
                                     "none",
                                     "-o",
                                     folder / output};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    };
    const std::string data = folder / "g.runs/none__none__seed0.checkpoint.safetensors";
    std::filesystem::create_directory(folder / "g.runs");
    folder.write("g.runs/none__none__seed0.checkpoint.safetensors", text());
    for (const std::vector<std::string>& more : {std::vector<std::string>{}, std::vector<std::string>{"--force"}})
        expect_refused(matrix(data, "g.h5", more), data, "is what --data reads: expected another file");

    ASSERT_EQ(run_program(matrix(folder / "text", "a.h5", {})).status, 0);
    const std::string record = folder / "a.runs/none__none__seed0.h5";
    for (const std::string name : {"a.hdf5", "a"})
        expect_refused(matrix(folder / "text", name, {"--lr", "0.1", "--force"}), record,
                       "expected a name that differs before the dot");
    // A damaged record: said, and made anew with --force.
    std::filesystem::resize_file(record, 50);
    std::filesystem::remove(folder / "a.h5");
    expect_refused(matrix(folder / "text", "a.h5", {}), record, "--force, or removing it, makes the run anew");
    EXPECT_EQ(run_program(matrix(folder / "text", "a.h5", {"--force"})).status, 0);
    EXPECT_GT(std::filesystem::file_size(record), 50U);
}

}  // namespace
}  // namespace faultline::test
