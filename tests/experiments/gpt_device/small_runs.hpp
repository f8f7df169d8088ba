// SPDX-License-Identifier: Apache-2.0
// Text, configurations and weights for tests of the device's trainer, and the CPU's numbers for them.
#pragma once

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/gpt/trainer.hpp>
#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/tensor_kernel/backward_kernel.hpp>

#include "texts.hpp"

namespace faultline::gpt {

inline const TokenData& text() {
    static const TokenData data = tokens_of_text(test::text_of_squares(3000));
    return data;
}

struct Named {
    const char* name;
    TrainConfig config;
};
inline std::ostream& operator<<(std::ostream& out, const Named& n) { return out << n.name; }

inline TrainConfig small() {
    TrainConfig c;
    c.model = {.layers = 2, .width = 64, .heads = 2, .context = 128, .vocabulary = 256, .bf16 = false};
    c.batch = 4;
    c.steps = 100;
    c.schedule = {.learning_rate = 3e-3, .warmup = 500};
    c.monitor_every = c.validate_every = 0;
    return c;
}

inline TrainConfig with_tensor_kernel(TrainConfig c) {
    c.model.bf16 = true;
    c.model.attention = {{-1, {}, std::make_shared<RoundingPlan>(tensor_kernel::backward_plan(c.model.head_dim()))}};
    return c;
}

/// What differs in kernels and paths: head sizes 16 to 128 (whole and padded), rows that fill no tile, biases, z-loss,
/// micro-batches, a vocabulary of either path of the embedding and ids with more tokens than a warp adds up there, widths of every count of octets in a lane.
inline std::vector<Named> configurations() {
    std::vector<Named> all{{"the quick recipe", small()}};
    TrainConfig c = small();
    c.model.bias = true;
    c.model.context = 100;
    c.model.z_loss = 1e-3;
    c.accumulate = 2;
    all.push_back({"biases, z-loss, 100 tokens, two micro-batches", c});
    c = small();
    c.model = {.layers = 1, .width = 384, .heads = 4, .context = 72, .vocabulary = 8192, .bias = true, .bf16 = false};
    c.batch = 6;
    all.push_back({"heads of 96, width 384, 8192 ids", c});
    c = small();
    c.model = {.layers = 1, .width = 1152, .heads = 9, .context = 64, .vocabulary = 256, .bf16 = false};
    c.batch = 2;
    all.push_back({"heads of 128, width 1152", c});
    c = small();
    c.model = {.layers = 2, .width = 768, .heads = 48, .context = 40, .vocabulary = 256, .bias = true, .bf16 = false};
    c.batch = 2;
    all.push_back({"heads of 16, width 768", c});
    return all;
}

/// Weights at which nothing is nearly linear: the start, plus 0.05 sin(1 + 1.7 i).
inline std::vector<float> spread(const TrainConfig& c) {
    const ParameterLayout layout(c.model);
    std::vector<float> w(static_cast<std::size_t>(layout.size()));
    layout.initialize(3, std::span(w));
    for (std::size_t i = 0; i < w.size(); ++i)
        w[i] += static_cast<float>(0.05 * std::sin(1.0 + 1.7 * static_cast<double>(i)));
    return w;
}

/// The gradient of step 0 by the CPU's model in T, and what its heads saw.
template <class T>
std::vector<double> cpu_gradient(const TrainConfig& c, const std::vector<float>& weights, double* loss = nullptr,
                                 BatchStatistics* seen = nullptr) {
    Gpt<T> model(c.model, 0);
    std::copy(weights.begin(), weights.end(), model.weights().begin());
    model.prepare();
    model.clear_gradient();
    const WindowOrder order(c.seed);
    BatchStatistics statistics(static_cast<std::size_t>(c.model.layers * c.model.heads));
    double sum = 0;
    for (int m = 0; m < c.accumulate; ++m) {
        const Windows windows = training_windows(c, text(), order, 0, m);
        StepContext context;
        context.loss_weight = 1.0 / c.tokens_of_step();
        context.detailed = seen != nullptr;
        sum += model.accumulate(context, {windows.tokens, windows.targets, c.batch, c.model.context}, statistics);
    }
    if (loss != nullptr) *loss = sum / c.tokens_of_step();
    if (seen != nullptr) *seen = statistics;
    return {model.gradient().begin(), model.gradient().end()};
}

inline std::vector<double> device_gradient(const TrainConfig& c, const std::vector<float>& weights,
                                           double* loss = nullptr, bool deterministic = true) {
    const WindowOrder order(c.seed);
    DeviceOptions options;
    options.deterministic = deterministic;
    DeviceTrainer trainer(c, text(), order, options);
    trainer.set_weights(weights);
    trainer.step();
    EXPECT_FALSE(trainer.failure());
    if (loss != nullptr) *loss = trainer.report().loss;
    const std::vector<float> g = trainer.gradient();
    return {g.begin(), g.end()};
}

/// |a - b| / |b| of a parameter, Frobenius.
inline double distance(const Parameter& p, const std::vector<double>& a, const std::vector<double>& b) {
    double squares = 0, norm = 0;
    const MatrixView<const double> x = p.of(std::span<const double>(a)), y = p.of(std::span<const double>(b));
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for (std::ptrdiff_t j = 0; j < x.cols; ++j) {
            squares += (x(i, j) - y(i, j)) * (x(i, j) - y(i, j));
            norm += y(i, j) * y(i, j);
        }
    return std::sqrt(squares / norm);
}

}  // namespace faultline::gpt
