// SPDX-License-Identifier: Apache-2.0
// Generated layers as the tensors of a capture: plain, as packed or paged sequences, in block-scaled formats.
#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <faultline/attribution/group_run.hpp>
#include <faultline/attribution/sequences.hpp>
#include <faultline/base/error.hpp>
#include <faultline/format/format.hpp>
#include <faultline/generation/family.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using attribution::format_of;

template <class Word>
Tensor encoded(const std::string& name, const HeadArray& a, Dtype dtype) {
    const Format format = format_of(dtype);
    std::vector<Word> words;
    for (const double x : a.values) words.push_back(static_cast<Word>(encode(x, format)));
    return make_tensor<Word>(name, {a.batch, a.heads, a.rows, a.cols}, words, dtype);
}

Tensor tensor_of(const std::string& name, const HeadArray& a, Dtype dtype) {
    if (dtype == Dtype::f64) return make_tensor<double>(name, {a.batch, a.heads, a.rows, a.cols}, a.values);
    if (dtype == Dtype::f32) {
        const std::vector<float> floats(a.values.begin(), a.values.end());
        return make_tensor<float>(name, {a.batch, a.heads, a.rows, a.cols}, floats);
    }
    return width(dtype) == 2 ? encoded<std::uint16_t>(name, a, dtype) : encoded<std::uint8_t>(name, a, dtype);
}

void expect_exact(const std::string& name, const HeadArray& a, Dtype dtype) {
    const Format format = format_of(dtype);
    for (const double x : a.values)
        if (round(x, format, Rounding::nearest_even) != x)
            throw RequestError(fmt::format("tensor {}: {} is not a value of {}: expected inputs that the type holds",
                                           in_quotes(name), x, print_name(dtype)));
}

/// What is added to one file.
class Written {
  public:
    Written(Dtype dtype, const std::optional<BlockFormat>& blocks) : dtype_(dtype), blocks_(blocks) {}

    TensorSet set;

    void input(const std::string& name, const HeadArray& a, bool three_dimensions = false) {
        expect_exact(name, a, blocks_ ? Dtype::bf16 : dtype_);
        if (!blocks_) return array(name, a, dtype_, three_dimensions);
        const std::vector<float> floats(a.values.begin(), a.values.end());
        const QuantisedRows rows = quantise(floats, static_cast<std::size_t>(a.cols), *blocks_);
        if (dequantise(rows) != floats)
            throw RequestError(fmt::format(
                "tensor {}: values that one block scale does not hold: expected another dtype", in_quotes(name)));
        std::vector<std::int64_t> shape{a.batch, a.heads, a.rows, a.cols};
        if (three_dimensions) shape.erase(shape.begin());
        set.add(make_tensor<std::uint8_t>(name, shape, rows.elements,
                                          blocks_->element == e4m3 ? Dtype::e4m3 : Dtype::e5m2));
        shape.back() = (a.cols + blocks_->block_size - 1) / blocks_->block_size;
        set.add(make_tensor<std::uint8_t>(name + "_scale", shape, rows.scales));
    }

    void array(const std::string& name, const HeadArray& a, Dtype dtype, bool three_dimensions = false) {
        Tensor tensor = tensor_of(name, a, dtype);
        if (three_dimensions) tensor.shape.erase(tensor.shape.begin());
        set.add(std::move(tensor));
    }

    void layer(const LayerCapture& layer) {
        const auto put = [&](const char* name, const HeadArray& a) { input(layer.name + "." + name, a); };
        put("q", layer.q), put("k", layer.k), put("v", layer.v);
        if (!layer.dout.empty()) put("do", layer.dout);
        if (layer.bias) array(layer.name + ".mask", *layer.bias, Dtype::f32);
        const auto put_numbers = [&](const char* name, const std::vector<double>& x) {
            set.add(make_tensor<double>(layer.name + "." + name, {static_cast<std::int64_t>(x.size())}, x));
        };
        if (layer.softcap > 0) put_numbers("softcap", {layer.softcap});
        if (!layer.sink.empty()) put_numbers("sink", layer.sink);
        if (layer.dropout) {
            std::vector<std::uint8_t> kept(layer.dropout->values.begin(), layer.dropout->values.end());
            const HeadArray& m = *layer.dropout;
            set.add(make_tensor<std::uint8_t>(layer.name + ".dropout", {m.batch, m.heads, m.rows, m.cols}, kept,
                                              Dtype::boolean));
            put_numbers("keep", {layer.keep});
        }
        for (const ObservedKernel& kernel : layer.observed)
            for (const Output output : all_outputs)
                if (const auto& a = kernel[output])
                    array(fmt::format("{}.{}.{}", layer.name, kernel.name, name(output)), *a, a->dtype);
    }

    /// Sequences of one batch: packed, or with k and v in pages.
    void batch(const std::string& name, const std::vector<const LayerCapture*>& sequences) {
        const auto each = [&](auto&& of) {
            std::vector<const HeadArray*> parts;
            for (const LayerCapture* layer : sequences) parts.push_back(&of(*layer));
            return parts;
        };
        const bool paged = name == "paged";
        const auto keys = each([](const LayerCapture& l) -> const HeadArray& { return l.k; });
        input(name + ".q", packed(each([](const LayerCapture& l) -> const HeadArray& { return l.q; })), true);
        input(name + ".do", packed(each([](const LayerCapture& l) -> const HeadArray& { return l.dout; })), true);
        ends(name + ".cu_seqlens_q", each([](const LayerCapture& l) -> const HeadArray& { return l.q; }));
        const auto values = each([](const LayerCapture& l) -> const HeadArray& { return l.v; });
        if (paged) {
            pages(name, "k", keys), pages(name, "v", values);
        } else {
            input(name + ".k", packed(keys), true), input(name + ".v", packed(values), true);
            ends(name + ".cu_seqlens_k", keys);
        }
        for (std::size_t n = 0; n < sequences.front()->observed.size(); ++n)
            for (const Output output : all_outputs) {
                const bool of_keys = output == Output::dk || output == Output::dv;
                if (!sequences.front()->observed[n][output] || (of_keys && paged)) continue;  // a cache has no gradient
                const auto parts =
                    each([&](const LayerCapture& l) -> const HeadArray& { return *l.observed[n][output]; });
                array(fmt::format("{}.{}.{}", name, sequences.front()->observed[n].name, faultline::name(output)),
                      packed(parts), parts.front()->dtype, true);
            }
    }

  private:
    /// [1, total, heads, cols] of [1, heads, rows, cols] each.
    static HeadArray packed(const std::vector<const HeadArray*>& parts) {
        HeadArray all{1, 0, parts.front()->heads, parts.front()->cols, {}, parts.front()->dtype};
        for (const HeadArray* part : parts) {
            all.heads += part->rows;
            for (std::ptrdiff_t i = 0; i < part->rows; ++i)
                for (std::ptrdiff_t h = 0; h < part->heads; ++h) {
                    const double* row = (*part)(0, h).row(i);
                    all.values.insert(all.values.end(), row, row + part->cols);
                }
        }
        return all;
    }

    void ends(const std::string& name, const std::vector<const HeadArray*>& parts) {
        std::vector<std::int32_t> at{0};
        for (const HeadArray* part : parts) at.push_back(at.back() + static_cast<std::int32_t>(part->rows));
        set.add(make_tensor<std::int32_t>(name, {static_cast<std::int64_t>(at.size())}, at));
    }

    /// Handed out from the last page to the first, every other one; all else is NaN.
    void pages(const std::string& name, const char* which, const std::vector<const HeadArray*>& parts) {
        constexpr std::ptrdiff_t page = 16;
        std::ptrdiff_t used = 0, most = 0;
        for (const HeadArray* part : parts) {
            used += (part->rows + page - 1) / page;
            most = std::max(most, (part->rows + page - 1) / page);
        }
        const std::ptrdiff_t heads = parts.front()->heads, cols = parts.front()->cols;
        HeadArray cache{2 * used, page, heads, cols, {}, parts.front()->dtype};
        cache.values.assign(static_cast<std::size_t>(2 * used * page * heads * cols),
                            std::numeric_limits<double>::quiet_NaN());
        std::vector<std::int32_t> table, lengths;
        std::ptrdiff_t next = 2 * used - 1;
        for (const HeadArray* part : parts) {
            expect_exact(name + "." + which, *part, dtype_);
            lengths.push_back(static_cast<std::int32_t>(part->rows));
            for (std::ptrdiff_t entry = 0; entry < most; ++entry) {
                const bool has_keys = entry * page < part->rows;
                table.push_back(has_keys ? static_cast<std::int32_t>(next) : -1);
                for (std::ptrdiff_t i = entry * page; i < std::min(part->rows, (entry + 1) * page); ++i)
                    for (std::ptrdiff_t h = 0; h < heads; ++h)
                        std::copy_n((*part)(0, h).row(i), cols,
                                    cache.values.begin() + ((next * page + i % page) * heads + h) * cols);
                next -= has_keys ? 2 : 0;
            }
        }
        if (blocks_)
            throw RequestError(
                "family paged: its unused slots are NaN, which block-scaled formats have for whole blocks: "
                "expected another dtype");
        array(name + "." + which, cache, dtype_);
        if (set.find(name + ".block_table") != nullptr) return;
        const auto count = static_cast<std::int64_t>(parts.size());
        set.add(make_tensor<std::int32_t>(name + ".block_table", {count, most}, table));
        set.add(make_tensor<std::int32_t>(name + ".seqused_k", {count}, lengths));
    }

    Dtype dtype_;
    std::optional<BlockFormat> blocks_;
};

}  // namespace

TensorSet tensors_of(const std::vector<LayerCapture>& layers, Dtype dtype, const std::optional<BlockFormat>& blocks) {
    Written file(dtype, blocks);
    for (std::size_t n = 0; n < layers.size();) {
        const std::string_view name = detail::batch_of_sequence(layers[n].name);
        std::vector<const LayerCapture*> sequences;
        while (n < layers.size() && name != layers[n].name && detail::batch_of_sequence(layers[n].name) == name)
            sequences.push_back(&layers[n++]);
        if (sequences.empty())
            file.layer(layers[n++]);
        else
            file.batch(std::string(name), sequences);
    }
    return std::move(file.set);
}

}  // namespace faultline
