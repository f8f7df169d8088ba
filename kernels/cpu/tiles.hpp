// SPDX-License-Identifier: Apache-2.0
// The tile schedule: which tiles a pass visits, in which order, and what the causal mask leaves of them. Compiles for host
// and device, so that both walk the same tiles.
#pragma once

#include <cstddef>

#include <faultline/base/host_device.hpp>
#include <faultline/plan/schedule.hpp>

namespace faultline {

/// Rows [first, first + count), the index-th tile of its dimension.
struct TileRange {
    std::ptrdiff_t first = 0;
    std::ptrdiff_t count = 0;
    int index = 0;
};

/// A dimension of `length` cut in tiles of `block` (0: one tile); the last may be short.
class TileAxis {
  public:
    FAULTLINE_HD TileAxis(std::ptrdiff_t length, int block)
        : length_(length), block_(block > 0 && block < length ? block : (length > 0 ? length : 1)) {}

    [[nodiscard]] FAULTLINE_HD int count() const { return static_cast<int>((length_ + block_ - 1) / block_); }
    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t block() const { return block_; }
    [[nodiscard]] FAULTLINE_HD TileRange operator[](int index) const {
        const std::ptrdiff_t first = index * block_;
        return {first, first + block_ <= length_ ? block_ : length_ - first, index};
    }
    /// The step-th tile when walking in `order` over the first `visited` tiles.
    [[nodiscard]] FAULTLINE_HD TileRange walk(int step, int visited, Order order) const {
        return (*this)[order == Order::ascending ? step : visited - 1 - step];
    }

  private:
    std::ptrdiff_t length_;
    std::ptrdiff_t block_;
};

/// How many keys query i sees: all, or with the causal mask aligned to the bottom right corner (FlashAttention >= 2.1).
FAULTLINE_HD constexpr std::ptrdiff_t visible_keys(std::ptrdiff_t query, std::ptrdiff_t n_q, std::ptrdiff_t n_k,
                                                   bool causal) {
    if (!causal) return n_k;
    const std::ptrdiff_t visible = query + n_k - n_q + 1;
    return visible < 0 ? 0 : (visible > n_k ? n_k : visible);
}

}  // namespace faultline
