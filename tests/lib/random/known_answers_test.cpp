// SPDX-License-Identifier: Apache-2.0
// Known answers published with the generators (Random123, tests/kat_vectors): counter and key of zeros, of ones, and of
// the digits of pi.
#include <faultline/random/philox.hpp>

#include <gtest/gtest.h>

namespace faultline {
namespace {

constexpr std::uint32_t ones = 0xFFFFFFFFu;
constexpr Block4x32 pi_counter{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u};
constexpr Block4x32 pi_key{0xa4093822u, 0x299f31d0u, 0x082efa98u, 0xec4e6c89u};

constexpr std::uint64_t key64(std::uint32_t low, std::uint32_t high) {
    return (static_cast<std::uint64_t>(high) << 32) | low;
}

TEST(Philox4x32, KnownAnswersOfTenRounds) {
    EXPECT_EQ(philox4x32({0, 0, 0, 0}, 0), (Block4x32{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
    EXPECT_EQ(philox4x32({ones, ones, ones, ones}, key64(ones, ones)),
              (Block4x32{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
    EXPECT_EQ(philox4x32(pi_counter, key64(pi_key.word[0], pi_key.word[1])),
              (Block4x32{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(Threefry4x32, KnownAnswersOfTwentyRounds) {
    EXPECT_EQ(threefry4x32<20>({0, 0, 0, 0}, {0, 0, 0, 0}),
              (Block4x32{0x9c6ca96au, 0xe17eae66u, 0xfc10ecd4u, 0x5256a7d8u}));
    EXPECT_EQ(threefry4x32<20>({ones, ones, ones, ones}, {ones, ones, ones, ones}),
              (Block4x32{0x2a881696u, 0x57012287u, 0xf6c7446eu, 0xa16a6732u}));
    EXPECT_EQ(threefry4x32<20>(pi_counter, pi_key), (Block4x32{0x59cd1dbbu, 0xb8879579u, 0x86b5d00cu, 0xac8b6d84u}));
}

// 13 rounds end inside a group of four, 72 run through every rotation and key injection many times.
TEST(Threefry4x32, KnownAnswersOfOtherRoundCounts) {
    EXPECT_EQ(threefry4x32<13>({0, 0, 0, 0}, {0, 0, 0, 0}),
              (Block4x32{0x531c7e4fu, 0x39491ee5u, 0x2c855a92u, 0x3d6abf9au}));
    EXPECT_EQ(threefry4x32<13>(pi_counter, pi_key), (Block4x32{0x4aa71d8fu, 0x734738c2u, 0x431fc6a8u, 0xae6debf1u}));
    EXPECT_EQ(threefry4x32<72>(pi_counter, pi_key), (Block4x32{0x09930adfu, 0x7f27bd55u, 0x9ed68ce1u, 0x97f803f6u}));
}

static_assert(philox4x32({0, 0, 0, 0}, 0).word[0] == 0x6627e8d5u, "a constant expression");

}  // namespace
}  // namespace faultline
