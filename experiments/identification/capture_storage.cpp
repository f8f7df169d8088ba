// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/capture_storage.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

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
};

}  // namespace

StorageFormats storage_of(const Capture& capture, const std::string& kernel) {
    const auto has = [&](const LayerCapture& layer) {
        return std::any_of(layer.observed.begin(), layer.observed.end(),
                           [&](const ObservedKernel& k) { return k.name == kernel; });
    };
    const bool observed = std::any_of(capture.layers.begin(), capture.layers.end(), has);
    Seen inputs, outputs;
    for (const LayerCapture& layer : capture.layers) {
        if (observed && !has(layer)) continue;
        for (const HeadArray* input : {&layer.q, &layer.k, &layer.v}) inputs.add(*input);
        for (const ObservedKernel& k : layer.observed)
            if (k.name == kernel)
                for (const auto& output : k.outputs)
                    if (output) outputs.add(*output);
    }
    const Seen& decides = inputs.bf16 || inputs.fp16 ? inputs : outputs;
    return {decides.fp16 && !decides.bf16, outputs.fp32 && !outputs.bf16 && !outputs.fp16 && !outputs.other};
}

std::string storage_remark(const StorageFormats& storage, const std::string& kernel, const RoundingPlan& plan) {
    const RoundingPlan as_fp16 = stored_as(plan, {storage.fp16, false}),
                       as_fp32 = stored_as(plan, {false, storage.fp32_outputs});
    const std::string whose = kernel.empty() ? "" : " of " + escaped(kernel);
    if (!as_fp16.same_numerics(plan))
        return fmt::format("the tensors{} are float16 and {} rounds to bfloat16", whose, plan.name);
    if (!as_fp32.same_numerics(plan))
        return fmt::format("the outputs{} are float32 and {} rounds its outputs to less", whose, plan.name);
    return {};
}

}  // namespace faultline
