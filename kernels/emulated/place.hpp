// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <faultline/base/host_device.hpp>

namespace faultline::emulated {

/// Where a tile stands (TileAt of kernels/cpu/instrument.hpp), and which part of it a team has: rows i0 and on, columns j0
/// and on, of a tile that is `cols` wide. The counters of random numbers are those of the whole tile.
struct Place {
    int head = 0;
    std::ptrdiff_t query0 = 0, key0 = 0;
    int q_tile = 0, k_tile = 0, part = 0;
    std::ptrdiff_t visible0 = PTRDIFF_MAX / 2;
    bool biased = false;
    std::ptrdiff_t i0 = 0, j0 = 0, cols = 1;

    [[nodiscard]] FAULTLINE_HD std::uint64_t counter(std::ptrdiff_t i, std::ptrdiff_t j) const {
        return static_cast<std::uint64_t>((i0 + i) * cols + (j0 + j));
    }
    /// The same tile of a product, `width` wide: its rows are those from `first` on.
    [[nodiscard]] FAULTLINE_HD Place of_product(std::ptrdiff_t first, std::ptrdiff_t width) const {
        Place p = *this;
        p.i0 = first;
        p.j0 = 0;
        p.cols = width;
        return p;
    }
};

}  // namespace faultline::emulated
