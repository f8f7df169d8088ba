// SPDX-License-Identifier: Apache-2.0
// Counter-based generators of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11:
// Philox4x32 and Threefry4x32. A block is a pure function of (counter, key): there is no state to seed, split or save, so
// element 7 of tile 3 gets the same number whatever the order, the thread count or the device.
//
// Written here rather than taken from <random> or cuRAND because host and device must give the same numbers, and a
// constant expression too.
#pragma once

#include <faultline/base/host_device.hpp>

#include <cstdint>

namespace faultline {

/// Four 32-bit words: a counter going in, a random block coming out.
struct Block4x32 {
    std::uint32_t word[4];
    friend constexpr bool operator==(const Block4x32&, const Block4x32&) = default;
};

/// Philox4x32 with 10 rounds (the paper's recommended safety margin; 7 pass BigCrush). Constants: the paper, section 4.2.
[[nodiscard]] FAULTLINE_HD constexpr Block4x32 philox4x32(Block4x32 counter, std::uint64_t key) {
    constexpr std::uint64_t multiplier0 = 0xD2511F53u;
    constexpr std::uint64_t multiplier1 = 0xCD9E8D57u;
    constexpr std::uint32_t weyl0 = 0x9E3779B9u;  // golden ratio
    constexpr std::uint32_t weyl1 = 0xBB67AE85u;  // sqrt(3) - 1
    auto key0 = static_cast<std::uint32_t>(key);
    auto key1 = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t product0 = multiplier0 * counter.word[0];
        const std::uint64_t product1 = multiplier1 * counter.word[2];
        counter = {
            static_cast<std::uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<std::uint32_t>(product1),
            static_cast<std::uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<std::uint32_t>(product0)};
        key0 += weyl0;
        key1 += weyl1;
    }
    return counter;
}

/// Threefry4x32 with `Rounds` rounds: additions, rotations and exclusive-ors alone, which vector units of every width do
/// at full rate; this is why bulk stochastic rounding uses it and not Philox, whose 32x32->64 products cost twice as much.
/// 12 rounds pass BigCrush (the paper, table 2). Rotations and parity constant: Skein 1.3 and the paper, section 4.1.
template <int Rounds>
[[nodiscard]] FAULTLINE_HD constexpr Block4x32 threefry4x32(Block4x32 counter, Block4x32 key) {
    constexpr int rotation[8][2] = {{10, 26}, {11, 21}, {13, 27}, {23, 5}, {6, 20}, {17, 11}, {25, 10}, {18, 20}};
    const std::uint32_t schedule[5] = {key.word[0], key.word[1], key.word[2], key.word[3],
                                       0x1BD11BDAu ^ key.word[0] ^ key.word[1] ^ key.word[2] ^ key.word[3]};
    std::uint32_t x0 = counter.word[0] + schedule[0];
    std::uint32_t x1 = counter.word[1] + schedule[1];
    std::uint32_t x2 = counter.word[2] + schedule[2];
    std::uint32_t x3 = counter.word[3] + schedule[3];
    for (int round = 0; round < Rounds; ++round) {
        const int r0 = rotation[round % 8][0];
        const int r1 = rotation[round % 8][1];
        std::uint32_t& partner0 = round % 2 == 0 ? x1 : x3;
        std::uint32_t& partner2 = round % 2 == 0 ? x3 : x1;
        x0 += partner0;
        partner0 = ((partner0 << r0) | (partner0 >> (32 - r0))) ^ x0;
        x2 += partner2;
        partner2 = ((partner2 << r1) | (partner2 >> (32 - r1))) ^ x2;
        if (round % 4 == 3) {
            const int injection = round / 4 + 1;
            x0 += schedule[injection % 5];
            x1 += schedule[(injection + 1) % 5];
            x2 += schedule[(injection + 2) % 5];
            x3 += schedule[(injection + 3) % 5] + static_cast<std::uint32_t>(injection);
        }
    }
    return {x0, x1, x2, x3};
}

}  // namespace faultline
