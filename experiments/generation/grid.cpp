// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <faultline/attribution/group_run.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/format/format.hpp>
#include <faultline/generation/family.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using attribution::format_of;

/// The type that a file holds values of this format in.
Dtype dtype_of(const Format& format) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::e4m3, Dtype::e5m2}) {
        const Format candidate = format_of(dtype);
        if (candidate.precision == format.precision && candidate.emin == format.emin && candidate.emax == format.emax)
            return dtype;
    }
    return Dtype::f64;
}

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

}  // namespace

double generation::on_grid(double x) {
    if (x == 0 || !std::isfinite(x)) return 0;
    const double rounded = round(x, e5m2, Rounding::nearest_even);
    const double size = std::clamp(std::abs(rounded), smallest_value, largest_value);
    return std::copysign(std::abs(x) < smallest_value / 2 ? 0 : size, x);
}

void observe(LayerCapture& layer, const RoundingPlan& plan, const std::string& kernel, std::uint64_t seed,
             int threads) {
    const RoundingPlan settled = for_head_dim(plan, static_cast<int>(layer.head_dim()), layer.causal);
    const std::string problem = problem_with(settled);
    if (!problem.empty()) throw RequestError(fmt::format("plan \"{}\": {}", plan.name, problem));
    if (const std::string cannot = problem_with(settled, layer.extras()); !cannot.empty())
        throw RequestError(fmt::format("{}: {}", layer.name, cannot));
    ObservedKernel seen;
    seen.name = kernel;
    std::replace(seen.name.begin(), seen.name.end(), '.', '-');
    const std::vector<attribution::Group> groups = attribution::groups_of(layer, {}, seed);
    std::vector<attribution::RunOutputs> runs(groups.size());
    parallel_for(groups.size(), threads, [&](std::size_t g) { runs[g] = attribution::run_plan(groups[g], settled); });
    for (const Output output : all_outputs) {
        if (runs.front()[output].empty()) continue;
        const std::optional<Format> format = stored_format(settled, output);
        const Matrix& first = runs.front()[output].front();
        const bool per_query = output == Output::o || output == Output::dq;
        HeadArray array{layer.q.batch,
                        per_query ? layer.heads() : layer.kv_heads(),
                        first.rows,
                        first.cols,
                        {},
                        format ? dtype_of(*format) : Dtype::f64};
        for (const attribution::RunOutputs& run : runs)
            for (const Matrix& m : run[output])
                array.values.insert(array.values.end(), m.values.begin(), m.values.end());
        seen.outputs[static_cast<std::size_t>(output)] = std::move(array);
    }
    layer.observed.push_back(std::move(seen));
}

TensorSet tensors_of(const std::vector<LayerCapture>& layers, Dtype dtype) {
    TensorSet set;
    for (const LayerCapture& layer : layers) {
        const auto put = [&](const char* name, const HeadArray& a) {
            const std::string full = layer.name + "." + name;
            expect_exact(full, a, dtype);
            set.add(tensor_of(full, a, dtype));
        };
        put("q", layer.q), put("k", layer.k), put("v", layer.v);
        if (!layer.dout.empty()) put("do", layer.dout);
        if (layer.bias) set.add(tensor_of(layer.name + ".mask", *layer.bias, Dtype::f32));
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
                    set.add(tensor_of(fmt::format("{}.{}.{}", layer.name, kernel.name, name(output)), *a, a->dtype));
    }
    return set;
}

}  // namespace faultline
