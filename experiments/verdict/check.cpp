// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/check.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <faultline/attribution/level.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/work_count.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/tensor/text.hpp>
#include <faultline/verdict/judge.hpp>
#include <faultline/verdict/layer_work.hpp>

namespace faultline {
namespace {

const ObservedKernel* kernel_of(const LayerCapture& layer, const std::string& name) {
    for (const ObservedKernel& kernel : layer.observed)
        if (kernel.name == name) return &kernel;
    return nullptr;
}

std::string chosen_kernel(const Capture& capture, const CheckOptions& options) {
    std::vector<std::string> known;
    for (const LayerCapture& layer : capture.layers)
        for (const ObservedKernel& kernel : layer.observed)
            if (std::find(known.begin(), known.end(), kernel.name) == known.end()) known.push_back(kernel.name);
    const std::string file = escaped(capture.path, capture.path.size());
    if (known.empty())
        throw RequestError(fmt::format(
            "{}: no layer has an output of a kernel: expected tensors LAYER.KERNEL.{{o,dq,dk,dv,lse}} to check", file));
    const std::vector<std::string_view> names(known.begin(), known.end());
    if (options.kernel.empty()) {
        if (known.size() == 1) return known.front();
        throw RequestError(fmt::format("{}: {} kernels left outputs, chosen with --kernel: {}", file, known.size(),
                                       expected_one_of("", names)));
    }
    if (std::find(known.begin(), known.end(), options.kernel) == known.end())
        throw RequestError(
            fmt::format("{}: kernel {}: {}", file, in_quotes(options.kernel), expected_one_of(options.kernel, names)));
    return options.kernel;
}

/// That this layer of the kernel has every output that was asked for, and what judging it takes.
void expect_outputs(const Capture& capture, const LayerCapture& layer, const ObservedKernel& kernel,
                    const CheckOptions& options) {
    const std::string file = escaped(capture.path, capture.path.size());
    const auto expect = [&](bool there, std::string_view output) {
        if (there) return;
        const std::string tensor = fmt::format("{}.{}.{}", escaped(layer.name), escaped(kernel.name), output);
        throw RequestError(fmt::format("{}: {}: is not there: expected it, as {} was asked for", file, tensor, output));
    };
    for (const Output output : options.outputs) {
        expect(kernel[output].has_value(), name(output));
        if (output != Output::o && layer.dout.empty())
            throw RequestError(
                fmt::format("{0}: {1}.do: is not there: expected the gradient at the output, without "
                            "which {2}, which was asked for, cannot be judged",
                            file, escaped(layer.name), name(output)));
    }
    if (options.lse) expect(kernel.lse.has_value(), "lse");
}

}  // namespace

const char* name(Verdict verdict) {
    switch (verdict) {
        case Verdict::within_rounding:
            return "within its rounding";
        case Verdict::unresolved:
            return "not resolved";
        case Verdict::biased:
            return "biased";
        case Verdict::wrong:
            return "wrong";
    }
    return "";
}

bool truth_is_resolved(const OutputCheck& output) { return truth_is_resolved(output.truth_bound, output.truth_norm); }

bool is_blind(const OutputCheck& output) {
    constexpr double all_of_it = 1;  // of the truth: the error of an output of zeros
    constexpr double far = 10;       // beyond what agreeing signs make of the plan's errors on the captures
    const double plan = output.plan.rel_error.to_double();
    if (output.plan.nonfinite > 0 || std::isinf(output.expected.mantissa)) return false;  // plan_text() has it
    return output.truth_norm > WideReal(0.0) && !(output.expected < WideReal(all_of_it)) &&
           !(output.expected < WideReal(far * plan));
}

std::string_view name(const OutputCheck& output) { return output.lse ? "lse" : name(output.output); }

Verdict Check::verdict() const {
    Verdict worst = Verdict::within_rounding;
    for (const LayerCheck& layer : layers) worst = std::max(worst, layer.verdict);
    return worst;
}

bool Check::has_unjudged() const {
    return std::any_of(layers.begin(), layers.end(), [](const LayerCheck& layer) { return !layer.unjudged.empty(); });
}

Check check(const Capture& capture, const RoundingPlan& plan, const CheckOptions& options) {
    Check result;
    result.input = capture.path;
    result.kernel = chosen_kernel(capture, options);
    result.plan = plan;
    result.alpha = options.alpha;
    result.slack = options.slack;
    std::vector<verdict::LayerWork> layers;
    std::size_t units = 0;
    bool some = false;  // some output can be judged
    for (const LayerCapture& layer : capture.layers) {
        const ObservedKernel* kernel = kernel_of(layer, result.kernel);
        if (kernel == nullptr) continue;
        if (options.by_name) expect_outputs(capture, layer, *kernel, options);
        verdict::LayerWork work = [&] {
            try {
                return verdict::LayerWork(layer, *kernel, plan, options);
            } catch (const NoRoom& error) {
                throw NoRoom(fmt::format("{}: {}", escaped(capture.path, capture.path.size()), error.what()));
            }
        }();
        if (work.empty() && work.unjudged().empty()) continue;
        some = some || !work.empty();
        units += work.units();
        layers.push_back(std::move(work));
    }
    if (!some)
        throw RequestError(
            fmt::format("{}: kernel {} left none of the outputs asked for: expected one of o, dq, dk, dv, lse "
                        "(gradients need LAYER.do)",
                        escaped(capture.path, capture.path.size()), in_quotes(result.kernel)));
    WorkCount count(options.progress, options.cancelled, units);
    std::size_t whole = 0;
    try {
        for (verdict::LayerWork& layer : layers) {
            layer.run(count);
            result.tests += layer.tests();
            ++whole;
        }
    } catch (const Cancelled&) {
        result.complete = false;
    }
    result.log10_threshold = std::log10(options.alpha / static_cast<double>(std::max<std::size_t>(result.tests, 1)));
    for (std::size_t l = 0; l < whole; ++l)
        result.layers.push_back(verdict::judged(layers[l], result.log10_threshold, options.slack));
    return result;
}

}  // namespace faultline
