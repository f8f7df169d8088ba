// SPDX-License-Identifier: Apache-2.0
// A matrix of runs of a model of a few thousand parameters.
#pragma once

#include <filesystem>
#include <string>

#include <unistd.h>

#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/dissociation/matrix_run.hpp>

namespace faultline::test {

class Folder {
  public:
    Folder()
        : path_(std::filesystem::temp_directory_path() /
                ("matrix" + std::to_string(::getpid()) + std::to_string(counter_++))) {
        std::filesystem::create_directories(path_);
    }
    ~Folder() { std::filesystem::remove_all(path_); }
    std::string operator/(const std::string& name) const { return (path_ / name).string(); }

  private:
    static inline int counter_ = 0;
    std::filesystem::path path_;
};

inline const gpt::TokenData& text() {
    static const gpt::TokenData data = [] {
        std::string words;
        for (int i = 0; i < 30000; ++i) words += "the quick brown fox jumps over the lazy dog "[(i * i + i / 7) % 44];
        return gpt::tokens_of_text(words);
    }();
    return data;
}

inline MatrixConfig small() {
    MatrixConfig config;
    config.train.model = {.layers = 2, .width = 16, .heads = 2, .context = 16, .attention = {}};
    config.train.steps = 25;
    config.train.batch = 2;
    config.train.schedule.warmup = 2;
    config.train.monitor_every = 5;
    config.train.validate_every = 0;
    config.train.validation_batches = 1;
    config.sources = {"delta:multiplicative:0.5", "ffn_output:per_column:0.1"};
    config.interventions = {"none", "project", "guard:threshold=0.01"};
    config.controls = {"project"};
    config.seeds = {0, 1};
    return config;
}

inline RunMatrix run(const MatrixConfig& config, const std::string& folder = "", int threads = 2) {
    return run_matrix(config, text(), {.folder = folder, .replace = false, .command_line = "test"}, threads, {}, {});
}

/// What is said of a matrix that cannot be; "" where it was made.
inline std::string refusal(const MatrixConfig& config) {
    try {
        (void)run(config);
    } catch (const RequestError& error) {
        return error.what();
    }
    return "";
}

inline void expect_same(const RunMatrix& a, const RunMatrix& b) {
    ASSERT_EQ(a.runs.size(), b.runs.size());
    for (std::size_t i = 0; i < a.runs.size(); ++i) {
        EXPECT_EQ(a.runs[i].sigma_q, b.runs[i].sigma_q) << i;
        EXPECT_EQ(a.runs[i].max_logit, b.runs[i].max_logit) << i;
        EXPECT_EQ(a.runs[i].loss, b.runs[i].loss) << i;
        EXPECT_EQ(a.runs[i].validation_loss, b.runs[i].validation_loss) << i;
        EXPECT_EQ(a.runs[i].injected_rms, b.runs[i].injected_rms) << i;
        EXPECT_EQ(a.runs[i].removed_fraction, b.runs[i].removed_fraction) << i;
        EXPECT_EQ(a.runs[i].triggered_at, b.runs[i].triggered_at) << i;
    }
}

}  // namespace faultline::test
