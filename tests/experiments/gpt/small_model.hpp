// SPDX-License-Identifier: Apache-2.0
// A model small enough for finite differences, with weights large enough that nothing in it is linear.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <faultline/gpt/model.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline::gpt {

/// Everything that can be on in a float64 model at once is named by the caller; the rest is off.
inline ModelConfig small_config() {
    ModelConfig config;
    config.layers = 2;
    config.width = 12;
    config.heads = 3;
    config.context = 10;
    config.vocabulary = 17;
    config.bf16 = false;
    return config;
}

/// Token ids by a formula, so that other programs can make the same: (7 i^2 + 3 i + seed) mod vocabulary.
inline std::vector<std::int32_t> formula_tokens(int count, int vocabulary, int seed) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) ids[static_cast<std::size_t>(i)] = (7 * i * i + 3 * i + seed) % vocabulary;
    return ids;
}

/// Weights away from their symmetric start: element i is its initial value plus 0.2 sin(1 + 1.7 i).
template <class T>
void spread_weights(Gpt<T>& model) {
    const std::span<T> weights = model.weights();
    for (std::size_t i = 0; i < weights.size(); ++i)
        weights[i] += static_cast<T>(0.2 * std::sin(1.0 + 1.7 * static_cast<double>(i)));
    model.prepare();
}

}  // namespace faultline::gpt
