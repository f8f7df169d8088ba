// SPDX-License-Identifier: Apache-2.0
// The shape of a model and the numerics of its layers, as values.
#pragma once

#include <memory>
#include <vector>

#include <faultline/plan/plan.hpp>

namespace faultline::gpt {

/// q <- q/rms(q), k <- k/rms(k) per head before the scores; learned: times a gain per head column, starting from 1.
enum class QkNorm : unsigned char { none, parameter_free, learned };

/// Where mean and 1/sigma of the layer norms are rounded to bf16: nowhere, in both passes alike, or in one of them, so that
/// the backward is that of another function (tenstorrent/tt-metal#54371).
enum class NormStatistics : unsigned char { fp32, bf16, bf16_forward, bf16_backward };

/// Which attention some heads run. Null: the fast kernel (fast_attention.hpp); else the emulated one under this plan.
struct AttentionChoice {
    int layer = -1;          ///< -1: every layer
    std::vector<int> heads;  ///< empty: every head
    std::shared_ptr<const RoundingPlan> plan;
};

/// GPT-2 (Radford et al. 2019): pre-norm, learned positions, GELU, tied embeddings.
struct ModelConfig {
    int layers = 2;
    int width = 64;
    int heads = 2;
    int context = 128;
    int vocabulary = 256;
    bool bias = false;  ///< of linear layers and norms
    double norm_epsilon = 1e-5;
    NormStatistics norm_statistics = NormStatistics::fp32;

    /// As bf16 autocast: products with bf16 inputs and outputs, GELU on bf16, everything else fp32, fp32 master weights.
    bool bf16 = true;
    std::vector<AttentionChoice> attention{};  ///< later ones win

    QkNorm qk_norm = QkNorm::none;
    double softcap = 0;          ///< of the scores; 0: none
    bool sigma_reparam = false;  ///< W <- (gamma / sigma_max(W)) W for the linear layers (arXiv 2303.06296)
    bool output_gate = false;    ///< attention output times sigmoid(x W_gate), element by element (arXiv 2505.06708)
    double z_loss = 0;           ///< coefficient of log-sum-exp^2 of the logits (arXiv 2204.02311)

    [[nodiscard]] int head_dim() const { return width / heads; }
    /// The plan of this head, or null for the fast kernel.
    [[nodiscard]] const RoundingPlan* plan(int layer, int head) const;
};

/// RequestError, one sentence that begins with the field, where the numbers make no model.
void check(const ModelConfig& config);

}  // namespace faultline::gpt
