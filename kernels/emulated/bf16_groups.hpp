// SPDX-License-Identifier: Apache-2.0
// Fused adds of eight products of bf16 with 24 fraction bits (Ampere's mma.sync, fused_add.hpp) in a thread's registers, for
// operands that stand side by side as bf16: product_unit.hpp in integers of 32 bits. |a b| + A rounded toward zero, A = 2^(u+52),
// has in its lower half the product cut to a multiple of 2^u, which is below 2^26; eight of them and c stay below 2^30.
#pragma once

#include <cstdint>

#include <faultline/emulated/product_unit.hpp>

namespace faultline::emulated::groups {

inline constexpr int terms = 8, fraction_bits = 24, rows = 4;
/// Operands below 2^21; and of a sum whose largest exponent is not between, nothing is decided: a zero counts as 2^-127 here,
/// whose products with such operands lie below 2^-105 and vanish.
inline constexpr int largest_operand = 20, least_exponent = -80, largest_exponent = 100;

/// Whether a pair of numbers of bf16 are below 2^(largest_operand + 1).
FAULTLINE_HD inline bool are_operands(std::uint32_t pair) {
    constexpr std::uint32_t beyond = static_cast<std::uint32_t>(largest_operand + 1 + 127) << 7;
    return (pair & 0x7FFFu) < beyond && (pair >> 16 & 0x7FFFu) < beyond;
}
/// |x| as the upper half of a double, of bf16 in the lower, and in the upper half of a pair.
FAULTLINE_HD inline std::uint32_t low_magnitude(std::uint32_t pair) {
    return ((pair & 0x7FFFu) << 13) + (std::uint32_t{1023 - 127} << 20);
}
FAULTLINE_HD inline std::uint32_t high_magnitude(std::uint32_t pair) {
    return ((pair & 0x7FFF0000u) >> 3) + (std::uint32_t{1023 - 127} << 20);
}
/// 0 or -1.
FAULTLINE_HD inline std::int32_t low_sign(std::uint32_t pair) { return static_cast<std::int32_t>(pair << 16) >> 31; }
FAULTLINE_HD inline std::int32_t high_sign(std::uint32_t pair) { return static_cast<std::int32_t>(pair) >> 31; }

/// |x y| / 2^u cut, `anchor` the upper half of 2^(u+52).
FAULTLINE_HD inline std::int32_t cut_product(std::uint32_t x, std::uint32_t y, std::uint32_t anchor) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(fused::bits_of(
        product::anchored(product::from_upper(x), product::from_upper(y), product::from_upper(anchor)))));
}
FAULTLINE_HD inline float float_toward_zero(std::int32_t x) {
#if defined(__CUDA_ARCH__)
    return __int2float_rz(x);
#else
    return static_cast<float>(fused::detail::fp32_toward_zero(static_cast<double>(x)));
#endif
}
FAULTLINE_HD inline std::uint32_t bits_of(float x) { return faultline::detail::bits_as<std::uint32_t>(x); }

/// c[n][e] += the sum over t < 8 of x(e, t) y(t, n), fused, for 4 rows e and `columns` columns n. x(e, i): terms 2i and 2i + 1 of a
/// row, y(t, m): columns 2m and 2m + 1 of a term, the first in the lower half. Returns a bit, 4 n + e, for each c that is left
/// as it was because its largest exponent is not between the limits above.
template <int columns, class X, class Y>
FAULTLINE_HD inline std::uint32_t add(float (&c)[columns][rows], const X& x, const Y& y) {
    std::uint32_t largest[columns / 2][rows] = {};
    FAULTLINE_HD_UNROLL
    for (int t = 0; t < terms; ++t) {
        std::uint32_t xe[rows];
        FAULTLINE_HD_UNROLL
        for (int e = 0; e < rows; ++e) xe[e] = (x(e, t / 2) >> (t % 2 == 0 ? 7 : 23) & 0xFFu) * 0x10001u;
        FAULTLINE_HD_UNROLL
        for (int m = 0; m < columns / 2; ++m) {
            const std::uint32_t ye = y(t, m) >> 7 & 0x00FF00FFu;
            FAULTLINE_HD_UNROLL
            for (int e = 0; e < rows; ++e) largest[m][e] = product::larger_sums(xe[e], ye, largest[m][e]);
        }
    }
    std::uint32_t anchor[columns][rows], undecided = 0;
    std::int32_t sum[columns][rows];
    FAULTLINE_HD_UNROLL
    for (int n = 0; n < columns; ++n) {
        FAULTLINE_HD_UNROLL
        for (int e = 0; e < rows; ++e) {
            const std::uint32_t bits = bits_of(c[n][e]);
            const int of_c = static_cast<int>(bits >> 23 & 0xFF) - 127;
            const int of_products = static_cast<int>(largest[n / 2][e] >> 16 * (n % 2) & 0xFFFFu) - 254;
            const int exponent = of_products > of_c ? of_products : of_c;
            if (exponent <= least_exponent || exponent > largest_exponent) undecided |= 1u << (rows * n + e);
            anchor[n][e] = static_cast<std::uint32_t>(exponent - fraction_bits + 52 + 1023) << 20;
            const int shift = exponent - of_c < 31 ? exponent - of_c : 31;
            const auto magnitude = static_cast<std::int32_t>((((bits & 0x7FFFFFu) | 0x800000u) << 1) >> shift);
            sum[n][e] = static_cast<std::int32_t>(bits) < 0 ? -magnitude : magnitude;
        }
    }
    FAULTLINE_HD_UNROLL
    for (int t = 0; t < terms; ++t) {
        std::uint32_t xm[rows];
        std::int32_t xs[rows];
        FAULTLINE_HD_UNROLL
        for (int e = 0; e < rows; ++e) {
            const std::uint32_t pair = x(e, t / 2);
            xm[e] = t % 2 == 0 ? low_magnitude(pair) : high_magnitude(pair);
            xs[e] = t % 2 == 0 ? low_sign(pair) : high_sign(pair);
        }
        FAULTLINE_HD_UNROLL
        for (int n = 0; n < columns; ++n) {
            const std::uint32_t pair = y(t, n / 2);
            const std::uint32_t ym = n % 2 == 0 ? low_magnitude(pair) : high_magnitude(pair);
            const std::int32_t ys = n % 2 == 0 ? low_sign(pair) : high_sign(pair);
            FAULTLINE_HD_UNROLL
            for (int e = 0; e < rows; ++e) sum[n][e] += cut_product(xm[e], ym, anchor[n][e]) * ((xs[e] ^ ys) | 1);
        }
    }
    FAULTLINE_HD_UNROLL
    for (int n = 0; n < columns; ++n) {
        FAULTLINE_HD_UNROLL
        for (int e = 0; e < rows; ++e) {
            if ((undecided >> (rows * n + e) & 1) != 0) continue;
            // The exponent of the sum's unit, as a float: that of the anchor less 52.
            const std::uint32_t unit = ((anchor[n][e] >> 20) - (1023 + 52) + 127) << 23;
            c[n][e] = float_toward_zero(sum[n][e]) * faultline::detail::bits_as<float>(unit);
        }
    }
    return undecided;
}

/// Whether all products of eight terms are zeros, so that c is their sum: what an undecided one is asked. x: a row's terms, y:
/// a column's, `y_step` numbers from one to the next.
FAULTLINE_HD_CALLED inline bool vanish(const std::uint16_t* x, const std::uint16_t* y, int y_step) {
    for (int t = 0; t < terms; ++t)
        if ((x[t] & 0x7FFF) != 0 && (y[t * y_step] & 0x7FFF) != 0) return false;
    return true;
}

}  // namespace faultline::emulated::groups
