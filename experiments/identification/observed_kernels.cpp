// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/observed_kernels.hpp>

#include <cmath>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

std::vector<std::string_view> gradients_of(const ObservedKernel& kernel) {
    std::vector<std::string_view> gradients;
    for (const Output output : {Output::dq, Output::dk, Output::dv})
        if (kernel[output]) gradients.push_back(name(output));
    return gradients;
}

}  // namespace

bool has_output(const ObservedKernel& kernel, const LayerCapture& layer) {
    for (const Output output : all_outputs)
        if (kernel[output] && (output == Output::o || !layer.dout.empty())) return true;
    return false;
}

std::vector<std::string> observed_kernels(const Capture& capture) {
    std::set<std::string> names;
    for (const LayerCapture& layer : capture.layers)
        for (const ObservedKernel& kernel : layer.observed)
            if (has_output(kernel, layer)) names.insert(kernel.name);
    return {names.begin(), names.end()};
}

std::vector<std::string> not_compared(const Capture& capture, const std::string& kernel) {
    std::vector<std::string> sentences;
    for (const LayerCapture& layer : capture.layers)
        for (const ObservedKernel& observed : layer.observed) {
            if (observed.name != kernel || !layer.dout.empty()) continue;
            const std::vector<std::string_view> gradients = gradients_of(observed);
            if (gradients.empty()) continue;
            const std::string of = escaped(layer.name);
            sentences.push_back(fmt::format("{} of {} not compared: there is no {}.do, the gradient at the output",
                                            fmt::join(gradients, ", "), of, of));
        }
    return sentences;
}

std::vector<std::string> not_finite(const Capture& capture, const std::string& kernel) {
    std::vector<std::string> sentences;
    for (const LayerCapture& layer : capture.layers)
        for (const ObservedKernel& observed : layer.observed)
            for (const Output output : all_outputs) {
                if (observed.name != kernel || !observed[output]) continue;
                const HeadArray& array = *observed[output];
                std::size_t elements = 0;
                std::string first;
                for (std::ptrdiff_t b = 0; b < array.batch; ++b)
                    for (std::ptrdiff_t h = 0; h < array.heads; ++h) {
                        const MatrixView<const double> of_head = array(b, h);
                        for (std::ptrdiff_t r = 0; r < of_head.rows; ++r)
                            for (std::ptrdiff_t c = 0; c < of_head.cols; ++c) {
                                if (std::isfinite(of_head(r, c))) continue;
                                if (elements++ > 0) continue;
                                first = fmt::format("{}head {}, row {}, feature {}, is {}",
                                                    array.batch > 1 ? fmt::format("batch {}, ", b) : "", h, r, c,
                                                    of_head(r, c));
                            }
                    }
                if (elements > 0)
                    sentences.push_back(fmt::format("{} element{} of {} of {} {} not finite; the first, {}", elements,
                                                    elements == 1 ? "" : "s", name(output), escaped(layer.name),
                                                    elements == 1 ? "is" : "are", first));
            }
    return sentences;
}

std::string nothing_to_compare(const Capture& capture, const std::string& kernel) {
    for (const LayerCapture& layer : capture.layers)
        for (const ObservedKernel& observed : layer.observed) {
            if ((!kernel.empty() && observed.name != kernel) || has_output(observed, layer)) continue;
            const std::string of = escaped(layer.name), by = fmt::format("{}.{}", of, escaped(observed.name));
            const std::vector<std::string_view> gradients = gradients_of(observed);
            if (gradients.empty())
                return fmt::format("{}.lse: by an lse alone no plan is told: expected {}.o, or a gradient", by, by);
            return fmt::format(
                "{}.{}: cannot be compared without {}.do, the gradient at the output: expected that, or {}.o", by,
                gradients.front(), of, by);
        }
    return "";
}

}  // namespace faultline
