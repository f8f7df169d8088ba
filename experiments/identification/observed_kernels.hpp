// SPDX-License-Identifier: Apache-2.0
// What the kernels of a capture left that a plan can be compared by: o, and gradients where the layer has the gradient at
// the output.
#pragma once

#include <string>
#include <vector>

#include <faultline/attribution/capture.hpp>

namespace faultline {

/// Whether the kernel left something in this layer that can be compared.
[[nodiscard]] bool has_output(const ObservedKernel& kernel, const LayerCapture& layer);

/// The kernels that the capture has an output of, by name, each once.
[[nodiscard]] std::vector<std::string> observed_kernels(const Capture& capture);

/// What the kernel left that is not compared, a sentence for each layer.
[[nodiscard]] std::vector<std::string> not_compared(const Capture& capture, const std::string& kernel);

/// Elements of the kernel that are NaN or infinite, a sentence for each layer and output that has some: how many, and the first
/// in the order of memory.
[[nodiscard]] std::vector<std::string> not_finite(const Capture& capture, const std::string& kernel);

/// Why nothing that the kernel left can be compared, and what was expected, in a clause that names a tensor: gradients without
/// a gradient at the output, or an lse alone. "" where there is no kernel of that name. `kernel`: empty: any.
[[nodiscard]] std::string nothing_to_compare(const Capture& capture, const std::string& kernel);

}  // namespace faultline
