// SPDX-License-Identifier: Apache-2.0
// From a layer's work to its verdict: which tests fail, which the truth is not known well enough for, and in which order
// they are told.
#pragma once

#include <faultline/verdict/check.hpp>
#include <faultline/verdict/layer_work.hpp>

namespace faultline::verdict {

/// A test fails where log10 of its p is below the threshold, whatever the exact truth within its bound is.
[[nodiscard]] LayerCheck judged(const LayerWork& work, double log10_threshold, double slack);

}  // namespace faultline::verdict
