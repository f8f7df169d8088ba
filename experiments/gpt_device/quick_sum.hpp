// SPDX-License-Identifier: Apache-2.0
// A number of bf16 plus a constant of binary64, rounded to bf16 by 16 random bits, in binary32. Private to this folder.
#pragma once

#include <cstdint>

#include <faultline/base/host_device.hpp>
#include <faultline/random/bits_as.hpp>

namespace faultline::gpt::on_device {

/// x + c for many x. Of y = x + c in binary64, cut off at 24 bits, what is wanted are the upper 16 of the 32 bits that come of adding
/// 16 random bits to it; of(x), with the same random bits added, has the same upper half unless its lower half is within a few units
/// of 0, which is_open() says, or the sum is smaller than `least`.
///
/// Why: c = high + low to 2^-25 of high's last place, since low is rounded once. x + high is exact where it is a multiple of high's
/// last place of fewer than 2^24 of them: where it is not, it is at least some half of high, and the error at most half its last
/// place. Adding low rounds once more. So with a sum that is not below 2^-20 of c, of(x) is within 1.6 units of its last place of y (y's
/// own rounding is 2^-29 of one), and within -3 and +1 of y cut off, a sum on the other side of a power of two included. With a lower
/// half of 3 to 0xFFFD no such step changes the upper half, or makes a lower half of 0xFFFF, where further random bits decide.
struct QuickSum {
    float high = 0, low = 0;
    std::uint32_t least = 0;  ///< bits of bf16
    bool fits = false;        ///< else nothing holds
    static constexpr std::uint32_t before = 2, open = 5;

    /// constant: magnitude times the rms of at most 2^17 finite numbers of bf16, which are the x.
    QuickSum() = default;
    FAULTLINE_HD QuickSum(double constant, double magnitude) {
        const double size = constant < 0 ? -constant : constant, factor = magnitude < 0 ? -magnitude : magnitude;
        // No sum is near the ends of the range: an x is at most 2^9 times the rms, which is at most 2^20 of the constant.
        fits = size >= 0x1p-80 && size <= 0x1p60 && factor >= 0x1p-20;
        if (!fits) return;
        high = static_cast<float>(constant);
        low = static_cast<float>(constant - static_cast<double>(high));
        least = (detail::bits_as<std::uint32_t>(static_cast<float>(size) * 0x1p-18F) >> 16) + 1;
    }
    [[nodiscard]] FAULTLINE_HD float of(float x) const { return (x + high) + low; }
    /// Of the lower half of the sum of bits.
    [[nodiscard]] FAULTLINE_HD static bool is_open(std::uint32_t lower) { return ((lower + before) & 0xFFFFu) < open; }
};

}  // namespace faultline::gpt::on_device
