// SPDX-License-Identifier: Apache-2.0
// ex2.approx and lg2.approx of a card, and what CUDA makes of them, beside lib/special, bit for bit. In a build without CUDA the
// function is there and says so.
#pragma once

#include <vector>

#include <faultline/agreement/agreement.hpp>

namespace faultline::agreement {

/// Of each function all 2^32 floats on the device in use, through the card's instruction and through the model as it is compiled for
/// the card; of every 1,024 of them the first through the model as it is compiled for the host. 16 MiB of the card's memory. The
/// models are of a card of compute capability 9.0. WorkError where the device fails.
[[nodiscard]] std::vector<Agreement> check_special_functions();

}  // namespace faultline::agreement
