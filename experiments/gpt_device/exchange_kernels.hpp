// SPDX-License-Identifier: Apache-2.0
// What gradients need on their way between ranks, beside kernels.hpp. Private to this folder.
#pragma once

#include <faultline/gpt_device/gather.hpp>
#include <faultline/gpt_device/kernels.hpp>
#include <faultline/gpt_device/monitors.hpp>

namespace faultline::gpt::on_device {

/// to = from as fp32; count is a multiple of 8. WorkError where the launch fails.
void widen(const Bf16* from, std::size_t count, float* to, Stream stream);

/// *loss and totals [heads] become the sums over ranks of the double and the totals that each rank's part has at the offsets, in the
/// order of ranks; of the largest scores the largest. heads may be 0.
void add_in_rank_order(const GatheredParts& parts, std::size_t loss_at, double* loss, std::size_t totals_at,
                       HeadTotals* totals, std::size_t heads, Stream stream);

/// As finish_gradient, of the sum of the ranks' gradients in the order of ranks, which `gradient` [count], this rank's, becomes on
/// the way: each part begins with one. `round`: they come as the backward made them, and each is rounded by its kind before it is
/// added. One pass, as everybody reads the whole gradient here: what is added is read once more than without.
void finish_gathered_gradient(const GatheredParts& parts, float* gradient, const std::uint8_t* kinds, bool round,
                              std::size_t count, const double* loss, const StepScalars* scalars, double* sums,
                              StepResult* result, Stream stream);

/// to[i].largest = from[i].largest.
void take_largest(const HeadTotals* from, std::size_t count, HeadTotals* to, Stream stream);

}  // namespace faultline::gpt::on_device
