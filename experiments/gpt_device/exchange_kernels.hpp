// SPDX-License-Identifier: Apache-2.0
// What gradients need on their way between ranks, beside kernels.hpp. Private to this folder.
#pragma once

#include <faultline/gpt_device/kernels.hpp>
#include <faultline/gpt_device/monitors.hpp>

namespace faultline::gpt::on_device {

/// to = from as fp32; count is a multiple of 8. WorkError where the launch fails.
void widen(const Bf16* from, std::size_t count, float* to, Stream stream);

/// to[i].largest = from[i].largest.
void take_largest(const HeadTotals* from, std::size_t count, HeadTotals* to, Stream stream);

}  // namespace faultline::gpt::on_device
