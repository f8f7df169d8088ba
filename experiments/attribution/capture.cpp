// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/capture.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include <fmt/format.h>

#include <faultline/attribution/capture_checks.hpp>
#include <faultline/attribution/capture_extras.hpp>
#include <faultline/attribution/scaled_inputs.hpp>
#include <faultline/attribution/sequences.hpp>
#include <faultline/base/error.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/record/capture.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

constexpr std::array<std::string_view, 9> input_suffixes{"q",       "k",    "v",       "do",  "mask",
                                                         "softcap", "sink", "dropout", "keep"};

/// "layer1.q" -> "layer1", "q".
std::pair<std::string_view, std::string_view> split_last(std::string_view name) {
    const std::size_t dot = name.rfind('.');
    if (dot == std::string_view::npos || dot == 0) return {{}, name};
    return {name.substr(0, dot), name.substr(dot + 1)};
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Digits compare as numbers, so that layer2 comes before layer10.
bool natural_less(std::string_view a, std::string_view b) {
    const std::string_view all_a = a, all_b = b;
    while (!a.empty() && !b.empty()) {
        if (!is_digit(a[0]) || !is_digit(b[0])) {
            if (a[0] != b[0]) return a[0] < b[0];
            a.remove_prefix(1);
            b.remove_prefix(1);
            continue;
        }
        const auto number = [](std::string_view& text) {
            std::size_t end = 0;
            while (end < text.size() && is_digit(text[end])) ++end;
            std::string_view digits = text.substr(0, end);
            text.remove_prefix(end);
            while (digits.size() > 1 && digits[0] == '0') digits.remove_prefix(1);
            return digits;
        };
        const std::string_view x = number(a), y = number(b);
        if (x.size() != y.size()) return x.size() < y.size();
        if (x != y) return x < y;
    }
    if (a.empty() != b.empty()) return a.empty();
    return all_a < all_b;  // layer01 and layer1: any order, but always the same
}

std::vector<std::string> chosen_layers(const TensorSet& file, const std::vector<std::string>& wanted) {
    const std::vector<std::string> there = layer_names(file);
    if (wanted.empty()) return there;
    const std::vector<std::string_view> candidates(there.begin(), there.end());
    for (const std::string& name : wanted) {
        const bool is_there = std::any_of(there.begin(), there.end(), [&](const std::string& layer) {
            return layer == name || detail::batch_of_sequence(layer) == name;
        });
        if (!is_there) {
            throw RequestError(fmt::format("{}: no layer is called {}: {}", file.source, in_quotes(name),
                                           expected_one_of(name, candidates)));
        }
    }
    std::vector<std::string> chosen;
    std::copy_if(there.begin(), there.end(), std::back_inserter(chosen), [&](const std::string& name) {
        return std::any_of(wanted.begin(), wanted.end(), [&](const std::string& asked) {
            return asked == name || asked == detail::batch_of_sequence(name);
        });
    });
    return chosen;
}

[[noreturn]] void refuse_metadata(const TensorSet& file, std::string_view key, const std::string& value,
                                  std::string_view expected) {
    throw RequestError(
        fmt::format("{}: metadata {}: {}: expected {}", file.source, in_quotes(key), in_quotes(value), expected));
}

std::optional<bool> metadata_causal(const TensorSet& file) {
    const auto found = file.metadata.find("causal");
    if (found == file.metadata.end()) return std::nullopt;
    const std::string& text = found->second;
    if (text == "true" || text == "True" || text == "1") return true;
    if (text == "false" || text == "False" || text == "0") return false;
    refuse_metadata(file, "causal", text, "true or false");
}

std::optional<double> metadata_scale(const TensorSet& file) {
    const auto found = file.metadata.find("scale");
    if (found == file.metadata.end()) return std::nullopt;
    const std::string& text = found->second;
    double scale = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), scale);
    if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(scale) || scale <= 0) {
        refuse_metadata(file, "scale", text, "a positive number");
    }
    return scale;
}

/// The scale to use where it is not the real number 1/sqrt(head_dim), of which a file can hold only a rounding.
std::optional<double> layer_scale(const TensorSet& file, const CaptureOptions& options, std::ptrdiff_t head_dim) {
    if (options.scale) return options.scale;
    const std::optional<double> scale = metadata_scale(file);
    constexpr double same = 1e-6;  // wider than an fp32 rounding of 1/sqrt(head_dim), far below any intended difference
    if (scale && std::abs(*scale * std::sqrt(static_cast<double>(head_dim)) - 1) <= same) return std::nullopt;
    return scale;
}

HeadArray required_input(const TensorSet& file, const std::string& layer, std::string_view suffix) {
    const Tensor* tensor = file.find(fmt::format("{}.{}", layer, suffix));
    if (tensor == nullptr) {
        throw RequestError(fmt::format("{}: tensor {} is missing: expected q, k and v of every layer", file.source,
                                       in_quotes(fmt::format("{}.{}", layer, suffix))));
    }
    HeadArray array = detail::head_array(file, *tensor);
    detail::expect_finite(file, *tensor, array);
    return array;
}

/// lse is [batch, heads, seq]; a trailing dimension of 1 is accepted.
HeadArray lse_array(const TensorSet& file, const Tensor& tensor, const LayerCapture& layer) {
    Tensor column = tensor;
    const bool has_column = tensor.shape.size() == 4 && tensor.shape.back() == 1;
    if (!has_column) column.shape.push_back(1);
    HeadArray lse = column.shape.size() < 2 || column.shape.size() > 4 ? HeadArray{} : detail::head_array(file, column);
    if (lse.batch != layer.q.batch || lse.heads != layer.q.heads || lse.rows != layer.q.rows) {
        detail::refuse(
            file, tensor.name,
            fmt::format("shape {}: expected [{}, {}, {}] (batch, heads, seq of {})", shape_text(tensor.shape),
                        layer.q.batch, layer.q.heads, layer.q.rows, in_quotes(layer.name + ".q")));
    }
    return lse;
}

std::vector<double> sink_gradients(const TensorSet& file, const Tensor& tensor, const LayerCapture& layer) {
    if (layer.sink.empty())
        detail::refuse(
            file, tensor.name,
            fmt::format("is a gradient of sinks that are not there: expected {}", in_quotes(layer.name + ".sink")));
    if (tensor.size() != layer.heads())
        detail::refuse(
            file, tensor.name,
            fmt::format("shape {}: expected [{}], one for each sink", shape_text(tensor.shape), layer.heads()));
    return tensor.to_double();
}

HeadArray observed_array(const TensorSet& file, const Tensor& tensor, const LayerCapture& layer, Output output) {
    HeadArray array = detail::head_array(file, tensor);
    const HeadArray& rows = output == Output::o || output == Output::dq ? layer.q : layer.k;
    const std::ptrdiff_t cols = output == Output::o || output == Output::dv ? layer.v.cols : layer.q.cols;
    if (array.batch != rows.batch || array.heads != rows.heads || array.rows != rows.rows || array.cols != cols) {
        detail::refuse(
            file, tensor.name,
            fmt::format("shape {}: expected [{}, {}, {}, {}] as the inputs of {} give it", shape_text(tensor.shape),
                        rows.batch, rows.heads, rows.rows, cols, in_quotes(layer.name)));
    }
    return array;
}

/// KERNEL and what it returned, of the part of a name behind its layer; nothing where it is no such name. A dot in the
/// kernel's name would make "a.b" of layer "x" and "b" of layer "x.a" the same tensor.
struct ObservedName {
    std::string_view kernel;
    std::optional<Output> output;  ///< empty: lse or dsink
    bool is_dsink = false;
};
std::optional<ObservedName> observed_name(std::string_view rest) {
    const auto [kernel, suffix] = split_last(rest);
    const std::optional<Output> output = find_output(suffix);
    if (kernel.empty() || kernel.find('.') != std::string_view::npos ||
        (!output && suffix != "lse" && suffix != "dsink"))
        return std::nullopt;
    return ObservedName{kernel, output, suffix == "dsink"};
}

std::vector<std::string> unused_tensors(const TensorSet& file) {
    const std::vector<std::string> layers = layer_names(file);
    std::vector<std::string> unused;
    for (const auto& [name, tensor] : file.tensors) {
        const auto is_used = [&full = name](const std::string& layer) {
            if (!full.starts_with(layer + ".")) return false;
            const std::string_view rest = std::string_view(full).substr(layer.size() + 1);
            // LAYER.x, the layer's input, is for the probes: no misspelt name.
            return rest == "x" ||
                   std::find(input_suffixes.begin(), input_suffixes.end(), rest) != input_suffixes.end() ||
                   observed_name(rest).has_value();
        };
        if (std::none_of(layers.begin(), layers.end(), is_used)) unused.push_back(name);
    }
    return unused;
}

std::vector<ObservedKernel> observed_kernels(const TensorSet& file, const LayerCapture& layer) {
    std::map<std::string, ObservedKernel, decltype(&natural_less)> kernels(&natural_less);
    const std::string prefix = layer.name + ".";
    for (const auto& [name, tensor] : file.tensors) {
        if (!name.starts_with(prefix)) continue;
        const auto found = observed_name(std::string_view(name).substr(prefix.size()));
        if (!found) continue;
        ObservedKernel& observed = kernels[std::string(found->kernel)];
        observed.name = found->kernel;
        if (found->output)
            observed.outputs[static_cast<std::size_t>(*found->output)] =
                observed_array(file, tensor, layer, *found->output);
        else if (found->is_dsink)
            observed.dsink = sink_gradients(file, tensor, layer);
        else
            observed.lse = lse_array(file, tensor, layer);
    }
    std::vector<ObservedKernel> list;
    for (auto& [name, kernel] : kernels) list.push_back(std::move(kernel));
    return list;
}

LayerCapture read_layer(const TensorSet& file, const std::string& name, const CaptureOptions& options) {
    LayerCapture layer;
    layer.name = name;
    layer.q = required_input(file, name, "q");
    layer.k = required_input(file, name, "k");
    layer.v = required_input(file, name, "v");
    if (file.find(name + ".do") != nullptr) layer.dout = required_input(file, name, "do");
    detail::expect_consistent(file, layer);

    const Tensor* mask = file.find(name + ".mask");
    layer.causal = options.causal.value_or(metadata_causal(file).value_or(mask == nullptr));
    layer.scale = layer_scale(file, options, layer.head_dim());
    if (mask != nullptr) layer.bias = detail::mask_array(file, *mask, layer, options.allow);
    detail::read_extras(file, options, layer);
    detail::expect_not_degenerate(file, layer, options.allow);
    layer.observed = observed_kernels(file, layer);
    return layer;
}

}  // namespace

std::string_view name(Output output) {
    switch (output) {
        case Output::o:
            return "o";
        case Output::dq:
            return "dq";
        case Output::dk:
            return "dk";
        case Output::dv:
            return "dv";
    }
    return "?";
}

std::optional<Output> find_output(std::string_view wanted) {
    for (const Output output : all_outputs)
        if (name(output) == wanted) return output;
    return std::nullopt;
}

std::vector<std::string> layer_names(const TensorSet& file) {
    std::set<std::string, decltype(&natural_less)> found(&natural_less);
    for (const auto& [name, tensor] : file.tensors) {
        const auto [layer, suffix] = split_last(name);
        constexpr std::array<std::string_view, 5> naming{"q", "k", "v", "do", "mask"};
        if (!layer.empty() && std::find(naming.begin(), naming.end(), suffix) != naming.end()) {
            found.emplace(layer);
        }
    }
    if (found.empty()) {
        throw RequestError(fmt::format(
            "{}: no tensor is named as an input of attention: expected LAYER.q, LAYER.k, LAYER.v and LAYER.do, "
            "such as \"layer0.q\"",
            file.source));
    }
    return {found.begin(), found.end()};
}

const LayerCapture& Capture::operator[](std::string_view layer) const {
    std::vector<std::string_view> names;
    for (const LayerCapture& candidate : layers) {
        if (candidate.name == layer) return candidate;
        names.push_back(candidate.name);
    }
    throw RequestError(
        fmt::format("{}: no layer is called {}: {}", escaped(path), in_quotes(layer), expected_one_of(layer, names)));
}

Capture capture_of(const TensorSet& given, const CaptureOptions& options) {
    const std::optional<TensorSet> unscaled = detail::inputs_unscaled(given);
    const std::optional<TensorSet> apart = detail::sequences_apart(unscaled ? *unscaled : given);
    const TensorSet& file = apart ? *apart : (unscaled ? *unscaled : given);
    if (options.scale && !(std::isfinite(*options.scale) && *options.scale > 0)) {
        throw RequestError(fmt::format("scale: {}: expected a positive number", *options.scale));
    }
    if (options.softcap && !is_softcap(*options.softcap))
        throw RequestError(fmt::format("softcap: {}: expected 0 for none, or a number from {} to {}", *options.softcap,
                                       least_softcap, most_softcap));
    Capture capture;
    capture.path = file.source;
    capture.metadata = {file.metadata.begin(), file.metadata.end()};
    capture.unused = unused_tensors(file);
    for (const std::string& name : chosen_layers(file, options.layers))
        capture.layers.push_back(read_layer(file, name, options));
    return capture;
}

Capture read_capture(const std::string& path, const CaptureOptions& options) {
    Capture capture = capture_of(read_tensors(path), options);
    capture.path = path;
    return capture;
}

}  // namespace faultline
