// SPDX-License-Identifier: Apache-2.0
// A checkpoint is a safetensors file: the flat weights and moments, what hooks switched on, the last report (a guard acts
// on it), and as metadata the step and every setting that the next step depends on.
#include <algorithm>
#include <charconv>
#include <cstring>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt/checkpoint_file.hpp>
#include <faultline/gpt/report_vectors.hpp>
#include <faultline/gpt/trainer.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::gpt {
namespace {

constexpr const char* schema = "faultline.checkpoint/1";

template <class T>
void put(TensorSet& set, const std::string& name, std::span<const T> values) {
    set.add(make_tensor<T>(name, {static_cast<std::int64_t>(values.size())}, values));
}

template <class T>
std::vector<T> get(const TensorSet& set, const std::string& name, std::size_t size) {
    const Tensor& tensor = set.at(name);
    if (tensor.dtype != dtype_of<T>() || tensor.bytes.size() != size * sizeof(T))
        throw RequestError(fmt::format("{}: tensor {}: {} of shape {}: expected {} {} numbers", set.source, name,
                                       print_name(tensor.dtype), shape_text(tensor.shape), size,
                                       print_name(dtype_of<T>())));
    std::vector<T> values(size);
    if (size > 0) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    return values;
}

std::int64_t number(const TensorSet& set, const char* key) {
    const auto found = set.metadata.find(key);
    std::int64_t value = -1;
    if (found != set.metadata.end()) {
        const std::string& text = found->second;
        std::from_chars(text.data(), text.data() + text.size(), value);
    }
    if (value < 0)
        throw RequestError(fmt::format("{}: metadata {}: expected a step number", set.source, in_quotes(key)));
    return value;
}

}  // namespace

void Trainer::save(const std::string& path) const { write_checkpoint(path, state()); }
void Trainer::restore(const std::string& path) { restore(read_checkpoint(path)); }

TensorSet Trainer::state() const {
    TensorSet set;
    put(set, "weights", std::span<const float>(model_.weights()));
    put(set, "optimizer.first", std::span<const float>(optimizer_.state().first));
    put(set, "optimizer.second", std::span<const float>(optimizer_.state().second));
    put(set, "sigma_vectors", model_.reparametrisation().state());
    std::vector<double> switched;
    for (const QkSwitch& layer : qk_switch_) {
        switched.push_back(layer.on ? 1 : 0);
        for (int h = 0; h < config_.model.heads; ++h)
            switched.push_back(layer.on ? layer.logit_scale[static_cast<std::size_t>(h)] : 0);
    }
    put(set, "qk_switch", std::span<const double>(switched));
    const double scalars[] = {rate_factor_,          clip_factor_,           qk_clip_,
                              fp32_ffn_ ? 1. : 0,    report_.loss,           report_.grad_norm,
                              report_.learning_rate, report_.validation_loss};
    put(set, "scalars", std::span<const double>(scalars));
    for_vectors_of(report_, [&](const char* name, const std::vector<double>& values) {
        put(set, std::string("report.") + name, std::span<const double>(values));
    });
    put(set, "report.qk_normed", std::span<const std::uint8_t>(report_.qk_normed));
    const std::string hook = hooks_.step != nullptr ? hooks_.step->save() : std::string();
    put(set, "hook", std::span(reinterpret_cast<const std::uint8_t*>(hook.data()), hook.size()));
    set.metadata["schema"] = schema;
    set.metadata["next_step"] = std::to_string(next_);
    set.metadata["optimizer_steps"] = std::to_string(optimizer_.state().steps);
    add_settings(set, config_);
    return set;
}

void Trainer::restore(const TensorSet& set) {
    const auto kind = set.metadata.find("schema");
    if (kind != set.metadata.end() && kind->second.starts_with("faultline.device-checkpoint/"))
        throw RequestError(
            fmt::format("{}: is of a run on the device, whose sums have another order: expected --device cuda with it",
                        set.source));
    if (kind == set.metadata.end() || kind->second != schema)
        throw RequestError(fmt::format("{}: metadata \"schema\": expected {}", set.source, schema));
    expect_settings(set, config_);
    const std::size_t size = model_.weights().size();
    const std::size_t layers = qk_switch_.size(), heads = static_cast<std::size_t>(config_.model.heads);
    std::ranges::copy(get<float>(set, "weights", size), model_.weights().begin());
    Optimizer::State state;
    state.first = get<float>(set, "optimizer.first", size);
    state.second = get<float>(set, "optimizer.second", optimizer_.state().second.size());
    state.steps = number(set, "optimizer_steps");
    optimizer_.restore(std::move(state));
    SigmaReparametrisation<float>& sigma = model_.reparametrisation();
    sigma.restore(get<float>(set, "sigma_vectors", sigma.state().size()));
    const std::vector<double> switched = get<double>(set, "qk_switch", layers * (1 + heads));
    for (std::size_t l = 0; l < layers; ++l) {
        qk_switch_[l].on = switched[l * (1 + heads)] != 0;
        const auto from = switched.begin() + static_cast<std::ptrdiff_t>(l * (1 + heads) + 1);
        qk_switch_[l].logit_scale.assign(from, from + static_cast<std::ptrdiff_t>(heads));
    }
    const std::vector<double> scalars = get<double>(set, "scalars", 8);
    rate_factor_ = scalars[0];
    clip_factor_ = scalars[1];
    qk_clip_ = scalars[2];
    fp32_ffn_ = scalars[3] != 0;
    next_ = number(set, "next_step");
    report_ = {};
    report_.step = next_ - 1;
    report_.loss = scalars[4];
    report_.grad_norm = scalars[5];
    report_.learning_rate = scalars[6];
    report_.validation_loss = scalars[7];
    report_.layers = config_.model.layers;
    report_.heads = config_.model.heads;
    for_vectors_of(report_, [&](const char* name, std::vector<double>& values) {
        const std::string tensor = std::string("report.") + name;
        values = get<double>(set, tensor, static_cast<std::size_t>(set.at(tensor).size()));
    });
    report_.qk_normed = get<std::uint8_t>(set, "report.qk_normed", next_ == 0 ? 0 : layers);
    if (hooks_.step != nullptr) {
        const auto hook = get<std::uint8_t>(set, "hook", static_cast<std::size_t>(set.at("hook").size()));
        hooks_.step->load({reinterpret_cast<const char*>(hook.data()), hook.size()});
    }
    model_.prepare();
}

}  // namespace faultline::gpt
