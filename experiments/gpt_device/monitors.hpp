// SPDX-License-Identifier: Apache-2.0
// What the heads of a step saw, added up on the device from what the kernels left (HeadParts of attention.hpp): the numbers of
// HeadStatistics (experiments/gpt/fast_attention.hpp) and the rms of q and k.
#pragma once

#include <cstdint>

#include <faultline/gpt_device/attention.hpp>
#include <faultline/gpt_device/kernels.hpp>

namespace faultline::gpt::on_device {

/// Of a head of a layer, over the tokens of a step.
struct HeadTotals {
    double largest = 0;                     ///< the largest scaled score
    double q_rms = 0, k_rms = 0;            ///< sums over tokens
    double zero_sum = 0, zero_sum_abs = 0;  ///< nat/logit, times the unit that the plan has ds in
    double saturated = 0, entropy = 0;      ///< sums over rows, where asked for
};

/// Layers whose parts are [heads, batch, parts]: a bit each.
struct LayersByHead {
    static constexpr int most = 512;
    std::uint32_t bits[most / 32] = {};
    void set(int layer) { bits[layer / 32] |= 1U << (layer % 32); }
};

/// totals [layers, heads]: assigned in micro-step 0, else added to. `first`: the parts of layer 0; those of layer l follow
/// l batch heads counts further. Sums in a fixed order.
void add_up(const HeadParts& first, const PartCounts& counts, int layers, int batch, int heads,
            const LayersByHead& by_head, const StepScalars* scalars, HeadTotals* totals, Stream stream);

}  // namespace faultline::gpt::on_device
