// SPDX-License-Identifier: Apache-2.0
// The settings of a training run, shared by the commands that train.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <faultline/cli/settings.hpp>
#include <faultline/gpt/trainer.hpp>

namespace faultline::cli {

/// As the command line and TOML files have them; defaults are the quick recipe's.
struct TrainSettings {
    std::int64_t layers = 2, width = 64, heads = 2, context = 128, vocab = 0;
    bool bias = false, sigma_reparam = false, output_gate = false;
    std::string precision = "bf16", qk_norm = "none", norm_statistics = "fp32", attention = "fast", optimizer = "adamw",
                schedule = "constant";
    std::vector<std::string> layer_attention;
    std::optional<double> softcap = 0, z_loss = 0, qk_clip = 0, learning_rate = 0.003, final_learning_rate = 0,
                          beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0, clip = 1;
    std::optional<double> momentum;  ///< empty: the optimizer's own, 0.9 of SGD and 0.95 of Muon
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

/// Settings that nothing reads beside the values that others have here: key, and beside what.
[[nodiscard]] std::vector<std::pair<std::string_view, std::string_view>> unread_settings(const TrainSettings& own);

/// RequestError naming the setting.
[[nodiscard]] TrainData read_data(const TrainSettings& own, const Settings& settings);
[[nodiscard]] gpt::TrainConfig train_config(const TrainSettings& own, const Settings& settings, const TrainData& data,
                                            int threads);

}  // namespace faultline::cli
