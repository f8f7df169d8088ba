// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/capture_checks.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/cpu/tiles.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::detail {
namespace {

bool is_floating(Dtype dtype) {
    using enum Dtype;
    return dtype == f64 || dtype == f32 || dtype == f16 || dtype == bf16 || dtype == e5m2 || dtype == e4m3;
}

/// Where element `flat` of the tensor stands, in the tensor's own rank.
std::string index_text(const Tensor& tensor, std::size_t flat) {
    std::vector<std::int64_t> at(tensor.shape.size());
    auto rest = static_cast<std::int64_t>(flat);
    for (std::size_t i = tensor.shape.size(); i-- > 0;) {
        at[i] = rest % tensor.shape[i];
        rest /= tensor.shape[i];
    }
    return faultline::shape_text(at);
}

HeadArray reshaped(const TensorSet& file, const Tensor& tensor) {
    const std::vector<std::int64_t>& shape = tensor.shape;
    if (shape.size() < 2 || shape.size() > 4) {
        refuse(
            file, tensor.name,
            fmt::format("shape {}: expected [batch, heads, seq, head_dim], [heads, seq, head_dim] or [seq, head_dim]",
                        faultline::shape_text(shape)));
    }
    constexpr std::array<std::string_view, 4> dimension{"batch", "heads", "seq", "head_dim"};
    for (std::size_t i = 0; i < shape.size(); ++i) {
        if (shape[i] == 0) {
            refuse(file, tensor.name,
                   fmt::format("shape {}: {} is 0: expected 1 or more", faultline::shape_text(shape),
                               dimension[i + 4 - shape.size()]));
        }
    }
    std::array<std::ptrdiff_t, 4> extent{1, 1, 1, 1};
    std::copy(shape.begin(), shape.end(), extent.end() - static_cast<std::ptrdiff_t>(shape.size()));
    return {extent[0], extent[1], extent[2], extent[3], tensor.to_double(), tensor.dtype};
}

/// What frameworks write for "masked" when they do not write -inf: finfo.min of a format, perhaps cast to another.
bool is_mask_minimum(double value) {
    constexpr double fp16_min = -65504.0;         // -(2 - 2^-10) 2^15
    constexpr double bf16_min = -0x1.fep127;      // -(2 - 2^-7) 2^127
    constexpr double fp32_min = -0x1.fffffep127;  // -(2 - 2^-23) 2^127
    constexpr double fp64_min = std::numeric_limits<double>::lowest();
    return value == fp16_min || value == bf16_min || value == fp32_min || value == fp64_min;
}

void expect_same(const TensorSet& file, const LayerCapture& layer, std::string_view tensor, const HeadArray& is,
                 std::string_view other, const HeadArray& like, std::string_view what, bool same) {
    if (same) return;
    const std::string full = fmt::format("{}.{}", layer.name, tensor);
    refuse(file, full,
           fmt::format("shape {} does not match {} {}: expected {} to agree", shape_text(is),
                       in_quotes(fmt::format("{}.{}", layer.name, other)), shape_text(like), what));
}

}  // namespace

void refuse(const TensorSet& file, std::string_view tensor, std::string_view wrong) {
    throw RequestError(fmt::format("{}: tensor {}: {}", file.source, in_quotes(tensor), wrong));
}

std::string or_one(std::ptrdiff_t extent) { return extent == 1 ? "1" : fmt::format("{} or 1", extent); }

std::string shape_text(const HeadArray& array) {
    return fmt::format("[{}, {}, {}, {}]", array.batch, array.heads, array.rows, array.cols);
}

HeadArray head_array(const TensorSet& file, const Tensor& tensor) {
    if (!is_floating(tensor.dtype)) {
        refuse(file, tensor.name, fmt::format("dtype {}: expected a floating-point format", print_name(tensor.dtype)));
    }
    return reshaped(file, tensor);
}

void expect_finite(const TensorSet& file, const Tensor& tensor, const HeadArray& array) {
    const auto bad = std::find_if(array.values.begin(), array.values.end(), [](double x) { return !std::isfinite(x); });
    if (bad == array.values.end()) return;
    const auto count = std::count_if(bad, array.values.end(), [](double x) { return !std::isfinite(x); });
    refuse(file, tensor.name,
           fmt::format("element {} is {}{}: expected finite numbers",
                       index_text(tensor, static_cast<std::size_t>(bad - array.values.begin())),
                       std::isnan(*bad) ? "NaN" : (*bad > 0 ? "infinite" : "-infinite"),
                       count > 1 ? fmt::format(" (the first of {})", count) : ""));
}

HeadArray mask_array(const TensorSet& file, const Tensor& tensor, const LayerCapture& layer, const Allowances& allow) {
    if (tensor.dtype != Dtype::boolean && !is_floating(tensor.dtype)) {
        refuse(
            file, tensor.name,
            fmt::format("dtype {}: expected a floating-point format (added to the scaled score) or bool (true: attend)",
                        print_name(tensor.dtype)));
    }
    if (tensor.shape.size() < 2 || tensor.shape.size() > 4) {
        refuse(
            file, tensor.name,
            fmt::format("shape {}: expected [batch, heads, queries, keys], [heads, queries, keys] or [queries, keys]",
                        faultline::shape_text(tensor.shape)));
    }
    HeadArray mask = reshaped(file, tensor);
    const bool broadcasts =
        (mask.batch == 1 || mask.batch == layer.q.batch) && (mask.heads == 1 || mask.heads == layer.q.heads);
    if (mask.rows != layer.q.rows || mask.cols != layer.k.rows || !broadcasts) {
        refuse(file, tensor.name,
               fmt::format("shape {}: expected [{}, {}, {}, {}] (batch, heads, queries, keys)",
                           faultline::shape_text(tensor.shape), or_one(layer.q.batch), or_one(layer.q.heads),
                           layer.q.rows, layer.k.rows));
    }
    constexpr double masked = -std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < mask.values.size(); ++i) {
        double& value = mask.values[i];
        if (tensor.dtype == Dtype::boolean) {
            value = value != 0 ? 0 : masked;
        } else if (std::isnan(value) || value == std::numeric_limits<double>::infinity()) {
            refuse(file, tensor.name,
                   fmt::format("element {} is {}: expected finite numbers and -infinity", index_text(tensor, i),
                               std::isnan(value) ? "NaN" : "infinite"));
        } else if (is_mask_minimum(value)) {
            if (!allow.mask_min) {
                refuse(
                    file, tensor.name,
                    fmt::format("element {} is {:.7g}, the most negative finite number of a format: expected -infinity "
                                "for what is masked (--allow mask-min reads it so)",
                                index_text(tensor, i), value));
            }
            value = masked;
        }
    }
    return mask;
}

void expect_consistent(const TensorSet& file, const LayerCapture& layer) {
    const HeadArray &q = layer.q, &k = layer.k, &v = layer.v, &dout = layer.dout;
    expect_same(file, layer, "k", k, "q", q, "batch", k.batch == q.batch);
    expect_same(file, layer, "k", k, "q", q, "head_dim", k.cols == q.cols);
    if (q.heads % k.heads != 0) {
        refuse(file, layer.name + ".k",
               fmt::format("shape {}: {} key heads for the {} query heads of {}: expected a number that divides {}",
                           shape_text(k), k.heads, q.heads, in_quotes(layer.name + ".q"), q.heads));
    }
    expect_same(file, layer, "v", v, "k", k, "batch, heads and seq",
                v.batch == k.batch && v.heads == k.heads && v.rows == k.rows);
    if (dout.empty()) return;
    expect_same(file, layer, "do", dout, "q", q, "batch, heads and seq",
                dout.batch == q.batch && dout.heads == q.heads && dout.rows == q.rows);
    expect_same(file, layer, "do", dout, "v", v, "head_dim", dout.cols == v.cols);
}

void expect_not_degenerate(const TensorSet& file, const LayerCapture& layer, const Allowances& allow) {
    const std::ptrdiff_t n_q = layer.q.rows, n_k = layer.k.rows;
    if (n_k == 1 && !allow.single_key) {
        refuse(file, layer.name + ".k",
               fmt::format("shape {}: a sequence of one key makes softmax constant: expected 2 keys or more "
                           "(--allow single-key takes it as it is)",
                           shape_text(layer.k)));
    }
    if (allow.masked_rows) return;
    constexpr std::string_view remedy =
        "expected a visible key in every row (--allow masked-rows reads such rows as o = 0, gradients 0)";
    if (layer.causal && n_q > n_k) {
        refuse(file, layer.name + ".q",
               fmt::format("shape {}: with {} keys and the causal mask the first {} rows see no key: {}",
                           shape_text(layer.q), n_k, n_q - n_k, remedy));
    }
    if (!layer.bias) return;
    const HeadArray& mask = *layer.bias;
    for (std::ptrdiff_t b = 0; b < mask.batch; ++b)
        for (std::ptrdiff_t h = 0; h < mask.heads; ++h)
            for (std::ptrdiff_t i = 0; i < n_q; ++i) {
                const double* row = mask(b, h).row(i);
                const double* end = row + visible_keys(i, n_q, n_k, layer.causal);
                if (std::all_of(row, end, [](double x) { return std::isinf(x); })) {
                    refuse(file, layer.name + ".mask",
                           fmt::format("row {} of head {} masks every key: {}", i, h, remedy));
                }
            }
}

}  // namespace faultline::detail
