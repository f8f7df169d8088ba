// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/checkpoint.hpp>

#include <charconv>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/format/format.hpp>
#include <faultline/gpt/checkpoint_file.hpp>
#include <faultline/gpt/report_vectors.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::gpt {
namespace {

constexpr const char* schema = "faultline.device-checkpoint/2";

template <class T>
void put(TensorSet& set, const std::string& name, const std::vector<T>& values) {
    set.add(make_tensor<T>(name, {static_cast<std::int64_t>(values.size())}, std::span<const T>(values)));
}

template <class T>
std::vector<T> get(const TensorSet& set, const std::string& name, std::size_t count) {
    const Tensor& tensor = set.at(name);
    if (tensor.dtype != dtype_of<T>() || tensor.bytes.size() != count * sizeof(T))
        throw RequestError(fmt::format("{}: tensor {}: {} of shape {}: expected {} {} numbers", set.source, name,
                                       print_name(tensor.dtype), shape_text(tensor.shape), count,
                                       print_name(dtype_of<T>())));
    std::vector<T> values(count);
    if (count > 0) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    return values;
}

std::string metadata(const TensorSet& set, const std::string& key) {
    const auto found = set.metadata.find(key);
    return found == set.metadata.end() ? "missing" : found->second;
}
std::int64_t number(const TensorSet& set, const char* key) {
    const std::string text = metadata(set, key);
    std::int64_t value = -1;
    std::from_chars(text.data(), text.data() + text.size(), value);
    if (value < 0)
        throw RequestError(fmt::format("{}: metadata {}: expected a step number", set.source, in_quotes(key)));
    return value;
}

}  // namespace

void save_device_checkpoint(const std::string& path, const TrainConfig& config, std::int64_t next_step,
                            const StepReport& report, const DeviceSwitches& switches, const DeviceArrays& arrays,
                            const std::string& hook) {
    TensorSet set;
    put(set, "weights", arrays.weights);
    put(set, "optimizer.first", arrays.first);
    put(set, "optimizer.second", arrays.second);
    const std::vector<double> scalars{report.loss, report.grad_norm, report.learning_rate, report.validation_loss};
    put(set, "scalars", scalars);
    for_vectors_of(report, [&](const char* name, const std::vector<double>& values) {
        put(set, std::string("report.") + name, values);
    });
    put(set, "report.qk_normed", report.qk_normed);
    std::vector<double> switched{switches.rate_factor, switches.clip_factor, switches.qk_clip};
    for (const std::vector<double>& layer : switches.qk_scales)
        for (int h = 0; h < config.model.heads; ++h)
            switched.push_back(layer.empty() ? 0 : layer[static_cast<std::size_t>(h)]);
    put(set, "switches", switched);
    put(set, "hook", std::vector<std::uint8_t>(hook.begin(), hook.end()));
    set.metadata["optimizer_steps"] = std::to_string(switches.optimizer_steps);
    set.metadata["schema"] = schema;
    set.metadata["next_step"] = std::to_string(next_step);
    add_settings(set, config);
    write_checkpoint(path, std::move(set));
}

DeviceCheckpoint load_device_checkpoint(const std::string& path, const TrainConfig& config, std::size_t count,
                                        std::size_t seconds) {
    const TensorSet set = read_checkpoint(path);
    if (const std::string was = metadata(set, "schema"); was != schema)
        throw RequestError(
            fmt::format("{}: metadata \"schema\": {}: expected {}, of a run that began with --device cuda", set.source,
                        in_quotes(was), schema));
    expect_settings(set, config);
    DeviceCheckpoint out;
    out.next_step = number(set, "next_step");
    out.arrays = {get<float>(set, "weights", count), get<float>(set, "optimizer.first", count),
                  get<float>(set, "optimizer.second", seconds)};
    const std::vector<double> scalars = get<double>(set, "scalars", 4);
    out.report.step = out.next_step - 1;
    out.report.loss = scalars[0];
    out.report.grad_norm = scalars[1];
    out.report.learning_rate = scalars[2];
    out.report.validation_loss = scalars[3];
    out.report.layers = config.model.layers;
    out.report.heads = config.model.heads;
    for_vectors_of(out.report, [&](const char* name, std::vector<double>& values) {
        const std::string tensor = std::string("report.") + name;
        values = get<double>(set, tensor, static_cast<std::size_t>(set.at(tensor).size()));
    });
    out.report.qk_normed =
        get<std::uint8_t>(set, "report.qk_normed", static_cast<std::size_t>(set.at("report.qk_normed").size()));
    const auto layers = static_cast<std::size_t>(config.model.layers),
               heads = static_cast<std::size_t>(config.model.heads);
    const std::vector<double> switched = get<double>(set, "switches", 3 + layers * heads);
    out.switches = {switched[0], switched[1], switched[2], number(set, "optimizer_steps"), {}};
    for (std::size_t l = 0; l < layers; ++l) {
        const auto from = switched.begin() + static_cast<std::ptrdiff_t>(3 + l * heads);
        const bool on = *from != 0;
        out.switches.qk_scales.emplace_back(from, on ? from + static_cast<std::ptrdiff_t>(heads) : from);
    }
    const auto hook = get<std::uint8_t>(set, "hook", static_cast<std::size_t>(set.at("hook").size()));
    out.hook.assign(hook.begin(), hook.end());
    return out;
}

float round_to_bf16(float value) {
    return static_cast<float>(round(static_cast<double>(value), bf16, Rounding::nearest_even));
}

}  // namespace faultline::gpt
