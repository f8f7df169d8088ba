// SPDX-License-Identifier: Apache-2.0
// QK-clip (arXiv 2507.20534) on the device, as Trainer::qk_clip: W_Q and W_K of a head times sqrt(tau / S) where its largest
// logit S of the step passes tau.
#pragma once

#include <faultline/gpt_device/monitors.hpp>

namespace faultline::gpt::on_device {

/// Where W_Q and W_K lie in the flat weights: [width, 2 width] of layer l at first + l step, rows `row` elements apart, heads side
/// by side.
struct QkWeights {
    std::ptrdiff_t first, step, row;
    int layers, heads, head_dim;
};

/// tau is scalars->qk_clip, 0: none; nothing where result->finite is 0. operands, if not null, get the new weights as bf16.
void qk_clip(const HeadTotals* totals, const QkWeights& at, const StepScalars* scalars, const StepResult* result,
             float* weights, Bf16* operands, Stream stream);

}  // namespace faultline::gpt::on_device
