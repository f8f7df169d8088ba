// SPDX-License-Identifier: Apache-2.0
#include <faultline/special/interpolator.hpp>

#include <gtest/gtest.h>

namespace faultline {
namespace {

// The definition: of all partial products of u * u, folded about the diagonal, those of weight 2^19 and more.
std::uint64_t square_by_partial_products(std::uint64_t u) {
    std::uint64_t sum = 0;
    for (int i = 0; i < 17; ++i) {
        for (int j = i; j < 17; ++j) {
            const int weight = i == j ? 2 * i : i + j + 1;
            if (weight >= 19 && (u >> i & 1) != 0 && (u >> j & 1) != 0) sum += std::uint64_t{1} << weight;
        }
    }
    return sum >> 19;
}

TEST(Interpolator, SquareIsTheSumOfThePartialProductsKept) {
    for (std::uint32_t u = 0; u < 1u << 17; ++u) ASSERT_EQ(mufu::square(u), square_by_partial_products(u)) << u;
}

// Coefficients have the widths that Oberman and Siu give: 26, 16 and 10 bits.
TEST(Interpolator, CoefficientsFitTheirRom) {
    for (std::uint32_t i = 0; i < 64; ++i) {
        for (const mufu::Segment s : {mufu::ex2_segment(i), mufu::lg2_segment(i)}) {
            EXPECT_LT(s.c0, 1u << 26) << i;
            EXPECT_LT(s.c1, 1u << 16) << i;
            EXPECT_LT(s.c2, 1u << 10) << i;
        }
    }
}

// A sum outside [1, 2) would need a carry into the exponent, which ex2_approx_ftz leaves out.
TEST(Interpolator, Ex2StaysInItsBinadeAndNeverFalls) {
    std::uint32_t before = mufu::ex2_significand(0);
    EXPECT_EQ(before, 1u << 23);
    for (std::uint32_t f = 1; f < 1u << 23; ++f) {
        const std::uint32_t now = mufu::ex2_significand(f);
        ASSERT_GE(now, before) << f;
        before = now;
    }
    EXPECT_EQ(before, (1u << 24) - 1);
}

TEST(Interpolator, Lg2RisesStrictlyBetweenZeroAndOne) {
    std::int64_t before = 0;
    for (std::uint32_t f = 0; f < 1u << 23; ++f) {
        const std::int64_t now = mufu::lg2_sum(f);
        ASSERT_GT(now, before) << f;
        before = now;
    }
    EXPECT_LT(before, std::int64_t{1} << 38);
}

}  // namespace
}  // namespace faultline
