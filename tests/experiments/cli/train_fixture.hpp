// SPDX-License-Identifier: Apache-2.0
// faultline train on a text of squares with a model of one layer, which makes a step in some milliseconds.
#pragma once

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/record/record_reader.hpp>

#include "support.hpp"
#include "texts.hpp"

namespace faultline::test {

class Train : public testing::Test {
  protected:
    Train() { folder.write("text", text_of_squares(3000)); }
    std::vector<std::string> arguments(const std::string& steps, std::vector<std::string> more) const {
        std::vector<std::string> all{"train",
                                     "--data",
                                     folder / "text",
                                     "--steps",
                                     steps,
                                     "--layers",
                                     "1",
                                     "--width",
                                     "16",
                                     "--context",
                                     "32",
                                     "--batch",
                                     "8",
                                     "--warmup",
                                     "5",
                                     "--threads",
                                     "1",
                                     "--monitor-every",
                                     "3",
                                     "--validate-every",
                                     "10",
                                     "--validation-batches",
                                     "1"};
        const auto given = [&](const char* option) { return std::ranges::find(more, option) != more.end(); };
        if (given("-o") || given("--resume")) all.insert(all.end(), {"--checkpoint-every", "7"});
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    Outcome train(const std::string& steps, const std::vector<std::string>& more) const {
        return run_program(arguments(steps, more));
    }
    /// Starts it, lets it write its first checkpoint, and sends a signal; the exit status as run_program has it.
    int train_and_signal(const std::string& steps, const std::vector<std::string>& more, const std::string& checkpoint,
                         int signal, int delay_ms) const {
        Child child(arguments(steps, more));
        for (int i = 0; i < 2000 && !std::filesystem::exists(checkpoint); ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
        child.signal(signal);
        return child.wait();
    }
    static void expect_same_content(const std::string& a, const std::string& b) {
        const RecordReader one(a), two(b);
        EXPECT_EQ(one.datasets(), two.datasets());
        for (const std::string& path : one.datasets()) {
            const Tensor x = one.read(path), y = two.read(path);
            EXPECT_EQ(x.shape, y.shape) << path;
            EXPECT_TRUE(x.bytes == y.bytes) << path;
        }
    }

    Folder folder;
};

}  // namespace faultline::test
