// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/checkpoint.hpp>

#include <charconv>
#include <cstring>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/format/format.hpp>
#include <faultline/gpt/fingerprint.hpp>
#include <faultline/tensor/safetensors.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::gpt {
namespace {

constexpr const char* schema = "faultline.device-checkpoint/1";

void put(TensorSet& set, const char* name, const std::vector<float>& values) {
    set.add(make_tensor<float>(name, {static_cast<std::int64_t>(values.size())}, std::span<const float>(values)));
}

template <class T>
std::vector<T> get(const TensorSet& set, const char* name, std::size_t count) {
    const Tensor& tensor = set.at(name);
    if (tensor.dtype != dtype_of<T>() || tensor.bytes.size() != count * sizeof(T))
        throw RequestError(fmt::format("{}: tensor {}: {} of shape {}: expected {} {} numbers", set.source, name,
                                       print_name(tensor.dtype), shape_text(tensor.shape), count,
                                       print_name(dtype_of<T>())));
    std::vector<T> values(count);
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    return values;
}

std::string metadata(const TensorSet& set, const std::string& key) {
    const auto found = set.metadata.find(key);
    return found == set.metadata.end() ? "missing" : found->second;
}

}  // namespace

void save_device_checkpoint(const std::string& path, const TrainConfig& config, std::int64_t next_step,
                            const StepReport& report, const DeviceArrays& arrays) {
    TensorSet set;
    put(set, "weights", arrays.weights);
    put(set, "optimizer.first", arrays.first);
    put(set, "optimizer.second", arrays.second);
    const std::vector<double> scalars{report.loss, report.grad_norm, report.learning_rate, report.validation_loss};
    set.add(make_tensor<double>("scalars", {4}, std::span<const double>(scalars)));
    set.metadata["schema"] = schema;
    set.metadata["next_step"] = std::to_string(next_step);
    for (const auto& [key, value] : fingerprint(config)) set.metadata["config." + key] = value;
    write_safetensors(path, set);
}

DeviceCheckpoint load_device_checkpoint(const std::string& path, const TrainConfig& config, std::size_t count) {
    const TensorSet set = read_safetensors(path);
    if (const std::string was = metadata(set, "schema"); was != schema)
        throw RequestError(
            fmt::format("{}: metadata \"schema\": {}: expected {}, of a run that began with --device cuda", set.source,
                        in_quotes(was), schema));
    for (const auto& [key, value] : fingerprint(config))
        if (const std::string was = metadata(set, "config." + key); was != value)
            throw RequestError(
                fmt::format("{}: {}: the checkpoint is of a run with {}: expected {}, as this command "
                            "asks for; a run goes on with the options that it began with",
                            set.source, key, in_quotes(was), in_quotes(value)));
    DeviceCheckpoint out;
    const std::string next = metadata(set, "next_step");
    out.next_step = -1;
    std::from_chars(next.data(), next.data() + next.size(), out.next_step);
    if (out.next_step < 0)
        throw RequestError(fmt::format("{}: metadata \"next_step\": expected a step number", set.source));
    out.arrays = {get<float>(set, "weights", count), get<float>(set, "optimizer.first", count),
                  get<float>(set, "optimizer.second", count)};
    const std::vector<double> scalars = get<double>(set, "scalars", 4);
    out.report.step = out.next_step - 1;
    out.report.loss = scalars[0];
    out.report.grad_norm = scalars[1];
    out.report.learning_rate = scalars[2];
    out.report.validation_loss = scalars[3];
    out.report.layers = config.model.layers;
    out.report.heads = config.model.heads;
    return out;
}

float round_to_bf16(float value) {
    return static_cast<float>(round(static_cast<double>(value), bf16, Rounding::nearest_even));
}

}  // namespace faultline::gpt
