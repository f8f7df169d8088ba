// SPDX-License-Identifier: Apache-2.0
// What depends on head size and mask: a kernel is compiled once for each of them, with its own tiles and threads.
#pragma once

#include <optional>

namespace faultline {

/// One case of a plan's list. The cases are read in order and the first that fits decides; a head between
/// two sizes runs the larger kernel, padded with zeros, which changes no sum.
struct TileCase {
    int head_dim = 0;              ///< fits heads of this size or smaller
    std::optional<bool> causal{};  ///< fits only calls with (or without) a causal mask; empty: both
    std::optional<bool> window{};  ///< fits only calls with (or without) a sliding window; empty: both
    /// Replace the schedule's fields of the same name; empty: kept.
    std::optional<int> block_q{}, block_k{}, bwd_block_q{}, bwd_block_k{}, delta_threads{};
    std::optional<int> exp_poly_every{}, exp_poly_count{}, exp_poly_skip{};

    friend bool operator==(const TileCase&, const TileCase&) = default;
};

}  // namespace faultline
