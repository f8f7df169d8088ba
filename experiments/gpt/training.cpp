// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/training.hpp>

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/probes/spectra.hpp>

namespace faultline::gpt {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr int spectrum = 3;  // singular values that are recorded

}  // namespace

void check(const TrainConfig& config) {
    const auto expect = [](const char* field, auto value, bool good, const char* expected) {
        if (!good) throw RequestError(fmt::format("{}: {}: expected {}", field, value, expected));
    };
    expect("batch", config.batch, config.batch >= 1, "1 or more");
    expect("accumulate", config.accumulate, config.accumulate >= 1, "1 or more");
    expect("steps", config.steps, config.steps >= 1, "1 or more");
    // Written so that NaN is refused.
    const auto at_least_zero = [&](const char* field, double value) { expect(field, value, value >= 0, "0 or more"); };
    const auto decay = [&](const char* field, double value) {
        expect(field, value, value >= 0 && value < 1, "0 or more and below 1");
    };
    at_least_zero("lr", config.schedule.learning_rate);
    at_least_zero("final-lr", config.schedule.final_rate);
    at_least_zero("weight-decay", config.optimizer.weight_decay);
    at_least_zero("clip", config.clip);
    at_least_zero("qk-clip", config.qk_clip);
    decay("beta1", config.optimizer.beta1);
    decay("beta2", config.optimizer.beta2);
    decay("momentum", config.optimizer.momentum);
    expect("epsilon", config.optimizer.epsilon, config.optimizer.epsilon > 0, "more than 0");
}

Windows training_windows(const TrainConfig& config, const TokenData& data, const WindowOrder& order, std::int64_t step,
                         int micro_step) {
    const auto batch = static_cast<std::size_t>(config.batch);
    const std::vector<std::int64_t> offsets = order.offsets(step, batch * static_cast<std::size_t>(config.accumulate),
                                                            data.training.size(), config.model.context);
    return windows_at(data.training, std::span(offsets).subspan(static_cast<std::size_t>(micro_step) * batch, batch),
                      config.model.context);
}

Windows validation_windows(const TrainConfig& config, const TokenData& data, int b) {
    const WindowOrder order(config.seed + 0x76616c);  // other windows than any seed's near it
    const std::vector<std::int64_t> offsets =
        order.offsets(b, static_cast<std::size_t>(config.batch), data.validation.size(), config.model.context);
    return windows_at(data.validation, offsets, config.model.context);
}

void report_spectra(const ModelConfig& model, const ParameterLayout& layout, std::span<const float> weights, bool due,
                    StepReport& r) {
    const auto layers = static_cast<std::size_t>(r.layers), heads = static_cast<std::size_t>(r.heads);
    r.sigma_q.assign(layers, nan_value);
    r.sigma_k = r.sigma_q;
    r.singular_q.assign(layers * spectrum, nan_value);
    r.singular_k = r.singular_q;
    r.singular_qk.assign(layers * heads * spectrum, nan_value);
    if (!due) return;
    const int d = model.head_dim();
    for (int l = 0; l < r.layers; ++l) {
        const auto view = [&](const char* part) { return layout.at(fmt::format("layer{}.{}", l, part)).of(weights); };
        const MatrixView<const float> w_q = view("w_q"), w_k = view("w_k");
        const auto at = static_cast<std::ptrdiff_t>(l) * spectrum;
        std::ranges::copy(singular_values(w_q, spectrum), r.singular_q.begin() + at);
        std::ranges::copy(singular_values(w_k, spectrum), r.singular_k.begin() + at);
        r.sigma_q[static_cast<std::size_t>(l)] = r.singular_q[static_cast<std::size_t>(at)];
        r.sigma_k[static_cast<std::size_t>(l)] = r.singular_k[static_cast<std::size_t>(at)];
        for (int h = 0; h < r.heads; ++h) {
            const auto columns = [&](MatrixView<const float> w) {
                return MatrixView<const float>(w.data + h * d, w.rows, d, w.stride);
            };
            std::ranges::copy(product_singular_values(columns(w_q), columns(w_k), spectrum),
                              r.singular_qk.begin() + (l * r.heads + h) * spectrum);
        }
    }
}

}  // namespace faultline::gpt
