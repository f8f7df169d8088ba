// SPDX-License-Identifier: Apache-2.0
// The errors that the backward's recorder finds in fp32 beside MPFR's, within the bounds of shadow.hpp, down to where products are
// subnormal.
#include <faultline/tensor_kernel/shadow.hpp>

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/random/bits_as.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/truth/mpfr_real.hpp>

namespace faultline::tensor_kernel {
namespace {

using detail::Real;

constexpr mpfr_prec_t bits = 700;  // holds any sum and product of three floats

/// What `found` is off from a b - c, or from a (b - c) where `factored`, taken from x: |found - (x - …)|.
double off(float found, float x, float a, float b, float c, bool factored) {
    Real exact(bits), other(bits);
    mpfr_set_flt(exact, b, MPFR_RNDN);
    if (factored) mpfr_sub_d(exact, exact, static_cast<double>(c), MPFR_RNDN);
    mpfr_mul_d(exact, exact, static_cast<double>(a), MPFR_RNDN);
    if (!factored) mpfr_sub_d(exact, exact, static_cast<double>(c), MPFR_RNDN);
    mpfr_set_flt(other, x, MPFR_RNDN);
    mpfr_sub(exact, other, exact, MPFR_RNDN);
    mpfr_sub_d(exact, exact, static_cast<double>(found), MPFR_RNDN);
    return std::abs(mpfr_get_d(exact, MPFR_RNDA));
}

/// A float of any sign with an exponent in [low, high]; below -126 subnormal. One in eight has few bits, one in eight all.
float drawn(std::uint64_t r, int low, int high) {
    const int exponent = low + static_cast<int>((r >> 32) % static_cast<std::uint64_t>(high - low + 1));
    std::uint32_t fraction = static_cast<std::uint32_t>(r) & 0x7FFFFFu;
    if ((r >> 24 & 7) == 0) fraction &= 0x700000u;
    if ((r >> 24 & 7) == 1) fraction |= 0x7FFFF0u;
    const float size = std::ldexp(1 + static_cast<float>(fraction) * 0x1p-23f, exponent);
    return (r >> 63) != 0 ? -size : size;
}

struct Range {
    int low, high;
};
/// Of p or a score, and of dp, delta, a reference.
constexpr std::pair<Range, Range> ranges[] = {
    {{-20, 0}, {-8, 8}}, {{-126, -60}, {-20, 8}}, {{-149, -100}, {-149, 8}}, {{-80, -40}, {-90, -40}}};

TEST(Shadow, GradientErrorsAreWithinTheirBound) {
    std::size_t below = 0;  // whose product's residual cannot be held
    for (const auto& [of_p, of_dp] : ranges) {
        const RandomStream stream(5, static_cast<std::uint64_t>(of_p.high - of_dp.low));
        for (std::uint64_t i = 0; i < 40000; ++i) {
            const float p = std::abs(drawn(stream.bits(4 * i), of_p.low, of_p.high)),
                        dp = drawn(stream.bits(4 * i + 1), of_dp.low, of_dp.high);
            const bool near = i % 3 == 0;  // delta cancels most of dp
            const float delta = near ? dp * (1 + static_cast<float>(stream.bits(4 * i + 2) % 64) * 0x1p-20f)
                                     : drawn(stream.bits(4 * i + 2), of_dp.low, of_dp.high);
            const float ds = p * (dp - delta);
            const double size = static_cast<double>(p) * std::abs(static_cast<double>(dp) - static_cast<double>(delta));
            const double error = off(shadow::gradient_error(p, dp, delta, ds), ds, p, dp, delta, true);
            ASSERT_LE(error, 0x1p-46 * size * (1 + 0x1p-20) + 0x1p-149) << p << " (" << dp << " - " << delta << ")";
            below += error > 0x1p-46 * size ? 1 : 0;
        }
    }
    EXPECT_GT(below, 1000u) << "a bound without 2^-149 would do";
}

TEST(Shadow, ArgumentErrorsAreWithinTheirBound) {
    std::size_t below = 0;
    for (const auto& [of_score, of_reference] : ranges)
        for (const bool fused : {true, false}) {
            const RandomStream stream(6, static_cast<std::uint64_t>(of_score.high - of_reference.low));
            for (std::uint64_t i = 0; i < 20000; ++i) {
                const float score = drawn(stream.bits(4 * i), of_score.low, of_score.high),
                            scale = drawn(stream.bits(4 * i + 1), -4, 1);
                const bool near = i % 3 == 0;
                const float reference =
                    near ? score * scale * (1 + static_cast<float>(stream.bits(4 * i + 2) % 64) * 0x1p-20f)
                         : drawn(stream.bits(4 * i + 2), of_reference.low, of_reference.high);
                const float x = fused ? std::fma(score, scale, -reference) : score * scale - reference;
                const double largest = std::max(std::abs(static_cast<double>(score) * static_cast<double>(scale)),
                                                std::abs(static_cast<double>(reference)));
                const double error =
                    off(shadow::argument_error(score, scale, reference, x), x, score, scale, reference, false);
                ASSERT_LE(error, 0x1p-44 * largest + 0x1p-150) << score << " " << scale << " - " << reference;
                below += error > 0x1p-44 * largest ? 1 : 0;
            }
        }
    EXPECT_GT(below, 100u) << "a bound without 2^-150 would do";
}

TEST(Shadow, SumsOfProductsAreWithinTheirBound) {
    constexpr int terms = 32;  // of a thread, head size 128
    for (const auto& [low, high] : {Range{-6, 2}, Range{-70, -58}, Range{-2, -2}}) {
        const RandomStream stream(7, static_cast<std::uint64_t>(high - low));
        for (std::uint64_t i = 0; i < 3000; ++i) {
            float sum = 0, rest = 0;
            Real exact(bits), product(bits);
            double size = 0;
            for (std::uint64_t t = 0; t < terms; ++t) {
                const auto of_bf16 = [&](std::uint64_t at) {
                    const float x = drawn(stream.bits(at), low, high);
                    return detail::bits_as<float>(detail::bits_as<std::uint32_t>(x) & 0xFFFF0000u);
                };
                const std::uint64_t at = 2 * (i * terms + t);
                const float a = of_bf16(at), b = of_bf16(at + 1);
                shadow::add_exactly(sum, rest, a * b);
                mpfr_set_flt(product, a, MPFR_RNDN);
                mpfr_mul_d(product, product, static_cast<double>(b), MPFR_RNDN);
                mpfr_add(exact, exact, product, MPFR_RNDN);
                size += std::abs(static_cast<double>(a) * static_cast<double>(b));
            }
            mpfr_sub_d(exact, exact, static_cast<double>(sum), MPFR_RNDN);
            mpfr_sub_d(exact, exact, static_cast<double>(rest), MPFR_RNDN);
            ASSERT_LE(std::abs(mpfr_get_d(exact, MPFR_RNDA)),
                      terms * (terms + 1) / 2 * 0x1p-48 * size + terms * 0x1p-150);
        }
    }
}

}  // namespace
}  // namespace faultline::tensor_kernel
