// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/capture_extras.hpp>

#include <charconv>
#include <cmath>
#include <functional>

#include <fmt/format.h>

#include <faultline/attribution/capture_checks.hpp>
#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::detail {
namespace {

/// LAYER.NAME as one number, else the metadata's NAME; nothing where the file has neither.
std::optional<double> number_of(const TensorSet& file, const std::string& layer, const std::string& name,
                                const std::function<bool(double)>& fits, std::string_view expected) {
    if (const Tensor* tensor = file.find(layer + "." + name)) {
        if (tensor->size() != 1)
            refuse(file, tensor->name,
                   fmt::format("shape {}: expected one number", faultline::shape_text(tensor->shape)));
        const double value = tensor->to_double()[0];
        if (!fits(value)) refuse(file, tensor->name, fmt::format("{}: expected {}", value, expected));
        return value;
    }
    const auto found = file.metadata.find(name);
    if (found == file.metadata.end()) return std::nullopt;
    const std::string& text = found->second;
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || !fits(value))
        throw RequestError(
            fmt::format("{}: metadata {}: {}: expected {}", file.source, in_quotes(name), in_quotes(text), expected));
    return value;
}

std::vector<double> sink_logits(const TensorSet& file, const Tensor& tensor, const LayerCapture& layer) {
    if (tensor.size() != layer.heads())
        refuse(file, tensor.name,
               fmt::format("shape {}: expected [{}], one score per head", faultline::shape_text(tensor.shape),
                           layer.heads()));
    std::vector<double> logits = tensor.to_double();
    for (std::size_t h = 0; h < logits.size(); ++h)
        if (!std::isfinite(logits[h]))
            refuse(file, tensor.name,
                   fmt::format("element [{}] is {}: expected finite logits", h,
                               std::isnan(logits[h]) ? "NaN" : "infinite"));
    return logits;
}

HeadArray dropout_mask(const TensorSet& file, const Tensor& tensor, const LayerCapture& layer) {
    const std::vector<std::int64_t>& shape = tensor.shape;
    std::array<std::ptrdiff_t, 4> extent{1, 1, 1, 1};
    const bool rank_fits = shape.size() >= 2 && shape.size() <= 4;
    if (rank_fits) std::copy(shape.begin(), shape.end(), extent.end() - static_cast<std::ptrdiff_t>(shape.size()));
    const bool fits = rank_fits && (extent[0] == 1 || extent[0] == layer.q.batch) &&
                      (extent[1] == 1 || extent[1] == layer.heads()) && extent[2] == layer.q.rows &&
                      extent[3] == layer.k.rows;
    if (!fits)
        refuse(file, tensor.name,
               fmt::format("shape {}: expected [{}, {}, {}, {}] (batch, heads, queries, keys)",
                           faultline::shape_text(shape), or_one(layer.q.batch), or_one(layer.heads()), layer.q.rows,
                           layer.k.rows));
    HeadArray mask{extent[0], extent[1], extent[2], extent[3], tensor.to_double(), tensor.dtype};
    for (std::size_t i = 0; i < mask.values.size(); ++i)
        if (mask.values[i] != 0 && mask.values[i] != 1)
            refuse(file, tensor.name,
                   fmt::format(
                       "element {} of {} is {}: expected 1 or true where p is kept, 0 or false where it is dropped", i,
                       mask.values.size(), mask.values[i]));
    return mask;
}

}  // namespace

void read_extras(const TensorSet& file, const CaptureOptions& options, LayerCapture& layer) {
    const std::optional<double> softcap =
        number_of(file, layer.name, "softcap", is_softcap,
                  fmt::format("0 for none, or a number from {} to {}", least_softcap, most_softcap));
    layer.softcap = options.softcap.value_or(softcap.value_or(0));
    if (const Tensor* sink = file.find(layer.name + ".sink")) layer.sink = sink_logits(file, *sink, layer);
    const Tensor* mask = file.find(layer.name + ".dropout");
    const std::optional<double> keep = number_of(
        file, layer.name, "keep", [](double x) { return x > 0 && x <= 1; }, "a probability above 0 and at most 1");
    if (mask == nullptr) {
        if (keep && *keep != 1)
            refuse(
                file, layer.name + ".dropout",
                fmt::format("is missing: expected the mask of what was kept, since the capture says keep = {}", *keep));
        return;
    }
    layer.dropout = dropout_mask(file, *mask, layer);
    if (!keep)
        refuse(file, layer.name + ".keep", "is missing: expected the probability of being kept, beside a dropout mask");
    layer.keep = *keep;
}

}  // namespace faultline::detail
