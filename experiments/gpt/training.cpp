// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/training.hpp>

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/probes/lanczos.hpp>
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
    // The steps compute in fp32, where a number beyond its normal range is infinite, 0 or short of digits. Written so that NaN is
    // refused.
    const auto usable = [](double value) {
        return value >= std::numeric_limits<float>::min() && value <= std::numeric_limits<float>::max();
    };
    const auto in_range = [&](const char* field, double value) {
        expect(field, value, value == 0 || usable(value), "0, or a number that fp32 has, 1.2e-38 to 3.4e38");
    };
    const auto decay = [&](const char* field, double value) {
        expect(field, value, value == 0 || (usable(value) && static_cast<float>(value) < 1),
               "0 or more and below 1, also as the number that fp32 has for it");
    };
    expect("lr", config.schedule.learning_rate,
           config.schedule.learning_rate == 0 || usable(config.schedule.learning_rate),
           "a number that fp32 has, 1.2e-38 to 3.4e38");
    in_range("final-lr", config.schedule.final_rate);
    in_range("weight-decay", config.optimizer.weight_decay);
    in_range("clip", config.clip);
    in_range("qk-clip", config.qk_clip);
    decay("beta1", config.optimizer.beta1);
    decay("beta2", config.optimizer.beta2);
    decay("momentum", config.optimizer.momentum);
    expect("epsilon", config.optimizer.epsilon, usable(config.optimizer.epsilon),
           "more than 0, a number that fp32 has, 1.2e-38 to 3.4e38");
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

void clear_spectra(StepReport& r) {
    const auto layers = static_cast<std::size_t>(r.layers), heads = static_cast<std::size_t>(r.heads);
    r.sigma_q.assign(layers, nan_value);
    r.sigma_k = r.sigma_q;
    r.singular_q.assign(layers * spectrum, nan_value);
    r.singular_k = r.singular_q;
    r.singular_qk.assign(layers * heads * spectrum, nan_value);
}

void copy_spectra(const StepReport& from, StepReport& to) {
    to.sigma_q = from.sigma_q;
    to.sigma_k = from.sigma_k;
    to.singular_q = from.singular_q;
    to.singular_k = from.singular_k;
    to.singular_qk = from.singular_qk;
}

namespace {

/// of_weight(w), of_product(q, k): the leading values.
template <class OfWeight, class OfProduct>
void report_spectra_by(const ModelConfig& model, const std::function<QkWeights(int)>& weights_of,
                       const DoTasks& do_tasks, StepReport& r, const OfWeight& of_weight, const OfProduct& of_product) {
    clear_spectra(r);
    const int d = model.head_dim();
    // Of each layer W_Q, W_K and the heads' products.
    const auto tasks = static_cast<std::size_t>(2 + r.heads);
    do_tasks(static_cast<std::size_t>(r.layers) * tasks, [&](std::size_t task) {
        const std::size_t l = task / tasks;
        const int part = static_cast<int>(task % tasks), h = part - 2;
        const QkWeights w = weights_of(static_cast<int>(l));
        const auto put = [&](const std::vector<double>& values, std::vector<double>& to, std::size_t at) {
            std::ranges::copy(values, to.begin() + static_cast<std::ptrdiff_t>(at * spectrum));
        };
        const auto columns = [&](MatrixView<const float> of) {
            return MatrixView<const float>(of.data + h * d, of.rows, d, of.stride);
        };
        if (part == 0) put(of_weight(w.q), r.singular_q, l);
        if (part == 1) put(of_weight(w.k), r.singular_k, l);
        if (part >= 2)
            put(of_product(columns(w.q), columns(w.k)), r.singular_qk,
                l * static_cast<std::size_t>(r.heads) + static_cast<std::size_t>(h));
    });
    for (std::size_t l = 0; l < static_cast<std::size_t>(r.layers); ++l) {
        r.sigma_q[l] = r.singular_q[l * spectrum];
        r.sigma_k[l] = r.singular_k[l * spectrum];
    }
}

}  // namespace

void report_leading_spectra(const ModelConfig& model, const std::function<QkWeights(int)>& weights_of,
                            const DoTasks& do_tasks, StepReport& r) {
    report_spectra_by(
        model, weights_of, do_tasks, r,
        [](MatrixView<const float> w) { return leading_singular_values(w, spectrum).values; },
        [](MatrixView<const float> q, MatrixView<const float> k) {
            return leading_product_singular_values(q, k, spectrum).values;
        });
}

void report_spectra(const ModelConfig& model, const ParameterLayout& layout, std::span<const float> weights, bool due,
                    StepReport& r) {
    if (!due) return clear_spectra(r);
    const auto weights_of = [&](int l) {
        const auto view = [&](const char* part) { return layout.at(fmt::format("layer{}.{}", l, part)).of(weights); };
        return QkWeights{view("w_q"), view("w_k")};
    };
    const DoTasks one_by_one = [](std::size_t count, const std::function<void(std::size_t)>& task) {
        for (std::size_t i = 0; i < count; ++i) task(i);
    };
    report_spectra_by(
        model, weights_of, one_by_one, r, [](MatrixView<const float> w) { return singular_values(w, spectrum); },
        [](MatrixView<const float> q, MatrixView<const float> k) { return product_singular_values(q, k, spectrum); });
}

}  // namespace faultline::gpt
