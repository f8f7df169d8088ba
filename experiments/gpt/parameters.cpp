// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/parameters.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline::gpt {

const RoundingPlan* ModelConfig::plan(int layer, int head) const {
    const RoundingPlan* chosen = nullptr;
    for (const AttentionChoice& choice : attention) {
        const bool this_layer = choice.layer < 0 || choice.layer == layer;
        if (this_layer && (choice.heads.empty() || std::ranges::find(choice.heads, head) != choice.heads.end()))
            chosen = choice.plan.get();
    }
    return chosen;
}

void check(const ModelConfig& c) {
    const auto at_least_one = [](const char* field, int value) {
        if (value < 1) throw RequestError(fmt::format("{}: {}: expected 1 or more", field, value));
    };
    at_least_one("layers", c.layers);
    at_least_one("width", c.width);
    at_least_one("heads", c.heads);
    at_least_one("context", c.context);
    at_least_one("vocab", c.vocabulary);
    if (c.width % c.heads != 0)
        throw RequestError(fmt::format("heads: {}: expected a divisor of the width {}", c.heads, c.width));
    // Below, the square that the gradient is divided by is 0 in fp32; above, the kernels' error of 2^-24 of the cap is of the size
    // of the scores.
    constexpr double least_cap = 1e-18, most_cap = 1e4;
    if (c.softcap != 0 && !(c.softcap >= least_cap && c.softcap <= most_cap))
        throw RequestError(
            fmt::format("softcap: {}: expected 0 for none, or {} to {}", c.softcap, least_cap, most_cap));
    if (c.z_loss != 0 &&
        !(c.z_loss >= std::numeric_limits<float>::min() && c.z_loss <= std::numeric_limits<float>::max()))
        throw RequestError(
            fmt::format("z-loss: {}: expected 0, or a number that fp32 has, 1.2e-38 to 3.4e38", c.z_loss));
    for (const AttentionChoice& choice : c.attention) {
        if (choice.layer >= c.layers)
            throw RequestError(
                fmt::format("attention: layer {}: expected a layer from 0 to {}", choice.layer, c.layers - 1));
        for (const int head : choice.heads)
            if (head < 0 || head >= c.heads)
                throw RequestError(fmt::format("attention: head {}: expected a head from 0 to {}", head, c.heads - 1));
    }
}

std::ptrdiff_t ParameterLayout::add(const std::string& name, int layer, Role role, std::ptrdiff_t rows,
                                    std::ptrdiff_t cols, double deviation, double start) {
    const std::ptrdiff_t offset = size_;
    all_.push_back({name, layer, role, offset, rows, cols, cols, deviation, start});
    size_ += rows * cols;
    return offset;
}

ParameterLayout::ParameterLayout(const ModelConfig& c) : layers_(static_cast<std::size_t>(c.layers)) {
    const std::ptrdiff_t width = c.width;
    constexpr double deviation = 0.02;
    const double branch = deviation / std::sqrt(2.0 * c.layers);  // GPT-2: one of 2 layers additions to the stream
    wte = add("wte", -1, Role::embedding, c.vocabulary, width, deviation, 0);
    wpe = add("wpe", -1, Role::embedding, c.context, width, deviation, 0);
    in_columns_ = (c.output_gate ? 4 : 3) * width;
    for (int l = 0; l < c.layers; ++l) {
        LayerOffsets& at = layers_[static_cast<std::size_t>(l)];
        const auto named = [&](const char* part) { return fmt::format("layer{}.{}", l, part); };
        const auto vector = [&](const char* part, std::ptrdiff_t n, double start) {
            return add(named(part), l, Role::gain, 1, n, 0, start);
        };
        const auto bias = [&](const char* part, std::ptrdiff_t n) {
            return c.bias ? vector(part, n, 0) : std::ptrdiff_t{-1};
        };
        at.norm1_gain = vector("norm1.gain", width, 1);
        at.norm1_bias = bias("norm1.bias", width);
        at.w_in = size_;
        const std::pair<const char*, Role> parts[] = {
            {"w_q", Role::w_q}, {"w_k", Role::w_k}, {"w_v", Role::w_v}, {"w_gate", Role::w_gate}};
        for (std::ptrdiff_t p = 0; p < in_columns_ / width; ++p)
            all_.push_back({named(parts[p].first), l, parts[p].second, at.w_in + p * width, width, width, in_columns_,
                            deviation, 0});
        size_ += width * in_columns_;
        at.b_in = bias("b_in", in_columns_);
        if (c.qk_norm == QkNorm::learned) {
            at.q_gain = vector("q_gain", c.head_dim(), 1);
            at.k_gain = vector("k_gain", c.head_dim(), 1);
        }
        at.w_o = add(named("w_o"), l, Role::w_o, width, width, branch, 0);
        at.b_o = bias("b_o", width);
        at.norm2_gain = vector("norm2.gain", width, 1);
        at.norm2_bias = bias("norm2.bias", width);
        at.w_fc = add(named("w_fc"), l, Role::w_fc, width, 4 * width, deviation, 0);
        at.b_fc = bias("b_fc", 4 * width);
        at.w_proj = add(named("w_proj"), l, Role::w_proj, 4 * width, width, branch, 0);
        at.b_proj = bias("b_proj", width);
    }
    final_gain = add("final_norm.gain", -1, Role::gain, 1, width, 0, 1);
    if (c.bias) final_bias = add("final_norm.bias", -1, Role::gain, 1, width, 0, 0);
    const std::size_t own = all_.size();
    gamma_.assign(own, -1);
    if (!c.sigma_reparam) return;
    for (std::size_t i = 0; i < own; ++i) {
        if (!all_[i].is_matrix() || all_[i].role == Role::embedding) continue;
        gamma_[i] = static_cast<int>(all_.size());
        add(all_[i].name + ".gamma", all_[i].layer, Role::gain, 1, 1, 0, 1);
    }
    gamma_.resize(all_.size(), -1);
}

const Parameter& ParameterLayout::at(std::string_view name) const {
    const auto found = std::ranges::find(all_, name, &Parameter::name);
    if (found == all_.end()) throw std::out_of_range(fmt::format("no parameter is called {}", name));
    return *found;
}

template <class T>
void ParameterLayout::initialize(std::uint64_t seed, std::span<T> flat, int threads) const {
    parallel_for(all_.size(), threads, [&](std::size_t p) {
        const Parameter& parameter = all_[p];
        const RandomStream stream(seed, p);
        const MatrixView<T> view = parameter.of(flat);
        for (std::ptrdiff_t i = 0; i < view.rows; ++i)
            for (std::ptrdiff_t j = 0; j < view.cols; ++j)
                view(i, j) = static_cast<T>(parameter.deviation == 0
                                                ? parameter.start
                                                : parameter.deviation *
                                                      stream.normal(static_cast<std::uint64_t>(i * view.cols + j)));
    });
}

template void ParameterLayout::initialize(std::uint64_t, std::span<float>, int) const;
template void ParameterLayout::initialize(std::uint64_t, std::span<double>, int) const;

}  // namespace faultline::gpt
