// SPDX-License-Identifier: Apache-2.0
// Sums in binary32 in place of binary64 where a cast is rounded stochastically. No card.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include <faultline/gpt_device/quick_sum.hpp>
#include <faultline/random/bits_as.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline::gpt::on_device {
namespace {

/// A normal number cut off at 24 bits, as bits of binary32.
std::uint32_t cut_off(double y) {
    const auto bits = detail::bits_as<std::uint64_t>(y);
    const auto exponent = static_cast<std::uint32_t>((bits >> 52 & 0x7FF) - 1023 + 127);
    return static_cast<std::uint32_t>(bits >> 63) << 31 | exponent << 23 |
           static_cast<std::uint32_t>(bits >> 29 & 0x7FFFFF);
}

/// All numbers of bf16 that QuickSum is for, plus constants of many sizes and with few and many bits, each with the random numbers
/// about which a carry is decided.
TEST(QuickSum, HasTheUpperHalfOfTheSumInBinary64) {
    const RandomStream stream(4);
    long long sums = 0, open = 0, wrong = 0;
    for (std::uint64_t n = 0; n < 40; ++n) {
        const std::uint64_t random = stream.bits(n);
        double constant =
            std::ldexp(1 + static_cast<double>(random >> 12) * 0x1p-52, -80 + static_cast<int>(n * 139 / 39));
        if (n % 4 == 1) constant = static_cast<float>(constant);
        if (n % 4 == 2)
            constant =
                detail::bits_as<float>(detail::bits_as<std::uint32_t>(static_cast<float>(constant)) & 0xFFFF0000u);
        if (n % 8 == 2) constant = std::nextafter(constant, 0x1p70);
        if (random & 1) constant = -constant;
        const QuickSum quick(constant, 0.02);
        ASSERT_TRUE(quick.fits) << constant;
        for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
            const float x = detail::bits_as<float>(upper << 16);
            if (!(std::fabs(x) <= std::fabs(constant) * 0x1p29)) continue;
            const auto found = detail::bits_as<std::uint32_t>(quick.of(x)), wanted = cut_off(x + constant);
            for (std::uint32_t i = 0; i < 12; ++i) {
                const std::uint32_t drawn =
                    (i < 9 ? 0xFFFCu + i - found : static_cast<std::uint32_t>(random >> i)) & 0xFFFFu;
                if (((found + drawn) >> 16 & 0x7FFFu) < quick.least) continue;
                ++sums;
                open += QuickSum::is_open(found + drawn);
                wrong += !QuickSum::is_open(found + drawn) &&
                         ((found + drawn) >> 16 != (wanted + drawn) >> 16 || ((wanted + drawn) & 0xFFFFu) == 0xFFFFu);
            }
        }
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_GT(sums, 10'000'000);
    EXPECT_LT(open, sums / 2);  // five of the nine about a carry
}

TEST(QuickSum, IsNotForConstantsNearTheEndsOfTheRange) {
    for (const double constant : {0.0, 0x1p-81, -0x1p61}) EXPECT_FALSE(QuickSum(constant, 0.02).fits) << constant;
    EXPECT_FALSE(QuickSum(1.0, 0x1p-21).fits);
}

}  // namespace
}  // namespace faultline::gpt::on_device
