// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/capture_storage.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

enum class Held : unsigned char { bf16, fp16, fp32, other };

Held held(const HeadArray& array) {
    switch (array.dtype) {
        case Dtype::bf16:
            return Held::bf16;
        case Dtype::f16:
            return Held::fp16;
        case Dtype::f32:
        case Dtype::f64:
            break;
        default:
            return Held::other;
    }
    const auto all_in = [&](const Format& format) {
        return std::all_of(array.values.begin(), array.values.end(),
                           [&](double x) { return std::isnan(x) || round(x, format, Rounding::nearest_even) == x; });
    };
    if (array.empty()) return Held::other;
    return all_in(bf16) ? Held::bf16 : all_in(fp16) ? Held::fp16 : Held::fp32;
}

struct Seen {
    bool bf16 = false, fp16 = false, fp32 = false, other = false;
    void add(const HeadArray& array) {
        if (array.empty()) return;
        const Held what = held(array);
        bf16 = bf16 || what == Held::bf16;
        fp16 = fp16 || what == Held::fp16;
        fp32 = fp32 || what == Held::fp32;
        other = other || what == Held::other;
    }
    [[nodiscard]] bool nothing() const { return !bf16 && !fp16 && !fp32 && !other; }
    /// Its one format, or the tensors'.
    [[nodiscard]] OutputStorage only() const {
        if (other || bf16 + fp16 + fp32 != 1) return OutputStorage::tensors;
        return bf16 ? OutputStorage::bf16 : fp16 ? OutputStorage::fp16 : OutputStorage::fp32;
    }
};

/// float32 or float64 values that bf16 and fp16 both hold: they say nothing of the type.
bool in_both(const HeadArray& array) {
    if (array.dtype != Dtype::f32 && array.dtype != Dtype::f64) return false;
    return std::all_of(array.values.begin(), array.values.end(), [](double x) {
        return std::isnan(x) ||
               (round(x, bf16, Rounding::nearest_even) == x && round(x, fp16, Rounding::nearest_even) == x);
    });
}

}  // namespace

StorageFormats storage_of(const Capture& capture, const std::string& kernel) {
    const auto has = [&](const LayerCapture& layer) {
        return std::any_of(layer.observed.begin(), layer.observed.end(),
                           [&](const ObservedKernel& k) { return k.name == kernel; });
    };
    const bool observed = std::any_of(capture.layers.begin(), capture.layers.end(), has);
    Seen inputs, outputs;
    bool narrow =
        false;  // an output that both 16-bit types hold, and is not 0: which of them it says not, but not fp32
    std::array<Seen, 4> each;
    for (const LayerCapture& layer : capture.layers) {
        if (observed && !has(layer)) continue;
        for (const HeadArray* input : {&layer.q, &layer.k, &layer.v}) inputs.add(*input);
        for (const ObservedKernel& k : layer.observed)
            for (std::size_t o = 0; k.name == kernel && o < each.size(); ++o)
                if (k.outputs[o] && in_both(*k.outputs[o])) {
                    const std::vector<double>& x = k.outputs[o]->values;
                    narrow = narrow || std::any_of(x.begin(), x.end(), [](double y) { return y != 0; });
                } else if (k.outputs[o]) {
                    outputs.add(*k.outputs[o]);
                    each[o].add(*k.outputs[o]);
                }
    }
    const Seen& decides = inputs.bf16 || inputs.fp16 ? inputs : outputs;
    StorageFormats storage{decides.fp16 && !decides.bf16, {}};
    if (outputs.fp32 && !narrow && !outputs.bf16 && !outputs.fp16 && !outputs.other)
        return StorageFormats::wide(storage.fp16);
    const OutputStorage tensors = storage.fp16 ? OutputStorage::fp16 : OutputStorage::bf16;
    for (std::size_t o = 0; o < each.size(); ++o)
        if (const OutputStorage own = each[o].nothing() ? tensors : each[o].only(); own != tensors)
            storage.outputs[o] = own;
    return storage;
}

FileTypes file_types(const Capture& capture, const std::string& kernel, const StorageFormats& storage) {
    const OutputStorage of_tensors = storage.fp16 ? OutputStorage::fp16 : OutputStorage::bf16;
    const auto text = [](Dtype dtype, OutputStorage judged) {
        const Dtype own = judged == OutputStorage::bf16 ? Dtype::bf16 : Dtype::f16;
        const bool wide = dtype == Dtype::f32 || dtype == Dtype::f64;
        if (!wide || judged == OutputStorage::fp32) return std::string(print_name(dtype));
        return fmt::format("{} with the values of {}", print_name(dtype), print_name(own));
    };
    FileTypes types;
    for (const LayerCapture& layer : capture.layers) {
        if (types.tensors.empty()) types.tensors = text(layer.q.dtype, of_tensors);
        for (const ObservedKernel& k : layer.observed)
            for (std::size_t o = 0; k.name == kernel && o < types.outputs.size(); ++o) {
                const OutputStorage judged =
                    storage.outputs[o] == OutputStorage::tensors ? of_tensors : storage.outputs[o];
                if (k.outputs[o] && types.outputs[o].empty()) types.outputs[o] = text(k.outputs[o]->dtype, judged);
            }
    }
    return types;
}

std::string described_in_file(const StorageFormats& storage, const FileTypes& types) {
    std::vector<std::string> parts;
    if (storage.fp16) parts.push_back("its tensors are " + types.tensors);
    std::vector<std::string> names;  // of the outputs that there are
    for (const std::string& type : types.outputs)
        if (!type.empty()) names.push_back(type);
    const bool alike = std::adjacent_find(names.begin(), names.end(), std::not_equal_to<>()) == names.end();
    if (storage.fp32_outputs() && alike && !names.empty())
        parts.push_back((storage.fp16 ? "its outputs " : "its outputs are ") + names.front());
    else
        for (const Output output : all_outputs) {
            const auto o = static_cast<std::size_t>(output);
            if (storage.outputs[o] != OutputStorage::tensors && !types.outputs[o].empty())
                parts.push_back(fmt::format("its {} is {}", name(output), types.outputs[o]));
        }
    return fmt::format("{}", fmt::join(parts, ", "));
}

std::string storage_remark(const StorageFormats& storage, const FileTypes& types, const std::string& kernel,
                           const RoundingPlan& plan) {
    const std::string whose = kernel.empty() ? "" : " of " + escaped(kernel);
    if (!stored_as(plan, {storage.fp16, {}}).same_numerics(plan))
        return fmt::format("the tensors{} are {} and {} rounds to bfloat16", whose, types.tensors, plan.name);
    std::vector<std::string> differ, wide;
    for (const Output output : all_outputs) {
        const auto o = static_cast<std::size_t>(output);
        StorageFormats one;
        one.outputs[o] = storage.outputs[o];
        if (types.outputs[o].empty() || stored_as(plan, one).same_numerics(plan)) continue;
        if (storage.outputs[o] == OutputStorage::fp32) wide.push_back(types.outputs[o]);
        differ.push_back(fmt::format("{}{} is {} and {} rounds it to {}", name(output), whose, types.outputs[o],
                                     plan.name,
                                     storage.outputs[o] == OutputStorage::fp32 ? "less" : "another type of 16 bits"));
    }
    const bool alike = std::adjacent_find(wide.begin(), wide.end(), std::not_equal_to<>()) == wide.end();
    if (storage.fp32_outputs() && wide.size() > 1 && wide.size() == differ.size() && alike)
        return fmt::format("the outputs{} are {} and {} rounds {} to less", whose, wide.front(), plan.name,
                           wide.size() == types.outputs.size() ? "its outputs" : "some of them");
    return fmt::format("{}", fmt::join(differ, ", "));
}

std::string mixed_inputs_remark(const Capture& capture, const RoundingPlan& plan) {
    struct Input {
        const char* name;
        HeadArray LayerCapture::*array;
        Site cast;
    };
    constexpr std::array inputs{Input{"q", &LayerCapture::q, Site::q_cast}, Input{"k", &LayerCapture::k, Site::k_cast},
                                Input{"v", &LayerCapture::v, Site::v_cast},
                                Input{"do", &LayerCapture::dout, Site::do_cast}};
    std::vector<std::string> in_bf16, in_fp16, rounded;
    for (const LayerCapture& layer : capture.layers) {
        in_bf16.clear(), in_fp16.clear(), rounded.clear();
        for (const Input& input : inputs) {
            const Dtype dtype = (layer.*input.array).dtype;
            if ((layer.*input.array).empty() || (dtype != Dtype::bf16 && dtype != Dtype::f16)) continue;
            (dtype == Dtype::bf16 ? in_bf16 : in_fp16).emplace_back(input.name);
            const Format& cast = plan[input.cast].format;
            if (cast == (dtype == Dtype::bf16 ? fp16 : bf16)) rounded.emplace_back(name(input.cast));
        }
        if (in_bf16.empty() || in_fp16.empty() || rounded.empty()) continue;
        return fmt::format("of {} {} {} bfloat16 and {} float16, and {} rounds at {} what is not in its type",
                           escaped(layer.name), fmt::join(in_bf16, ", "), in_bf16.size() == 1 ? "is" : "are",
                           fmt::join(in_fp16, ", "), plan.name, fmt::join(rounded, ", "));
    }
    return {};
}

}  // namespace faultline
