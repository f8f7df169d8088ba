// SPDX-License-Identifier: Apache-2.0
// The random numbers of bulk stochastic rounding. Groups of 128 elements take 16 Threefry4x32-12 blocks for the upper 16
// bits of their random numbers and 16 more for the next 16. Lane l of the 16 computes block l, and word w of it serves
// elements 16 w + l (lower half) and 64 + 16 w + l (upper half): a vector of 16 lanes then reads and writes contiguous
// elements without a shuffle. A float rounded to bf16 discards 16 bits, so only the upper blocks are computed for it.
#pragma once

#include <faultline/base/host_device.hpp>
#include <faultline/random/philox.hpp>
#include <faultline/random/random_stream.hpp>

#include <cstdint>

namespace faultline {
namespace detail {

inline constexpr int stochastic_group = 128;
inline constexpr int stochastic_lanes = 16;
inline constexpr int stochastic_rounds = 12;  // the fewest that pass BigCrush; see threefry4x32

/// Third key word: keeps these blocks apart from other uses of Threefry with the same key.
inline constexpr std::uint32_t stochastic_domain = 0x726F756Eu;

/// Block of lane `lane` in group `group` for the upper (part 0) or lower (part 1) 16 bits.
[[gnu::always_inline]] FAULTLINE_HD constexpr Block4x32 stochastic_block(std::uint64_t key, std::uint64_t group,
                                                                         std::uint32_t lane, std::uint32_t part) {
    return threefry4x32<stochastic_rounds>(
        {static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(group >> 32), lane, 0},
        {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32), stochastic_domain, part});
}

}  // namespace detail

[[nodiscard]] FAULTLINE_HD constexpr std::uint64_t stochastic_bits(RandomStream stream, std::uint64_t counter) {
    const std::uint64_t group = counter / detail::stochastic_group;
    const auto element = static_cast<std::uint32_t>(counter % detail::stochastic_group);
    const std::uint32_t lane = element % detail::stochastic_lanes;
    const std::uint32_t word = element / detail::stochastic_lanes % 4;
    const std::uint32_t half = element / (detail::stochastic_lanes * 4);
    const std::uint32_t upper = detail::stochastic_block(stream.key, group, lane, 0).word[word] >> (16 * half);
    const std::uint32_t lower = detail::stochastic_block(stream.key, group, lane, 1).word[word] >> (16 * half);
    return (static_cast<std::uint64_t>(upper & 0xFFFFu) << 48) | (static_cast<std::uint64_t>(lower & 0xFFFFu) << 32);
}

}  // namespace faultline
