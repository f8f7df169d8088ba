// SPDX-License-Identifier: Apache-2.0
// The attention of one layer over some sequences: each head by the fast kernel or by the emulated one under its plan.
#pragma once

#include <vector>

#include <faultline/cpu/attention.hpp>
#include <faultline/gpt/fast_attention.hpp>
#include <faultline/gpt/model_config.hpp>
#include <faultline/gpt/step_context.hpp>

namespace faultline::gpt {

/// What the forward leaves for the backward, and what both saw. Head statistics are [sequence, head].
template <class T>
struct AttentionState {
    std::vector<T> lse;                  ///< [sequence, head, token], fast heads
    std::vector<GroupForward> emulated;  ///< [sequence, head], emulated heads
    std::vector<HeadStatistics> heads;   ///< [sequence, head]
};

/// Where the sequences and the layer stand.
struct LayerAt {
    int layer = 0;
    int first_sequence = 0;  ///< of the micro-batch
    int sequences = 0;
    int length = 0;  ///< tokens of a sequence
};

/// o [tokens, width] from q, k, v [tokens, width] (views with any stride); `scale` per head.
template <class T>
void attention_layer_forward(const ModelConfig& config, const StepContext& context, const LayerAt& at,
                             MatrixView<const T> q, MatrixView<const T> k, MatrixView<const T> v,
                             const std::vector<double>& scale, MatrixView<T> o, AttentionState<T>& state,
                             FastScratch<T>& scratch);

template <class T>
void attention_layer_backward(const ModelConfig& config, const StepContext& context, const LayerAt& at,
                              MatrixView<const T> q, MatrixView<const T> k, MatrixView<const T> v,
                              MatrixView<const T> o, MatrixView<const T> dout, const std::vector<double>& scale,
                              MatrixView<T> dq, MatrixView<T> dk, MatrixView<T> dv, AttentionState<T>& state,
                              FastScratch<T>& scratch);

}  // namespace faultline::gpt
