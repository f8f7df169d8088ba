// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/scaled_inputs.hpp>

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <faultline/attribution/capture.hpp>
#include <faultline/attribution/capture_checks.hpp>
#include <faultline/format/block.hpp>

namespace faultline::detail {
namespace {

constexpr std::array<std::string_view, 4> inputs{"q", "k", "v", "do"};

bool is_float(Dtype dtype) {
    using enum Dtype;
    return dtype == f64 || dtype == f32 || dtype == f16 || dtype == bf16 || dtype == e5m2 || dtype == e4m3;
}

Tensor in_binary64(const std::string& name, std::vector<std::int64_t> shape, const std::vector<double>& values) {
    return faultline::make_tensor<double>(name, std::move(shape), values);
}

/// Where the rows of an input lie if it is not [.., heads, seq, head_dim].
struct RowsFirst {
    bool is = false;               ///< heads are the last axis but one
    const Tensor* ends = nullptr;  ///< cu_seqlens of packed rows; null for the pages of a cache
};
RowsFirst rows_first_of(const TensorSet& file, const std::string& layer, std::string_view input) {
    const bool query_side = input == "q" || input == "do";
    for (const char* list : {"cu_seqlens", query_side ? "cu_seqlens_q" : "cu_seqlens_k"})
        if (const Tensor* ends = file.find(layer + "." + list)) return {true, ends};
    return {!query_side && file.find(layer + ".block_table") != nullptr, nullptr};
}

/// A factor of a quantised input is its largest size over the format's largest number: zero, a negative one and what is not
/// finite come from a kernel that was not asked for it, or from rows of zeros.
void expect_positive(const TensorSet& file, const Tensor& factor) {
    const std::vector<double> values = factor.to_double();
    for (std::size_t i = 0; i < values.size(); ++i)
        if (!std::isfinite(values[i]) || !(values[i] > 0))
            refuse(file, factor.name,
                   fmt::format("element {} is {}: expected a factor that is finite and above 0", i, values[i]));
}

/// x times one number for all, or for each head, or for each head of each sequence.
Tensor descaled(const TensorSet& file, const Tensor& x, const Tensor& factor, const RowsFirst& rows_first) {
    const std::size_t rank = x.shape.size();
    // Packed rows are [total, heads, head_dim], a cache is [pages, page size, heads, head_dim].
    const bool shaped = rows_first.is ? rank == (rows_first.ends != nullptr ? 3U : 4U) : rank >= 2 && rank <= 4;
    const std::int64_t heads = rows_first.is ? (shaped ? x.shape[rank - 2] : 1) : rank >= 3 ? x.shape[rank - 3] : 1;
    const std::int64_t batch = !rows_first.is               ? (rank >= 4 ? x.shape[0] : 1)
                               : rows_first.ends != nullptr ? static_cast<std::int64_t>(rows_first.ends->size()) - 1
                                                            : 0;
    using Shape = std::vector<std::int64_t>;
    const bool by_sequence = batch > 0 && factor.shape == Shape{batch, heads};
    if (!is_float(factor.dtype) || !shaped || !(factor.size() == 1 || factor.shape == Shape{heads} || by_sequence))
        refuse(file, factor.name,
               fmt::format("dtype {}, shape {}: expected one floating-point number, [{}]{}", print_name(factor.dtype),
                           faultline::shape_text(factor.shape), heads,
                           batch > 0       ? fmt::format(" or [{}, {}] ({}, heads)", batch, heads,
                                                   rows_first.is ? "sequences" : "batch")
                           : rows_first.is ? " (heads; a page may be of several sequences)"
                                           : ""));
    expect_positive(file, factor);
    std::vector<double> values = x.to_double();
    const std::vector<double> by = factor.to_double();
    if (by.size() == 1) {
        for (double& value : values) value *= by[0];
    } else if (!rows_first.is) {
        const std::size_t per_head = values.size() / static_cast<std::size_t>(batch * heads);
        for (std::size_t i = 0; i < values.size(); ++i) values[i] *= by[i / per_head % by.size()];
    } else {
        const auto columns = static_cast<std::size_t>(x.shape.back()), count = static_cast<std::size_t>(heads);
        const std::vector<double> ends = by_sequence ? rows_first.ends->to_double() : std::vector<double>();
        std::size_t sequence = 0;  // whether the list is one of sequences is looked at when they are cut
        for (std::size_t i = 0; i < values.size(); ++i) {
            const std::size_t head = i / columns % count, row = i / columns / count;
            while (by_sequence && sequence + 2 < ends.size() && static_cast<double>(row) >= ends[sequence + 1])
                ++sequence;
            values[i] *= by[sequence * count + head];
        }
    }
    return in_binary64(x.name, x.shape, values);
}

/// One number a byte, two for e2m1: the first in the low half (ml_dtypes and PyTorch's float4_e2m1fn_x2).
std::vector<double> elements(const Tensor& x) {
    if (x.dtype != Dtype::u8) return x.to_double();
    std::vector<double> values;
    for (const std::byte pair : x.bytes)
        for (const unsigned code : {std::to_integer<unsigned>(pair) & 15U, std::to_integer<unsigned>(pair) >> 4U})
            values.push_back(decode(code, e2m1));
    return values;
}

Tensor block_scaled(const TensorSet& file, const Tensor& x, const Tensor& scale, const Tensor* global,
                    bool rows_first) {
    const bool nv = scale.dtype == Dtype::e4m3;
    const bool is_fp8 = x.dtype == Dtype::e4m3 || x.dtype == Dtype::e5m2;
    if (!(nv || scale.dtype == Dtype::u8) || !(x.dtype == Dtype::u8 || (is_fp8 && !nv)))
        refuse(file, scale.name,
               fmt::format("dtype {} beside {} of {}: expected uint8 (e8m0) beside float8 or uint8 (two e2m1), or "
                           "float8_e4m3fn beside uint8",
                           print_name(scale.dtype), x.name, print_name(x.dtype)));
    std::vector<std::int64_t> shape = x.shape;
    const std::size_t rank = shape.size();
    if (rank < 2 || rank > 4 || scale.shape.size() != rank)
        refuse(file, scale.name,
               fmt::format("shape {}: expected the rank of {}, 2 to 4", faultline::shape_text(scale.shape), x.name));
    if (x.dtype == Dtype::u8) shape.back() *= 2;
    const std::int64_t block = nv ? nvfp4.block_size : mxfp8_e4m3.block_size;
    const std::int64_t rows = shape[rank - 2], cols = shape[rank - 1];
    const auto blocks = [&](std::int64_t n) { return (n + block - 1) / block; };
    const std::int64_t scale_rows = scale.shape[rank - 2], scale_cols = scale.shape[rank - 1];
    const bool along = scale_rows == rows && scale_cols == blocks(cols);
    // Down the sequence, which is the last axis but one only where rows are neither packed nor in pages.
    const bool down = !rows_first && scale_rows == blocks(rows) && scale_cols == cols;
    bool leading = along || down;
    for (std::size_t d = 0; d + 2 < rank; ++d) leading = leading && scale.shape[d] == shape[d];
    if (!leading)
        refuse(file, scale.name,
               fmt::format(
                   "shape {}: expected a scale for each block of {} of {} {}: [.., {}, {}], or [.., {}, {}] down the "
                   "sequence",
                   faultline::shape_text(scale.shape), block, x.name, faultline::shape_text(shape), rows, blocks(cols),
                   blocks(rows), cols));
    double factor = 1;
    if (global != nullptr) {
        if (!nv || global->size() != 1 || !is_float(global->dtype))
            refuse(file, global->name,
                   fmt::format("shape {}: expected one floating-point number, of nvfp4",
                               faultline::shape_text(global->shape)));
        expect_positive(file, *global);
        factor = global->to_double()[0];
    }
    std::vector<double> values = elements(x);
    for (std::size_t i = 0; i < values.size(); ++i) {
        const auto flat = static_cast<std::int64_t>(i);
        const std::int64_t matrix = flat / (rows * cols), r = flat / cols % rows, c = flat % cols;
        const std::int64_t at =
            matrix * scale_rows * scale_cols + (along ? r : r / block) * scale_cols + (along ? c / block : c);
        const auto code = std::to_integer<std::uint8_t>(scale.bytes[static_cast<std::size_t>(at)]);
        values[i] *= (nv ? decode(code, e4m3) : decode_e8m0(code)) * factor;
    }
    return in_binary64(x.name, shape, values);
}

}  // namespace

std::optional<TensorSet> inputs_unscaled(const TensorSet& file) {
    std::optional<TensorSet> out;
    for (const auto& [name, tensor] : file.tensors) {
        const std::size_t dot = name.rfind('.');
        if (dot == std::string::npos || dot == 0) continue;
        const std::string layer = name.substr(0, dot), rest = name.substr(dot + 1);
        for (const std::string_view input : inputs) {
            const std::string x_name = fmt::format("{}.{}", layer, input);
            const bool is_descale = rest == fmt::format("{}_descale", input),
                       is_blocks = rest == fmt::format("{}_scale", input);
            if (rest == fmt::format("{}_global_scale", input) && file.find(x_name + "_scale") == nullptr)
                refuse(file, name, fmt::format("stands without {}_scale: expected the scales of its blocks", x_name));
            if (!is_descale && !is_blocks) continue;
            const Tensor* x = file.find(x_name);
            if (x == nullptr)
                refuse(file, name, fmt::format("stands without \"{}\": expected the tensor that it scales", x_name));
            if (is_descale && file.find(x_name + "_scale") != nullptr)
                refuse(file, name, fmt::format("stands beside {}_scale: expected one of them", x_name));
            if (!out) out = file;
            const Tensor* global = file.find(x_name + "_global_scale");
            const RowsFirst rows_first = rows_first_of(file, layer, input);
            out->tensors[x_name] = is_descale ? descaled(file, *x, tensor, rows_first)
                                              : block_scaled(file, *x, tensor, global, rows_first.is);
            out->tensors.erase(name);
            if (global != nullptr) out->tensors.erase(global->name);
        }
    }
    return out;
}

}  // namespace faultline::detail
