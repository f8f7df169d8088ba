// SPDX-License-Identifier: Apache-2.0
// The plan that a captured layer runs: of a plan's cases the one for its head size and mask.
#pragma once

#include <faultline/attribution/capture.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline {

/// Whether the layer's mask, with its causal flag, is a sliding window: every score kept as it is or hidden, the same band of
/// i + n_k - n_q - left <= j <= i + n_k - n_q + right for every head and batch element, and that bounded on the left, or on the
/// right off the diagonal (right != 0). What FlashAttention calls local: flash-attention 0251105a,
/// flash_attn/cute/interface.py:388-408. A mask that hides the same keys for another reason is taken for one.
[[nodiscard]] bool is_window(const LayerCapture& layer);

/// for_head_dim of the layer's head size, causal flag and window.
[[nodiscard]] RoundingPlan for_layer(const RoundingPlan& plan, const LayerCapture& layer);

}  // namespace faultline
