// SPDX-License-Identifier: Apache-2.0
// log2 x as NVIDIA's special function unit returns it (MUFU.LG2), bit for bit where measured, and what nvcc builds on
// it.
//
// For x = 2^e (1 + f) the interpolator (interpolator.hpp) gives log2(1 + f) in fixed point; the unit cuts it to 36
// fraction bits, adds e, takes the one's complement of a negative sum for its magnitude, and truncates that to 24
// significant bits. x = 1 gives +0. The error is absolute, near 2^-22.6, also beside 1, where the result is small: only
// x = 1 itself is right there.
//
// What the model rests on: tables and rounding constant fitted to the results of one NVIDIA H200 (compute capability
// 9.0, 2026-11-29); below 1 and for the cut to 36 bits the rule of the first Tesla generation (M. Kościelnicki, envytools,
// 2015), whose tables those are; equal to the card's for all 2^32 floats (kernels/cuda/special_probe;
// docs/results/special-functions.md).
#pragma once

#include <cstdint>

#include <faultline/base/host_device.hpp>
#include <faultline/random/bits_as.hpp>
#include <faultline/special/interpolator.hpp>

namespace faultline {

/// lg2.approx.ftz.f32, that is MUFU.LG2 alone: zeros and subnormals of either sign give -inf, other negative numbers
/// and NaN give 0x7FFFFFFF.
FAULTLINE_HD inline float lg2_approx_ftz(float x) {
    const std::uint32_t bits = detail::bits_as<std::uint32_t>(x);
    if ((bits & 0x7FFFFFFFu) < 0x800000u) return detail::bits_as<float>(0xFF800000u);
    if (bits > 0x7F800000u) return detail::bits_as<float>(0x7FFFFFFFu);
    if (bits == 0x7F800000u) return x;
    if (bits == 0x3F800000u) return 0.0f;

    const std::int64_t whole = static_cast<std::int64_t>(bits >> 23) - 127;
    const std::int64_t sum = (mufu::lg2_sum(bits & 0x7FFFFFu) >> 2) + whole * (std::int64_t{1} << 36);
    // The magnitude has at most 43 bits: a double holds it exactly, and its upper bits are the float wanted, truncated,
    // but for the exponent, from which 36 fraction bits and the difference of the two biases are taken.
    const std::uint64_t wide = detail::bits_as<std::uint64_t>(static_cast<double>(sum < 0 ? ~sum : sum));
    const std::uint32_t result = static_cast<std::uint32_t>(wide >> 29) - ((1023u - 127u + 36u) << 23);
    return detail::bits_as<float>(result | (sum < 0 ? 0x80000000u : 0u));
}

/// lg2.approx.f32: instructions around the unit make subnormal x right (SASS of nvcc 13.0 for sm_90: FSETP.GEU |x|,
/// 2^-126; @!P FMUL x, 2^24; MUFU.LG2; @!P FADD y, -24).
FAULTLINE_HD inline float lg2_approx(float x) {
    const bool small = (x < 0.0f ? -x : x) < 1.17549435082228751e-38f;
    const float y = lg2_approx_ftz(small ? x * 16777216.0f : x);
    return small ? y - 24.0f : y;
}

/// __logf(x) without -ftz: lg2.approx.f32 times ln 2, each rounded to fp32 (SASS of nvcc 13.0 for sm_90).
FAULTLINE_HD inline float logf_fast_cuda(float x) { return lg2_approx(x) * 0.693147182464599609375f; }

}  // namespace faultline
