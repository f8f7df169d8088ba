// SPDX-License-Identifier: Apache-2.0
// exp2 as FlashAttention-4 computes it where it spares the special-function unit: floor by an addition that rounds down,
// then a polynomial of degree 3 in the fraction with fp32 fmas, then the exponent added to the bits (flash_attn/cute/utils.py,
// POLY_EX2 and ex2_emulation; coefficients by Sollya for the least relative error on [0, 1)). Relative error below 8.8e-5
// (the test sweeps it), of one sign pattern in the fraction: 2^-13.5, a thirtieth of bf16's half ulp.
#pragma once

#include <cmath>
#include <cstdint>

#include <faultline/base/host_device.hpp>
#include <faultline/random/bits_as.hpp>

namespace faultline {

/// 2^x for x <= 127; below -127 (and at -inf) 0 or a subnormal, as the kernel's integer addition leaves it. NaN gives the
/// value at -127, since the kernel's max drops it.
[[nodiscard]] FAULTLINE_HD inline float exp2_polynomial(float x) {
    const float clamped = fmaxf(x, -127.0f);
    const float whole = floorf(clamped);  // what adding 2^23 + 2^22 rounding down, and subtracting it, leaves
    const float fraction = clamped - whole;
    float p = fmaf(fraction, 0.077119089663028717041015625f, 0.227564394474029541015625f);
    p = fmaf(p, fraction, 0.695146143436431884765625f);
    p = fmaf(p, fraction, 1.0f);
    const auto exponent = static_cast<std::uint32_t>(static_cast<std::int32_t>(whole)) << 23;
    return detail::bits_as<float>(detail::bits_as<std::uint32_t>(p) + exponent);
}

}  // namespace faultline
