// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/capture_summary.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/cpu/tiles.hpp>
#include <faultline/probes/saturation.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

TensorSummary described(const Tensor& tensor) {
    return {escaped(tensor.name), std::string(print_name(tensor.dtype)), shape_text(tensor.shape), tensor.shape};
}

TensorSummary summarized(const Tensor& tensor) {
    TensorSummary summary = described(tensor);
    double least = std::numeric_limits<double>::infinity(), largest = -least, squares = 0;
    std::size_t finite = 0;
    for (const double x : tensor.to_double()) {
        if (!std::isfinite(x)) continue;
        least = std::min(least, x);
        largest = std::max(largest, x);
        squares += x * x;
        ++finite;
    }
    constexpr double nothing = std::numeric_limits<double>::quiet_NaN();
    summary.nonfinite = static_cast<std::size_t>(tensor.size()) - finite;
    summary.least = finite > 0 ? least : nothing;
    summary.largest = finite > 0 ? largest : nothing;
    summary.rms = finite > 0 ? std::sqrt(squares / static_cast<double>(finite)) : nothing;
    return summary;
}

double largest_logit(const LayerCapture& layer, double scale) {
    double largest = 0;
    const std::ptrdiff_t group = layer.heads() / layer.kv_heads();
    for (std::ptrdiff_t b = 0; b < layer.q.batch; ++b)
        for (std::ptrdiff_t h = 0; h < layer.heads(); ++h) {
            const auto q = layer.q(b, h), k = layer.k(b, h / group);
            for (std::ptrdiff_t i = 0; i < q.rows; ++i) {
                const std::ptrdiff_t visible = visible_keys(i, q.rows, k.rows, layer.causal);
                for (std::ptrdiff_t j = 0; j < visible; ++j) {
                    double s = 0;
                    for (std::ptrdiff_t c = 0; c < q.cols; ++c) s += q(i, c) * k(j, c);
                    s *= scale;
                    if (layer.softcap > 0) s = layer.softcap * std::tanh(s / layer.softcap);
                    if (layer.bias)
                        s += (*layer.bias)(layer.bias->batch == 1 ? 0 : b, layer.bias->heads == 1 ? 0 : h)(i, j);
                    if (std::isfinite(s)) largest = std::max(largest, std::abs(s));
                }
            }
        }
    return largest;
}

double largest_key_mean_over_spread(const LayerCapture& layer) {
    double largest = 0;
    for (std::ptrdiff_t b = 0; b < layer.k.batch; ++b)
        for (std::ptrdiff_t h = 0; h < layer.kv_heads(); ++h) {
            const double ratio = key_mean_over_spread(layer.k(b, h));
            if (std::isfinite(ratio)) largest = std::max(largest, ratio);  // one key, or equal keys, have no spread
        }
    return largest;
}

std::string kernel_text(const ObservedKernel& kernel) {
    std::vector<std::string_view> what;
    for (const Output output : all_outputs)
        if (kernel[output]) what.push_back(name(output));
    if (kernel.lse) what.push_back("lse");
    return fmt::format("{} ({})", escaped(kernel.name), fmt::join(what, ", "));
}

/// `sequences`: of one layer of the file, one where it has no sequences of different length.
void fill(LayerSummary& summary, const std::vector<LayerCapture>& sequences) {
    const LayerCapture& layer = sequences.front();
    summary.heads = layer.heads();
    summary.kv_heads = layer.kv_heads();
    summary.sequences = sequences.size();
    summary.least_q = layer.q.rows;
    summary.least_k = layer.k.rows;
    summary.head_dim = layer.head_dim();
    summary.head_dim_v = layer.v.cols;
    summary.causal = layer.causal;
    summary.has_mask = layer.bias.has_value();
    summary.has_sink = !layer.sink.empty();
    summary.has_dropout = layer.dropout.has_value();
    summary.softcap = layer.softcap;
    summary.scale = layer.scale.value_or(1 / std::sqrt(static_cast<double>(layer.head_dim())));
    for (const LayerCapture& sequence : sequences) {
        summary.seq_q = std::max(summary.seq_q, sequence.q.rows);
        summary.seq_k = std::max(summary.seq_k, sequence.k.rows);
        summary.least_q = std::min(summary.least_q, sequence.q.rows);
        summary.least_k = std::min(summary.least_k, sequence.k.rows);
        summary.max_logit = std::max(summary.max_logit, largest_logit(sequence, summary.scale));
        summary.key_mean_over_spread = std::max(summary.key_mean_over_spread, largest_key_mean_over_spread(sequence));
    }
    for (const ObservedKernel& kernel : layer.observed) summary.kernels.push_back(kernel_text(kernel));
}

/// Whether the tensor is LAYER.q or LAYER.KERNEL.dq: what read_capture looks at.
bool is_input(std::string_view rest) {
    constexpr std::array<std::string_view, 10> others{"mask",        "softcap",    "sink",         "dropout",
                                                      "keep",        "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k",
                                                      "block_table", "seqused_k"};
    if (std::find(others.begin(), others.end(), rest) != others.end() || rest == "seqused_q") return true;
    for (const std::string_view suffix : {"_descale", "_global_scale", "_scale"})
        if (rest.ends_with(suffix)) {
            rest.remove_suffix(suffix.size());
            break;
        }
    return rest == "q" || rest == "k" || rest == "v" || rest == "do" || rest == "x";
}
bool is_observed(std::string_view rest) {
    const std::size_t dot = rest.find('.');
    if (dot == std::string_view::npos || dot == 0 || rest.find('.', dot + 1) != std::string_view::npos) return false;
    return find_output(rest.substr(dot + 1)).has_value() || rest.substr(dot + 1) == "lse";
}

}  // namespace

std::vector<LayerSummary> summarize_layers(const TensorSet& file) {
    std::vector<LayerSummary> layers;
    for (const std::string& name : layer_names(file)) {
        LayerSummary& summary = layers.emplace_back();
        summary.name = escaped(name);
        try {
            CaptureOptions anything;
            anything.layers = {name};
            anything.allow = {.single_key = true, .masked_rows = true, .mask_min = true};
            const Capture capture = capture_of(file, anything);
            fill(summary, capture.layers);
        } catch (const RequestError& error) {
            summary.problem = error.what();
        }
        for (const auto& [full, tensor] : file.tensors)
            if (full.starts_with(name + ".") &&
                (is_input(full.substr(name.size() + 1)) || is_observed(full.substr(name.size() + 1))))
                summary.tensors.push_back(summarized(tensor));
        // Inputs first, then kernel by kernel; by name within.
        const std::size_t begin = summary.name.size() + 1;
        std::stable_sort(summary.tensors.begin(), summary.tensors.end(),
                         [begin](const TensorSummary& a, const TensorSummary& b) {
                             return is_input(a.name.substr(begin)) && !is_input(b.name.substr(begin));
                         });
    }
    return layers;
}

std::vector<TensorSummary> other_tensors(const TensorSet& file, const std::vector<LayerSummary>& layers) {
    std::set<std::string> used;
    for (const LayerSummary& layer : layers)
        for (const TensorSummary& tensor : layer.tensors) used.insert(tensor.name);
    std::vector<TensorSummary> others;
    for (const auto& [name, tensor] : file.tensors)
        if (!used.contains(escaped(name))) others.push_back(described(tensor));
    return others;
}

}  // namespace faultline::cli
