// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/elements.cuh>
#include <faultline/gpt_device/monitors.hpp>

namespace faultline::gpt::on_device {
namespace {

constexpr int threads = 256;

__device__ double block_total(double x) {
    __shared__ double sums[threads / 32];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    double total = 0;
    for (int w = 0; w < threads / 32; ++w) total += sums[w];
    return total;
}
__device__ float block_largest(float x) {
    __shared__ float parts[threads / 32];
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    for (int w = 0; w < threads / 32; ++w) x = fmaxf(x, parts[w]);
    return x;
}

/// A block has a head of a layer; thread t the parts t, t + 256, … of all sequences.
__global__ void __launch_bounds__(threads)
    add_parts(HeadParts first, PartCounts counts, int batch, int heads, LayersByHead by_head,
              const StepScalars* scalars, HeadTotals* totals) {
    const int head = blockIdx.x, layer = blockIdx.y;
    const bool apart = by_head.bits[layer / 32] >> (layer % 32) & 1;
    const auto each = [&](int count, auto&& look) {
        for (int i = threadIdx.x; i < batch * count; i += threads) {
            const int sequence = i / count, part = i % count;
            const std::size_t slot = apart ? head * batch + sequence : sequence * heads + head;
            look((static_cast<std::size_t>(layer) * batch * heads + slot) * count + part);
        }
    };
    HeadTotals& to = totals[layer * heads + head];
    const bool adds = scalars->micro_step > 0;
    const auto sum_two = [&](const double* from, int count, double& a, double& b) {
        double x = 0, y = 0;
        if (from != nullptr)
            each(count, [&](std::size_t at) {
                x += from[2 * at];
                y += from[2 * at + 1];
            });
        x = block_total(x);
        y = block_total(y);
        if (threadIdx.x != 0) return;
        a = adds ? a + x : x;
        b = adds ? b + y : y;
    };
    float largest = -INFINITY;
    each(counts.largest, [&](std::size_t at) { largest = fmaxf(largest, first.largest[at]); });
    largest = block_largest(largest);
    if (threadIdx.x == 0) to.largest = adds ? fmax(to.largest, static_cast<double>(largest)) : largest;
    sum_two(first.rms, counts.rms, to.q_rms, to.k_rms);
    sum_two(first.zero_sums, counts.zero_sums, to.zero_sum, to.zero_sum_abs);
    sum_two(first.rows, counts.rows, to.saturated, to.entropy);
}

}  // namespace

void add_up(const HeadParts& first, const PartCounts& counts, int layers, int batch, int heads,
            const LayersByHead& by_head, const StepScalars* scalars, HeadTotals* totals, Stream stream) {
    add_parts<<<dim3(heads, layers), threads, 0, stream>>>(first, counts, batch, heads, by_head, scalars, totals);
    check_launch("monitors");
}

}  // namespace faultline::gpt::on_device
