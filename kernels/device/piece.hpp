// SPDX-License-Identifier: Apache-2.0
// A piece of a large copy to a card, as the host stores it: in the smallest type that holds all of its values (staging.cuh).
#pragma once

#include <cstddef>

namespace faultline::device {

/// In the order in which they are tried; what one type did not hold the pieces behind it are not tried in again.
enum class PieceType : unsigned char { bf16, fp32, fp64 };

/// Stores as many of from[0..left) as `bytes` of `slot` have room for in `type` or, where that does not hold one of them bit for
/// bit, in the next, which `type` becomes. How many. The slot begins at a multiple of 8 bytes, and `bytes` is one.
[[nodiscard]] std::size_t store_piece(PieceType& type, const double* from, std::size_t left, unsigned char* slot,
                                      std::size_t bytes);

}  // namespace faultline::device
