// SPDX-License-Identifier: Apache-2.0
// Fused adds of eight products of bf16 with 24 fraction bits (Ampere's mma.sync, fused_add.hpp) by a unit that adds sixteen with
// 25 (Hopper's): eight of its sixteen take part, and among the others are A and -A, an anchor twice as large as the largest
// exponent of the eight and c. With it the unit cuts every product and c one bit further up, which is 24 below their largest,
// and then A - A is nothing. Which anchor each element of a product needs is integer arithmetic, two 16-bit halves at once.
#pragma once

#include <cstdint>

#include <faultline/base/host_device.hpp>

namespace faultline::emulated::groups {

inline constexpr int terms = 8, fraction_bits = 24, unit_fraction_bits = 25;
/// The fused adds of Hopper's e4m3 are had the same way, four times eight products with an anchor of 12 more: what each leaves is a
/// multiple of the unit of the cut, which 24 bits hold. Subnormal numbers stand at the least exponent of e4m3.
inline constexpr int narrow_fraction_bits = 13, narrow_min_exponent = -6;
/// Operands below 2^21. A zero counts as 2^-127, whose products with such operands lie below 2^-105; whether a sum whose largest
/// exponent is below that of least_anchor, 2^-100, is of zeros is the caller's to find out (are_decided()).
inline constexpr int largest_operand = 20, least_exponent = -100;
/// Two exponents, biased as bf16's, in its place.
inline constexpr std::uint32_t exponent_fields = 0x7F807F80u, bias = 127u << 7, both_biases = bias * 0x10001u;
inline constexpr std::uint32_t least_anchor = static_cast<std::uint32_t>(least_exponent + 1 + 127) << 7;

/// Whether a pair of numbers of bf16 are below 2^(largest_operand + 1).
FAULTLINE_HD inline bool are_operands(std::uint32_t pair) {
    constexpr std::uint32_t beyond = static_cast<std::uint32_t>(largest_operand + 1 + 127) << 7;
    return (pair & 0x7FFFu) < beyond && (pair >> 16 & 0x7FFFu) < beyond;
}
FAULTLINE_HD inline std::uint32_t exponents(std::uint32_t pair) { return pair & exponent_fields; }
FAULTLINE_HD inline std::uint32_t magnitudes(std::uint32_t pair) { return pair & 0x7FFF7FFFu; }

/// Whether a sum may begin with c: then none is too large for an anchor, and one that is below all anchors but zero is a multiple
/// of 2^-130, which every anchor keeps.
FAULTLINE_HD inline bool can_begin(float c) {
    const float size = c < 0 ? -c : c;
    return c == 0 || (size >= 0x1p-100f && size <= 0x1p60f);
}

/// max(so_far, x + y) in both halves, without signs. The sum of an exponent and a magnitude has the sum of the exponents in its
/// upper bits, and so has the largest of them.
FAULTLINE_HD inline std::uint32_t larger_sums(std::uint32_t x, std::uint32_t y, std::uint32_t so_far) {
#if defined(__CUDA_ARCH__)
    return __viaddmax_u16x2(x, y, so_far);
#else
    std::uint32_t r = 0;
    for (int half = 0; half < 32; half += 16) {
        const std::uint32_t sum = (x >> half & 0xFFFFu) + (y >> half & 0xFFFFu), old = so_far >> half & 0xFFFFu;
        r |= (sum > old ? sum : old) << half;
    }
    return r;
#endif
}

/// exponents() of a rule whose subnormal numbers stand at narrow_min_exponent.
FAULTLINE_HD inline std::uint32_t narrow_exponents(std::uint32_t pair) {
    constexpr std::uint32_t least = static_cast<std::uint32_t>(narrow_min_exponent + 127) << 7;
    std::uint32_t r = 0;
    for (int half = 0; half < 32; half += 16) {
        const std::uint32_t magnitude = pair >> half & 0x7FFFu, exponent = magnitude & 0x7F80u;
        r |= (magnitude == 0 ? 0u : exponent > least ? exponent : least) << half;
    }
    return r;
}
/// The anchors of two elements as bf16: of the largest sums of their products' exponents (larger_sums()), and of c, of which the
/// upper halves of two floats are a pair; for a rule with so many fraction bits.
FAULTLINE_HD inline std::uint32_t anchors(std::uint32_t products, std::uint32_t c, int bits = fraction_bits) {
    // Products have two biases, and an anchor is above them by the bits that the unit has more.
    const std::uint32_t less = (bias - (static_cast<std::uint32_t>(unit_fraction_bits - bits) << 7)) * 0x10001u;
    return (larger_sums(exponents(c), both_biases, products) & 0xFF80FF80u) - less;
}
/// Whether one of two anchors is below least_anchor.
FAULTLINE_HD inline bool are_low(std::uint32_t anchors) {
    return anchors >> 16 < least_anchor || (anchors & 0xFFFFu) < least_anchor;
}

/// Whether the anchor is that of the products, whatever c is: all of eight terms are zeros, or the largest exponent of one that is
/// not is no less than least_exponent. x: a row's terms, y: a column's, `y_step` numbers from one to the next.
FAULTLINE_HD_CALLED inline bool are_decided(const std::uint16_t* x, const std::uint16_t* y, int y_step) {
    bool zeros = true;
    for (int t = 0; t < terms; ++t) {
        const int of_x = x[t] & 0x7FFF, of_y = y[t * y_step] & 0x7FFF;
        if (of_x == 0 || of_y == 0) continue;
        if ((of_x >> 7) + (of_y >> 7) - 2 * 127 >= least_exponent) return true;
        zeros = false;
    }
    return zeros;
}

}  // namespace faultline::emulated::groups
