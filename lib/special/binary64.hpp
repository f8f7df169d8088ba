// SPDX-License-Identifier: Apache-2.0
// exp, exp2, log and tanh in binary64, of additions, multiplications and integer operations alone: the same bits on every
// processor, with every C library and on a CUDA device (compiled without contraction: -ffp-contract=off, -fmad=false). The
// C library's are neither: glibc picks another one where the processor has FMA. A kernel's own function is emulated by
// rounding these to the site's format, which is the correctly rounded value but where the exact one lies within their error
// of a tie: for fp32, one argument in 2^28.
//
// Method: Cody and Waite's reduction with a two-part ln 2, Taylor's polynomial for the exponential, the atanh series for
// the logarithm. Errors (tests/lib/special/binary64_test.cpp measures them against MPFR): exp and exp2 below 1.25 ulp, log
// below 2 ulp, tanh below 3 ulp.
#pragma once

#include <cstdint>
#include <cstring>

#include <faultline/base/host_device.hpp>

namespace faultline::binary64_functions {

namespace detail {

FAULTLINE_HD inline double from_bits(std::uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
FAULTLINE_HD inline std::uint64_t bits_of(double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline constexpr double to_whole = 0x1.8p52;  ///< x + it - it is x rounded to a whole number, |x| < 2^51
inline constexpr double ln2 = 0x1.62e42fefa39efp-1;
inline constexpr double ln2_high = 0x1.62e42feep-1;  ///< 32 bits: times a whole number below 2^21 it is exact
inline constexpr double ln2_low = 0x1.a39ef35793c76p-33;

/// e^r - 1, |r| <= ln2/2. The remainder of the polynomial is below (ln2/2)^14 / 14! = 2^-57.
FAULTLINE_HD inline double exp_minus_one(double r) {
    double sum = r * (1.0 / 6227020800) + 1.0 / 479001600;
    sum = sum * r + 1.0 / 39916800;
    sum = sum * r + 1.0 / 3628800;
    sum = sum * r + 1.0 / 362880;
    sum = sum * r + 1.0 / 40320;
    sum = sum * r + 1.0 / 5040;
    sum = sum * r + 1.0 / 720;
    sum = sum * r + 1.0 / 120;
    sum = sum * r + 1.0 / 24;
    sum = sum * r + 1.0 / 6;
    sum = sum * r + 0.5;
    return (sum * r) * r + r;
}

/// e^r 2^n, |r| <= ln2/2, `shifted` = n + to_whole, |n| < 2000.
FAULTLINE_HD inline double scaled_exp(double r, double shifted) {
    const double sum = exp_minus_one(r) + 1.0;
    // 2^n as two factors, n reaching beyond the exponents of normal numbers on both sides; unsigned, since processors
    // without AVX-512 have no arithmetic shift of 64-bit vectors.
    const std::uint64_t n = bits_of(shifted) - bits_of(to_whole);
    const std::uint64_t half = ((n + 4096) >> 1) - 2048;
    return sum * from_bits((half + 1023) << 52) * from_bits((n - half + 1023) << 52);
}

}  // namespace detail

/// 2^x for any x; NaN for NaN.
[[nodiscard]] FAULTLINE_HD inline double exp2(double x) {
    constexpr double lowest = -1080, highest = 1024;  // 2^-1080 rounds to 0
    double clamped = x < lowest ? lowest : x;
    clamped = clamped > highest ? highest : clamped;
    const double shifted = clamped + detail::to_whole;
    const double r = clamped - (shifted - detail::to_whole);  // exact
    const double value = detail::scaled_exp(r * detail::ln2, shifted);
    return x < lowest ? 0.0 : value;
}

/// e^x for any x; NaN for NaN.
[[nodiscard]] FAULTLINE_HD inline double exp(double x) {
    constexpr double lowest = -750, highest = 710;  // e^-750 rounds to 0, e^710 overflows
    double clamped = x < lowest ? lowest : x;
    clamped = clamped > highest ? highest : clamped;
    const double shifted = clamped * 0x1.71547652b82fep0 + detail::to_whole;
    const double n = shifted - detail::to_whole;
    const double r = (clamped - n * detail::ln2_high) - n * detail::ln2_low;
    const double value = detail::scaled_exp(r, shifted);
    return x < lowest ? 0.0 : value;
}

/// tanh x for any x; NaN for NaN. As (e^2|x| - 1) / (e^2|x| + 1).
[[nodiscard]] FAULTLINE_HD inline double tanh(double x) {
    constexpr double highest = 44;  // 1 - tanh 22 is below 2^-62
    const std::uint64_t sign = detail::bits_of(x) & 0x8000000000000000u;
    double twice = detail::from_bits(detail::bits_of(x) ^ sign) * 2.0;
    twice = twice > highest ? highest : twice;
    const double shifted = twice * 0x1.71547652b82fep0 + detail::to_whole;
    const double n = shifted - detail::to_whole;
    const double r = (twice - n * detail::ln2_high) - n * detail::ln2_low;
    const double power = detail::from_bits((detail::bits_of(shifted) - detail::bits_of(detail::to_whole) + 1023) << 52);
    // n = 0 leaves the small e^r - 1 as it is; beyond, nothing cancels: 2^n - 1 is at least 1 and 2^n (e^r - 1) above -0.6.
    const double t = power * detail::exp_minus_one(r) + (power - 1.0);
    return detail::from_bits(detail::bits_of(t / (t + 2.0)) | sign);
}

/// ln x: -inf for 0, NaN below 0 and for NaN.
[[nodiscard]] FAULTLINE_HD inline double log(double x) {
    std::uint64_t bits = detail::bits_of(x);
    if ((bits << 1) == 0) return detail::from_bits(0xFFF0000000000000u);
    if (x != x || x < 0) return detail::from_bits(0x7FF8000000000000u);
    if (bits == 0x7FF0000000000000u) return x;
    int exponent = -1023;
    if (bits >> 52 == 0) {
        bits = detail::bits_of(x * 0x1p54);
        exponent -= 54;
    }
    exponent += static_cast<int>(bits >> 52);
    double m = detail::from_bits((bits & 0xFFFFFFFFFFFFFu) | 0x3FF0000000000000u);  // [1, 2)
    if (m > 1.41421356237309504880) {
        m = m * 0.5;
        ++exponent;
    }
    // ln m = 2 atanh(s), s = (m - 1)/(m + 1), |s| < 0.1716: s^2 < 0.0295, and its 11th power is below 2^-55.
    const double f = m - 1.0;  // exact
    const double s = f / (2.0 + f);
    const double z = s * s;
    double sum = 2.0 / 23;
    sum = sum * z + 2.0 / 21;
    sum = sum * z + 2.0 / 19;
    sum = sum * z + 2.0 / 17;
    sum = sum * z + 2.0 / 15;
    sum = sum * z + 2.0 / 13;
    sum = sum * z + 2.0 / 11;
    sum = sum * z + 2.0 / 9;
    sum = sum * z + 2.0 / 7;
    sum = sum * z + 2.0 / 5;
    sum = sum * z + 2.0 / 3;
    // 2 s = f - s f, and ln m = f - s (f - z sum): the first term exact, the rest at most a sixth of it.
    const double small = s * (f - z * sum);
    const double n = exponent;
    if (exponent == 0) return f - small;
    return n * detail::ln2_high + (f - (small - n * detail::ln2_low));
}

}  // namespace faultline::binary64_functions
