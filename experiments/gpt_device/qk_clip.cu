// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/elements.cuh>
#include <faultline/gpt_device/qk_clip.hpp>

namespace faultline::gpt::on_device {
namespace {

constexpr int threads = 256;

/// A block has W_Q or W_K of a head.
__global__ void __launch_bounds__(threads) shrink(const HeadTotals* totals, QkWeights at, const StepScalars* scalars,
                                                  const StepResult* result, float* weights, Bf16* operands) {
    const int head = blockIdx.x, layer = blockIdx.y, part = blockIdx.z;
    const double tau = scalars->qk_clip, largest = totals[layer * at.heads + head].largest;
    if (!(tau > 0) || !(largest > tau) || !result->finite) return;
    const auto factor = static_cast<float>(sqrt(tau / largest));
    const int width = at.heads * at.head_dim;
    const std::ptrdiff_t begin = at.first + layer * at.step + part * width + head * at.head_dim;
    for (int i = threadIdx.x; i < width * at.head_dim; i += threads) {
        const std::ptrdiff_t place = begin + i / at.head_dim * at.row + i % at.head_dim;
        const float w = weights[place] * factor;
        weights[place] = w;
        if (operands != nullptr) store1(operands + place, w);
    }
}

}  // namespace

void qk_clip(const HeadTotals* totals, const QkWeights& at, const StepScalars* scalars, const StepResult* result,
             float* weights, Bf16* operands, Stream stream) {
    shrink<<<dim3(at.heads, at.layers, 2), threads, 0, stream>>>(totals, at, scalars, result, weights, operands);
    check_launch("QK-clip");
}

}  // namespace faultline::gpt::on_device
