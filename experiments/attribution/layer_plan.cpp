// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/layer_plan.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace faultline {
namespace {

/// Calls visit(distance from the diagonal to the right, hidden) for every score of every mask of the layer, while it returns
/// true; whether it always did.
template <class Visit>
bool for_each_score(const LayerCapture& layer, Visit&& visit) {
    const HeadArray& bias = *layer.bias;
    const std::ptrdiff_t corner = bias.cols - bias.rows;
    std::size_t at = 0;
    for (std::ptrdiff_t m = 0; m < bias.batch * bias.heads; ++m)
        for (std::ptrdiff_t i = 0; i < bias.rows; ++i)
            for (std::ptrdiff_t j = 0; j < bias.cols; ++j, ++at) {
                const std::ptrdiff_t to_right = j - i - corner;
                const bool hidden = (layer.causal && to_right > 0) || std::isinf(bias.values[at]);
                if (!hidden && bias.values[at] != 0) return false;
                if (!visit(to_right, hidden)) return false;
            }
    return true;
}

}  // namespace

bool is_window(const LayerCapture& layer) {
    if (!layer.bias) return false;
    std::ptrdiff_t first = std::numeric_limits<std::ptrdiff_t>::max(),
                   last = std::numeric_limits<std::ptrdiff_t>::min();
    const bool only_hides = for_each_score(layer, [&](std::ptrdiff_t to_right, bool hidden) {
        if (hidden) return true;
        first = std::min(first, to_right);
        last = std::max(last, to_right);
        return true;
    });
    if (!only_hides || first > last) return false;
    bool left = false, right = false;
    const bool is_band = for_each_score(layer, [&](std::ptrdiff_t to_right, bool hidden) {
        left = left || to_right < first;
        right = right || to_right > last;
        return hidden == (to_right < first || to_right > last);
    });
    return is_band && (left || (right && last != 0));
}

RoundingPlan for_layer(const RoundingPlan& plan, const LayerCapture& layer) {
    return for_head_dim(plan, static_cast<int>(layer.head_dim()), layer.causal, is_window(layer));
}

}  // namespace faultline
