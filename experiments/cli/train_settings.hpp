// SPDX-License-Identifier: Apache-2.0
// The settings of a training run, shared by the commands that train.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <faultline/cli/settings.hpp>
#include <faultline/gpt/trainer.hpp>

namespace faultline::cli {

/// As the command line and TOML files have them; defaults are the quick recipe's.
struct TrainSettings {
    std::int64_t layers = 2, width = 64, heads = 2, context = 128, vocab = 0;
    bool bias = false, sigma_reparam = false, output_gate = false;
    std::string precision = "bf16", qk_norm = "none", attention = "fast", optimizer = "adamw", schedule = "constant";
    std::vector<std::string> layer_attention;
    std::optional<double> softcap, z_loss, learning_rate, final_learning_rate, beta1, beta2, epsilon, weight_decay,
        momentum, clip, qk_clip;
    std::int64_t warmup = 500, steps = 750, batch = 16, accumulate = 1, seed = 0;
    std::int64_t monitor_every = 10, validate_every = 250, validation_batches = 8;
    std::string data, data_format = "auto", replay;

    void declare(Settings& settings);
};

/// What is trained on, and the order of its windows.
struct TrainData {
    gpt::TokenData tokens;
    gpt::WindowOrder windows{0};
    /// Of text and replay, for the manifest.
    [[nodiscard]] std::vector<InputHash> inputs() const;
};

/// RequestError naming the setting.
[[nodiscard]] TrainData read_data(const TrainSettings& own, const Settings& settings);
[[nodiscard]] gpt::TrainConfig train_config(const TrainSettings& own, const Settings& settings, const TrainData& data,
                                            int threads);

}  // namespace faultline::cli
