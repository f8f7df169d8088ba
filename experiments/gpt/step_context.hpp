// SPDX-License-Identifier: Apache-2.0
// What the passes over a batch need to know of the step, beside weights and tokens.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <faultline/gpt/cancelled.hpp>
#include <faultline/gpt/hooks.hpp>

namespace faultline {
class AttentionBackend;
class Ranks;
}  // namespace faultline

namespace faultline::gpt {

/// Which part of a step this rank works through (share.hpp).
enum class Division : unsigned char { none, groups, micro_batches };
struct Share {
    Ranks* ranks = nullptr;  ///< null: all of it
    Division division = Division::none;
};

/// QK norm that a hook has switched on.
struct QkSwitch {
    bool on = false;
    std::vector<double> logit_scale;  ///< per head
};

struct StepContext {
    std::int64_t step = 0;
    int micro_step = 0;
    AttentionHook* attention = nullptr;
    ModelHook* model = nullptr;
    double loss_weight = 1;  ///< 1 over the tokens of the step: the gradient is that of the mean loss
    bool detailed = false;   ///< entropy and saturation are wanted
    bool zero_sums = true;   ///< and sums of the score gradient; emulated heads leave them out where they are not
    bool find_non_finite = false;
    bool fp32_ffn = false;
    const std::vector<QkSwitch>* qk_switch = nullptr;  ///< per layer; may be null
    int threads = 1;
    Share share;
    const AttentionBackend* emulating =
        nullptr;  ///< runs what is emulated; null: kernels/cpu. Instruments are then as it wants them
    const Cancelled* cancelled = nullptr;  ///< not with several ranks, which would wait for one that left
};

/// Sums over what a layer's heads saw in a batch: [layer, head] row-major.
struct BatchStatistics {
    double loss_sum = 0;  ///< nats, over all tokens
    std::vector<double> max_logit, q_rms, k_rms, zero_sum, zero_sum_abs, saturated, entropy, rows;

    explicit BatchStatistics(std::size_t heads = 0)
        : max_logit(heads, -std::numeric_limits<double>::infinity()),
          q_rms(heads, 0.0),
          k_rms(heads, 0.0),
          zero_sum(heads, 0.0),
          zero_sum_abs(heads, 0.0),
          saturated(heads, 0.0),
          entropy(heads, 0.0),
          rows(heads, 0.0) {}
};

}  // namespace faultline::gpt
