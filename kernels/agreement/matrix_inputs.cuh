// SPDX-License-Identifier: Apache-2.0
// Test inputs as bit patterns: a pure function of (seed, instruction, pattern, tile, position), so that a mismatch can be made
// again, on the host too.
#pragma once

#include <cstdint>

#include <faultline/agreement/matrix_instructions.cuh>
#include <faultline/agreement/matrix_rule.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline::agreement {

/// Sign, fraction and an exponent drawn from [low, high] (clipped to the format), from 64 random bits. One fraction in
/// four is 0 and one in eight all ones: products then sit at the ends of their binade.
__device__ inline std::uint32_t number(const Storage& f, std::uint64_t r, int low, int high) {
    const int smallest = 1 - f.bias(), largest = f.largest_field() - f.bias();
    low = low < smallest ? smallest : low > largest ? largest : low;
    high = high > largest ? largest : high < low ? low : high;
    const auto fraction_mask = (1u << f.fraction_bits) - 1;
    std::uint32_t fraction = static_cast<std::uint32_t>(r) & fraction_mask;
    const std::uint32_t shape = r >> 32 & 7;
    if (shape < 2) fraction = 0;
    if (shape == 2) fraction = fraction_mask;
    const auto exponent = low + static_cast<int>((r >> 36 & 0xFFFF) % static_cast<unsigned>(high - low + 1));
    const auto field = static_cast<std::uint32_t>(exponent + f.bias());
    if (!f.ieee && field == (1u << f.exponent_bits) - 1 && fraction == fraction_mask) fraction &= ~1u;
    const std::uint32_t sign = r >> 63;
    return sign << (f.bits - 1) | field << f.fraction_bits | fraction;
}

/// Any encoding; with finite set, infinities and NaN are moved down one binade.
__device__ inline std::uint32_t any_number(const Storage& f, std::uint64_t r, bool finite) {
    std::uint32_t bits = static_cast<std::uint32_t>(r) & (f.bits == 32 ? ~0u : (1u << f.bits) - 1);
    const std::uint32_t top = ((1u << f.exponent_bits) - 1) << f.fraction_bits;
    if (!finite) return bits;
    if (f.ieee && (bits & top) == top) bits ^= 1u << f.fraction_bits;
    if (!f.ieee && (bits & 0x7F) == 0x7F) bits ^= 1u;
    return bits;
}

/// Infinity, a NaN, zero, or the largest number.
__device__ inline std::uint32_t special(const Storage& f, std::uint64_t r) {
    const std::uint32_t fraction_mask = (1u << f.fraction_bits) - 1, top = ((1u << f.exponent_bits) - 1)
                                                                           << f.fraction_bits;
    const std::uint32_t sign = (r & 1) << (f.bits - 1);
    switch (r >> 1 & 3) {
        case 0:
            return sign | top;  // of e4m3: 256
        case 1:
            return sign | top | (static_cast<std::uint32_t>(r >> 3) & fraction_mask);
        case 2:
            return sign;
        default:
            return sign | (f.ieee ? top - 1 : top | (fraction_mask - 1));
    }
}

/// All exponent bits set and at most two fraction bits: an infinity, or a NaN with a small payload (of e4m3: 256 to NaN).
__device__ inline std::uint32_t payload(const Storage& f, std::uint64_t r) {
    const std::uint32_t sign = (r & 1) << (f.bits - 1), top = ((1u << f.exponent_bits) - 1) << f.fraction_bits;
    const auto position = [&](int at) {
        return static_cast<int>((r >> at & 0xFFFF) % static_cast<unsigned>(f.fraction_bits));
    };
    const std::uint32_t one = r >> 1 & 3 ? 1u << position(8) : 0u, two = r >> 3 & 1 ? 1u << position(24) : 0u;
    return sign | top | one | two;
}

/// Element of A (which = 0, line = row) or B (which = 1, line = column) at depth k of a tile of depth `depth`.
__device__ inline std::uint32_t element(const Storage& f, Pattern pattern, const RandomStream& tile, int which,
                                        int line, int k, int depth) {
    const auto at = [&](int depth_index) {
        return tile.bits(static_cast<std::uint64_t>((which * 64 + line) * 64 + depth_index));
    };
    const std::uint64_t r = at(k), common = tile.bits(1u << 20);
    const int largest = f.largest_field() - f.bias(), smallest = 1 - f.bias();
    const std::uint32_t sign = r >> 63 << (f.bits - 1);
    switch (pattern) {
        case Pattern::any_bits:
            return any_number(f, r, false);
        case Pattern::finite_bits:
            return any_number(f, r, true);
        case Pattern::attention:
            return number(f, r, -4, 1);
        case Pattern::wide:
            return number(f, r, -20, 20);
        case Pattern::cancelling: {
            if (k == depth - 1) return number(f, r, -24, -4);
            if (k < depth / 2) return number(f, r, -3, 3);
            const std::uint32_t first = number(f, at(k - depth / 2), -3, 3);
            return which == 0 ? first ^ 1u << (f.bits - 1) : first;
        }
        case Pattern::subnormals:
            if (r >> 40 & 1) return sign | (static_cast<std::uint32_t>(r) & ((1u << f.fraction_bits) - 1));
            return number(f, r, largest - 4 - static_cast<int>(common % 100), largest);
        case Pattern::zeros:
            // The zero's partner stands at the same k of the other matrix and is large where this element says "large".
            if ((r >> 40 & 3) != 0) return sign;
            return r >> 42 & 1 ? number(f, r, largest - 2, largest) : number(f, r, smallest, smallest + 12);
        case Pattern::c_dominates:
            return number(f, r, -6, 0);
        case Pattern::c_tiny:
            return number(f, r, -3, 3);
        case Pattern::range_ends: {
            // Exponents of A and B near x and y with x + y near 128 or at -120 to -163, where the format reaches that.
            const int target =
                common & 1 ? 124 + static_cast<int>(common >> 8 & 3) : -120 - static_cast<int>((common >> 8) % 44);
            const int x = target / 2 + static_cast<int>((common >> 16) % 41) - 20;
            const int centre = which == 0 ? x : target - x;
            return number(f, r, centre - 3, centre);
        }
        case Pattern::specials:
            return r % 61 == 0 ? special(f, r >> 8) : number(f, r, -4, 4);
        case Pattern::underflow: {
            // The largest product of the tile at 2^-119 to 2^-152, the others up to 2^12 below.
            const int target = -119 - static_cast<int>((common >> 8) % 34);
            const int x = target / 2 + static_cast<int>((common >> 16) % 41) - 20;
            const int centre = which == 0 ? x : target - x;
            return number(f, r, centre - 6, centre);
        }
        case Pattern::payloads: {
            if (r % 29 == 0) return payload(f, r >> 8);
            return r % 29 == 1 ? sign : number(f, r, -4, 4);
        }
        case Pattern::half_ties: {
            // k = 0: 2^-25 times 1 or 3. k = 1 and 2: two products that undo each other, at 2^-28 to 2^-15, which the
            // alignment sees. The others: products of up to 7 by 7 units of the smallest subnormal, of fp16 2^-48 each,
            // among them zeros.
            const auto power = [&](int e) {
                e = e < smallest ? smallest : e > largest ? largest : e;
                return static_cast<std::uint32_t>(e + f.bias()) << f.fraction_bits;
            };
            const std::uint32_t one_and_a_half = which == 0 && (r >> 40 & 1) ? 1u << (f.fraction_bits - 1) : 0u;
            const int all = -28 + static_cast<int>((common >> 16) % 14);
            const int lower = -14 + static_cast<int>((common >> 8 & 0xFF) % static_cast<unsigned>(all + 29));
            if (k == 0) return sign | power(which == 0 ? -13 + (one_and_a_half != 0 ? 1 : 0) : -12) | one_and_a_half;
            if (k == 1) return power(which == 0 ? lower : all - lower);
            if (k == 2) return power(which == 0 ? lower : all - lower) | (which == 0 ? 1u << (f.bits - 1) : 0u);
            return sign | static_cast<std::uint32_t>((r >> 8) % 8);
        }
        case Pattern::count:
            break;
    }
    return 0;
}

/// Starting value of C (fp32 or fp16 bits). first_product: a(i, 0) * b(0, j) as an exact double where it is finite.
__device__ inline std::uint32_t accumulator(const Storage& f, Pattern pattern, const RandomStream& tile, int row,
                                            int col, double first_product) {
    const std::uint64_t r = tile.bits((1u << 19) + static_cast<std::uint64_t>(row * 8 + col));
    const std::uint32_t sign = r >> 63 << (f.bits - 1),
                        fraction = static_cast<std::uint32_t>(r) & ((1u << f.fraction_bits) - 1);
    switch (pattern) {
        case Pattern::any_bits:
            return any_number(f, r, false);
        case Pattern::finite_bits:
            return r >> 40 & 1 ? any_number(f, r, true) : number(f, r, -12, 12);
        case Pattern::attention:
            return r >> 40 & 1 ? number(f, r, -3, 4) : sign;
        case Pattern::wide:
            return number(f, r, -40, 40);
        case Pattern::cancelling:
            if (r >> 40 & 1) return r >> 41 & 1 ? number(f, r, -40, 0) : 0u;
            return f.bits == 32 ? __float_as_uint(static_cast<float>(-first_product)) : number(f, r, -3, 6);
        case Pattern::subnormals:
            return r >> 40 & 1 ? number(f, r, -130, 20) : sign | fraction;
        case Pattern::zeros:
            return r >> 40 & 1 ? sign : number(f, r, -126, -10);
        case Pattern::c_dominates:
            return number(f, r, 1, 32);
        case Pattern::c_tiny:
            return r >> 40 & 1 ? number(f, r, -40, -3) : r >> 41 & 1 ? sign | fraction : sign;
        case Pattern::range_ends: {
            const int largest = f.largest_field() - f.bias();
            switch (r >> 40 & 3) {
                case 0:
                    return number(f, r, largest - 2, largest);
                case 1:
                    return number(f, r, -126, -118);
                case 2:
                    return sign | fraction;
                default:
                    return sign;
            }
        }
        case Pattern::specials:
            return r % 37 == 0 ? special(f, r >> 8) : number(f, r, -4, 6);
        case Pattern::underflow:
            if ((r >> 40 & 3) != 0) return sign;
            return r >> 42 & 1 ? sign | fraction : number(f, r, -126, -122);
        case Pattern::payloads:
            return r % 37 == 0 ? payload(f, r >> 8) : number(f, r, -4, 6);
        case Pattern::half_ties:
            if ((r >> 40 & 7) != 0) return sign;
            return r >> 43 & 1 ? sign | (static_cast<std::uint32_t>(r) & 7) : number(f, r, -24, -10);
        case Pattern::count:
            break;
    }
    return 0;
}

/// The number that an encoding stands for. A NaN keeps its payload: what tf32 reads of it decides what it is.
__device__ inline double decode(const Storage& f, std::uint32_t bits) {
    const std::uint32_t fraction = bits & ((1u << f.fraction_bits) - 1);
    const int field = static_cast<int>(bits >> f.fraction_bits & ((1u << f.exponent_bits) - 1));
    const bool top = field == (1 << f.exponent_bits) - 1;
    double r;
    if (f.ieee && top)
        r = __longlong_as_double(0x7FF0000000000000ll | static_cast<long long>(fraction) << (52 - f.fraction_bits));
    else if (top && fraction == (1u << f.fraction_bits) - 1)
        r = __longlong_as_double(0x7FFFFFFFE0000000ll);
    else
        r = ldexp(static_cast<double>(field == 0 ? fraction : fraction | 1u << f.fraction_bits),
                  (field == 0 ? 1 : field) - f.bias() - f.fraction_bits);
    return __longlong_as_double(__double_as_longlong(r) | static_cast<long long>(bits >> (f.bits - 1) & 1) << 63);
}

}  // namespace faultline::agreement
