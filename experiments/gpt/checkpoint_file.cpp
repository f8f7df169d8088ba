// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/checkpoint_file.hpp>

#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt/fingerprint.hpp>
#include <faultline/tensor/safetensors.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::gpt {
namespace {

constexpr const char* checksum_key = "checksum";
constexpr std::string_view config_prefix = "config.";

/// Of everything but the checksum itself. Sizes stand before texts and bytes, so that nothing can move from one to the next.
std::string checksum_of(const TensorSet& set) {
    const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> hash(XXH3_createState(), &XXH3_freeState);
    if (!hash) throw std::bad_alloc();
    XXH3_128bits_reset(hash.get());
    const auto add = [&](const void* bytes, std::size_t count) {
        const std::uint64_t size = count;
        XXH3_128bits_update(hash.get(), &size, sizeof size);
        if (count > 0) XXH3_128bits_update(hash.get(), bytes, count);
    };
    const auto text = [&](std::string_view of) { add(of.data(), of.size()); };
    for (const auto& [key, value] : set.metadata) {
        if (key == checksum_key) continue;
        text(key);
        text(value);
    }
    for (const auto& [name, tensor] : set.tensors) {
        text(name);
        text(print_name(tensor.dtype));
        add(tensor.shape.data(), tensor.shape.size() * sizeof tensor.shape[0]);
        add(tensor.bytes.data(), tensor.bytes.size());
    }
    const XXH128_hash_t sum = XXH3_128bits_digest(hash.get());
    return fmt::format("xxh3-128:{:016x}{:016x}", sum.high64, sum.low64);
}

/// A setting as a command has it, where the fingerprint has a name or a number of its own.
struct Words {
    std::string setting, value;
};

template <std::size_t N>
std::string name_of(std::string_view number, const std::array<const char*, N>& names) {
    std::size_t i = N;
    std::from_chars(number.data(), number.data() + number.size(), i);
    return i < N ? names[i] : escaped(std::string(number));
}

/// "1: layer 0 heads [2] <plan>", the plan as TOML or "fast".
Words attention_words(const std::string& key, const std::optional<std::string>& value) {
    if (!value) return {"attention", key == "attention0" ? "fast in every layer" : "no more than that"};
    int number = 0, layer = -1;
    (void)std::sscanf(value->c_str(), "%d: layer %d", &number, &layer);
    const std::size_t heads = value->find(" heads "), bracket = value->find("] ");
    std::string plan = bracket == std::string::npos ? *value : value->substr(bracket + 2);
    if (const std::size_t name = plan.find("name = \""); name != std::string::npos)
        plan = plan.substr(name + 8, plan.find('"', name + 8) - name - 8);
    const std::string some = heads == std::string::npos || bracket == std::string::npos
                                 ? std::string("[]")
                                 : value->substr(heads + 7, bracket - heads - 6);
    const std::string place = layer < 0 ? "every layer" : fmt::format("layer {}", layer);
    return {layer < 0 ? "attention" : "layer-attention",
            escaped(fmt::format("{} in {}{}", plan, some == "[]" ? "" : "heads " + some + " of ", place))};
}

/// `value` empty: the run has nothing of the name.
Words words_of(const std::string& key, const std::optional<std::string>& value) {
    if (key.starts_with("attention")) return attention_words(key, value);
    const std::string text = value.value_or("");
    if (key == "bf16") return {"precision", text == "true" ? "bf16" : "fp32"};
    if (key == "cosine") return {"schedule", text == "true" ? "cosine" : "constant"};
    if (key == "optimizer") return {key, name_of(text, std::array{"adamw", "muon", "sgd"})};
    if (key == "qk-norm") return {key, name_of(text, std::array{"none", "parameter-free", "learned"})};
    if (key == "norm-statistics")
        return {key, value ? name_of(text, std::array{"fp32", "bf16", "bf16-forward", "bf16-backward"}) : "fp32"};
    if (key == "inject") return {key, text.empty() ? "no fault" : in_quotes(text)};
    return {key, value ? escaped(text) : "nothing"};
}

}  // namespace

void add_settings(TensorSet& state, const TrainConfig& config) {
    for (const auto& [key, value] : fingerprint(config)) state.metadata[std::string(config_prefix) + key] = value;
}

void expect_settings(const TensorSet& state, const TrainConfig& config) {
    std::map<std::string, std::pair<std::optional<std::string>, std::optional<std::string>>> was_and_is;
    std::vector<std::string> order;
    for (const auto& [key, value] : fingerprint(config)) {
        was_and_is[key].second = value;
        order.push_back(key);
    }
    for (const auto& [key, value] : state.metadata) {
        if (!key.starts_with(config_prefix)) continue;
        const std::string name = key.substr(config_prefix.size());
        if (!was_and_is.contains(name)) order.push_back(name);
        was_and_is[name].first = value;
    }
    for (const std::string& key : order) {
        const auto& [was, is] = was_and_is[key];
        if (was == is) continue;
        const Words old = words_of(key, was), now = words_of(key, is);
        const std::string other = old.value == now.value ? "another " : "";
        throw RequestError(
            fmt::format("{}: {}: the checkpoint is of a run with {}{}: expected {}, as this command asks for; "
                        "a run goes on with the options that it began with",
                        state.source, is ? now.setting : old.setting, other, old.value, now.value));
    }
}

void write_checkpoint(const std::string& path, TensorSet state) {
    state.metadata[checksum_key] = checksum_of(state);
    write_safetensors(path, state);
}

TensorSet read_checkpoint(const std::string& path) {
    TensorSet state = read_safetensors(path);
    expect_checksum(state);
    return state;
}

void expect_checksum(const TensorSet& state) {
    const auto refuse = [&] {
        throw RequestError(
            fmt::format("{}: checksum: is not that of what the file holds: expected the checkpoint as it was written",
                        state.source));
    };
    const auto schema = state.metadata.find("schema");
    if (schema == state.metadata.end() || schema->second.find("checkpoint/") == std::string::npos)
        return;                                      // no checkpoint: whoever reads it says so
    for (const auto& [key, value] : state.metadata)  // a damaged name, "checksum" itself perhaps
        if (key != checksum_key && key != "schema" && key != "next_step" && key != "optimizer_steps" &&
            !key.starts_with(config_prefix))
            refuse();
    const auto found = state.metadata.find(checksum_key);
    if (found != state.metadata.end() && found->second != checksum_of(state)) refuse();
}

}  // namespace faultline::gpt
