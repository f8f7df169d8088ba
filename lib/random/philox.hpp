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

namespace detail {

/// The words and the key schedule of a Threefry block on its way.
struct ThreefryState {
    std::uint32_t x0, x1, x2, x3;
    std::uint32_t key[5];
};

/// One mixing: a += b, b = rotate(b) ^ a.
template <int Rotation>
[[gnu::always_inline]] FAULTLINE_HD constexpr void threefry_mix(std::uint32_t& a, std::uint32_t& b) {
    a += b;
    b = ((b << Rotation) | (b >> (32 - Rotation))) ^ a;
}

/// Rounds `Round` to `Rounds`-1. Unrolled by recursion and inlined by force: a loop over rounds inside a loop over lanes
/// is not vectorised by the compilers at hand.
template <int Round, int Rounds>
[[gnu::always_inline]] FAULTLINE_HD constexpr void threefry_rounds(ThreefryState& s) {
    if constexpr (Round < Rounds) {
        constexpr int rotation[8][2] = {{10, 26}, {11, 21}, {13, 27}, {23, 5}, {6, 20}, {17, 11}, {25, 10}, {18, 20}};
        threefry_mix<rotation[Round % 8][0]>(s.x0, Round % 2 == 0 ? s.x1 : s.x3);
        threefry_mix<rotation[Round % 8][1]>(s.x2, Round % 2 == 0 ? s.x3 : s.x1);
        if constexpr (Round % 4 == 3) {
            constexpr int injection = Round / 4 + 1;
            s.x0 += s.key[injection % 5];
            s.x1 += s.key[(injection + 1) % 5];
            s.x2 += s.key[(injection + 2) % 5];
            s.x3 += s.key[(injection + 3) % 5] + static_cast<std::uint32_t>(injection);
        }
        threefry_rounds<Round + 1, Rounds>(s);
    }
}

}  // namespace detail

/// Threefry4x32 with `Rounds` rounds: additions, rotations and exclusive-ors alone, which vector units of every width do
/// at full rate; this is why bulk stochastic rounding uses it and not Philox, whose 32x32->64 products cost twice as much.
/// 12 rounds pass BigCrush (the paper, table 2). Rotations and parity constant: Skein 1.3 and the paper, section 4.1.
template <int Rounds>
[[nodiscard]] [[gnu::always_inline]] FAULTLINE_HD constexpr Block4x32 threefry4x32(Block4x32 counter, Block4x32 key) {
    const std::uint32_t parity = 0x1BD11BDAu ^ key.word[0] ^ key.word[1] ^ key.word[2] ^ key.word[3];
    detail::ThreefryState s{counter.word[0] + key.word[0],
                            counter.word[1] + key.word[1],
                            counter.word[2] + key.word[2],
                            counter.word[3] + key.word[3],
                            {key.word[0], key.word[1], key.word[2], key.word[3], parity}};
    detail::threefry_rounds<0, Rounds>(s);
    return {s.x0, s.x1, s.x2, s.x3};
}

}  // namespace faultline
