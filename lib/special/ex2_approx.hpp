// SPDX-License-Identifier: Apache-2.0
// 2^x as NVIDIA's special function unit returns it (MUFU.EX2), bit for bit, and what nvcc builds on it.
//
// The unit makes of |x| a fixed-point number with 23 fraction bits by truncation. A negative x with a fraction gets the
// fraction's one's complement and the next lower exponent, so that its result is that of the number 2^-23 below; whole
// numbers and those that truncate to one are exact powers of two. The fraction goes through the interpolator
// (interpolator.hpp). Infinities come from x >= 128; what would be subnormal is flushed to zero.
//
// What the model rests on: fitted to 2^23 results of one NVIDIA H200 (compute capability 9.0, 2026-11-29), and equal to
// the card's for all 2^32 floats (kernels/cuda/special_probe; docs/results/special-functions.md).
#pragma once

#include <cstdint>

#include <faultline/base/host_device.hpp>
#include <faultline/random/bits_as.hpp>
#include <faultline/special/interpolator.hpp>

namespace faultline {

/// ex2.approx.ftz.f32, that is MUFU.EX2 alone: results below 2^-126 are +0, subnormal x gives 1, NaN gives 0x7FFFFFFF.
///
/// Masks in place of branches let a loop over it be vectorised; choices written with ?: are made jumps by GCC 12.
FAULTLINE_HD inline float ex2_approx_ftz(float x) {
    const std::uint32_t bits = detail::bits_as<std::uint32_t>(x);
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    const std::uint32_t negative = 0u - (bits >> 31);  // a mask, as the next and others below
    const std::uint32_t finite = 0u - static_cast<std::uint32_t>(magnitude < 0x43000000u);  // |x| < 128
    const float bounded = detail::bits_as<float>(magnitude & finite);
    const std::uint32_t fixed =
        static_cast<std::uint32_t>(static_cast<std::int32_t>(bounded * 8388608.0f));  // exact product, truncated
    const std::uint32_t low = fixed & 0x7FFFFFu;
    const std::uint32_t complement = negative & (0u - static_cast<std::uint32_t>(low != 0));
    // The exponent of a negative number: ~whole where the fraction is complemented, else -whole = ~whole + 1.
    const std::uint32_t exponent = ((fixed >> 23) ^ negative) + (negative & ~complement & 1u);
    const std::uint32_t significand = mufu::ex2_significand(low ^ (complement & 0x7FFFFFu));
    const std::uint32_t normal = 0u - static_cast<std::uint32_t>(static_cast<std::int32_t>(exponent) >= -126);
    const std::uint32_t result = (((exponent + 126u) << 23) + significand) & normal;
    const std::uint32_t nan = 0u - static_cast<std::uint32_t>(magnitude > 0x7F800000u);
    const std::uint32_t beyond = (0x7F800000u & ~negative) | (0x7FFFFFFFu & nan);
    return detail::bits_as<float>((result & finite) | (beyond & ~finite));
}

/// ex2.approx.f32: instructions around the unit make subnormal results (SASS of nvcc 13.0 for sm_90: FSETP.GEU x, -126;
/// @!P FMUL x, 0.5; MUFU.EX2; @!P FMUL y, y). Squaring doubles the relative error of the half's result.
FAULTLINE_HD inline float ex2_approx(float x) {
    // x < -126 from the encodings: a floating-point comparison may raise a flag, so that GCC does not vectorise it.
    constexpr std::uint32_t above = 0xC2FC0000u, minus_infinity = 0xFF800000u, one = 0x3F800000u, half = 0x3F000000u;
    const std::uint32_t bits = detail::bits_as<std::uint32_t>(x);
    const std::uint32_t small = 0u - static_cast<std::uint32_t>(bits - above - 1u < minus_infinity - above);
    const float y = ex2_approx_ftz(x * detail::bits_as<float>((half & small) | (one & ~small)));
    return y * detail::bits_as<float>((detail::bits_as<std::uint32_t>(y) & small) | (one & ~small));
}

/// exp2f(x) as nvcc 13.0 compiles it for sm_90 without fast math: the very instructions of ex2.approx.f32.
FAULTLINE_HD inline float exp2f_cuda(float x) { return ex2_approx(x); }

/// __expf(x) without -ftz: x log2(e), rounded to fp32, through ex2.approx.f32 (SASS of nvcc 13.0 for sm_90).
FAULTLINE_HD inline float expf_fast_cuda(float x) { return ex2_approx(x * 1.44269502162933349609375f); }

}  // namespace faultline
