// SPDX-License-Identifier: Apache-2.0
// The rule by which a matrix unit adds: the one definition that host, device, reference and fast path share.
//
// c + sum a_i b_i is formed in one step (arXiv:2511.10909, arXiv:2512.07004):
//   1. A product has the exponent e(a) + e(b) and the exact significand product, in [1, 4), which is not renormalised.
//      A subnormal number stands at its format's smallest normal exponent, with a significand below 1.
//   2. Every product and c are aligned to the largest of these exponents and truncated toward zero to F fraction bits.
//   3. The aligned integers are added exactly.
//   4. The sum is written to fp32 by truncation, to e8m13 by truncation, or to fp16 by round-to-nearest-even.
// A product of zero takes no part in 1 unless MatrixUnit::zero says so, an accumulator of zero stands at zero_exponent(). A
// sum that is or becomes zero is +0.
// NaN, infinity times zero and infinity minus infinity give the canonical NaN (0x7FFFFFFF in fp32, 0x7FFF in fp16).
//
// Operands are doubles that hold low-precision numbers exactly. The rule is total: operands with up to 53 significant
// bits, which no unit takes but counterfactuals ask for, follow it with their product formed exactly (106 bits).
#pragma once

#include <cstdint>
#include <cstring>

#include <faultline/base/host_device.hpp>
#include <faultline/tensor_core/matrix_unit.hpp>

namespace faultline::fused {

__extension__ using Wide = unsigned __int128;

FAULTLINE_HD inline std::uint64_t bits_of(double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

FAULTLINE_HD inline double from_bits(std::uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

/// 2^e for -1022 <= e <= 1023.
FAULTLINE_HD inline double power_of_two(int e) { return from_bits(static_cast<std::uint64_t>(e + 1023) << 52); }

/// The double whose conversion to fp32 is 0x7FFFFFFF and to fp16 0x7FFF.
FAULTLINE_HD inline double canonical_nan() { return from_bits(0x7FFFFFFFE0000000u); }

FAULTLINE_HD inline bool is_finite(double x) { return (bits_of(x) >> 52 & 0x7FF) != 0x7FF; }

/// Number of bits of x, 0 for 0.
FAULTLINE_HD inline int bit_length(std::uint64_t x) {
    int n = 0;
    for (int step = 32; step > 0; step /= 2) {
        if (x >> step) {
            x >>= step;
            n += step;
        }
    }
    return n + (x != 0 ? 1 : 0);
}

/// Where an accumulator of zero stands: seven below its format's smallest normal exponent, which is -133 in fp32 and -21 in
/// fp16 (measured on an NVIDIA H200; docs/results/tensor-core-rule.md).
FAULTLINE_HD constexpr int zero_exponent(OutputFormat output) { return accumulator_min_exponent(output) - 7; }
static_assert(zero_exponent(OutputFormat::f32_rz) == zero_accumulator_exponent);

/// A finite number as significand * 2^lsb, together with the exponent by which the unit aligns it.
struct Operand {
    std::uint64_t significand = 0;
    int lsb = 0;
    int exponent = 0;
    bool negative = false;
};

/// x taken apart. min_exponent: its format's smallest normal exponent. Zero gets significand 0 at min_exponent.
FAULTLINE_HD inline Operand take_apart(double x, int min_exponent) {
    const std::uint64_t bits = bits_of(x);
    const int field = static_cast<int>(bits >> 52 & 0x7FF);
    const std::uint64_t fraction = bits & 0xFFFFFFFFFFFFFu;
    Operand r;
    r.negative = (bits >> 63) != 0;
    r.significand = field == 0 ? fraction : fraction | 1ull << 52;
    r.lsb = (field == 0 ? 1 : field) - 1075;
    const int leading = r.lsb + bit_length(r.significand) - 1;  // floor(log2 |x|)
    r.exponent = r.significand != 0 && leading > min_exponent ? leading : min_exponent;
    return r;
}

/// x with its significand cut to `fraction_bits` below its exponent; 0 leaves it alone. This is what a tf32 input does to
/// the fp32 number in its register: the low bits are never read, so a NaN all of whose payload lies there is an infinity
/// (measured on an NVIDIA H200). Such a NaN is a signalling one, which conversions between float and double make quiet.
FAULTLINE_HD inline double truncate_input(double x, int fraction_bits, int min_exponent) {
    if (fraction_bits == 0) return x;
    if (!is_finite(x)) return from_bits(bits_of(x) & ~0ull << (fraction_bits < 52 ? 52 - fraction_bits : 0));
    const Operand o = take_apart(x, min_exponent);
    const int drop = o.exponent - fraction_bits - o.lsb;
    if (drop <= 0) return x;
    if (drop >= 53) return 0.0;
    return from_bits(bits_of(x) & ~((1ull << drop) - 1));  // clears stored significand bits: truncation of |x|
}

/// significand * 2^lsb truncated toward zero to a multiple of 2^unit, in that unit. The result is below 2^43.
FAULTLINE_HD inline std::int64_t align(Wide significand, int lsb, int unit, bool negative) {
    const int shift = unit - lsb;
    std::int64_t magnitude = 0;
    if (shift <= 0)
        magnitude = static_cast<std::int64_t>(significand << -shift);
    else if (shift < 128)
        magnitude = static_cast<std::int64_t>(significand >> shift);
    return negative ? -magnitude : magnitude;
}

/// sum * 2^unit (|sum| < 2^62, unit > -300) written in the output format, as a double that holds it exactly.
FAULTLINE_HD inline double write_output(std::int64_t sum, int unit, OutputFormat format) {
    if (sum == 0) return 0.0;
    std::uint64_t magnitude = sum < 0 ? 0 - static_cast<std::uint64_t>(sum) : static_cast<std::uint64_t>(sum);
    const bool half = format == OutputFormat::f16_rne;
    const int fraction_bits = half ? 10 : format == OutputFormat::e8m13_rz ? 13 : 23;
    const int min_exponent = half ? -14 : -126;
    const int overflow_exponent = half ? 16 : 128;
    const int leading = unit + bit_length(magnitude) - 1;
    double r = 0.0;
    if (leading >= overflow_exponent) {
        r = from_bits(0x7FF0000000000000u);
    } else {
        int lsb = (leading > min_exponent ? leading : min_exponent) - fraction_bits;
        const int drop = lsb - unit;
        if (drop <= 0) {
            lsb = unit;
        } else if (drop > 63) {
            magnitude = 0;
        } else {
            const std::uint64_t rest = magnitude & ((1ull << drop) - 1), tie = 1ull << (drop - 1);
            magnitude >>= drop;
            if (half && (rest > tie || (rest == tie && (magnitude & 1) != 0))) ++magnitude;
        }
        if (magnitude == 0) return 0.0;
        r = static_cast<double>(magnitude) * power_of_two(lsb);
        if (half && r >= 65536.0) r = from_bits(0x7FF0000000000000u);
    }
    return sum < 0 ? -r : r;
}

/// One fused add: the unit's value of c + sum over i < count of a(i) * b(i), with count <= unit.terms (missing products
/// are zeros) and a, b callables from int to double. c is what the accumulator register holds. c_zero_exponent: where a c of
/// zero stands, -200 or more; the hardware probe asks for others than the unit's.
template <class A, class B>
FAULTLINE_HD double add(const MatrixUnit& u, const A& a, const B& b, int count, double c, int c_zero_exponent) {
    const auto operand_a = [&](int i) { return truncate_input(a(i), u.input_fraction_bits, u.a_min_exponent); };
    const auto operand_b = [&](int i) { return truncate_input(b(i), u.input_fraction_bits, u.b_min_exponent); };
    bool nan = c != c, positive_infinity = !is_finite(c) && c > 0, negative_infinity = !is_finite(c) && c < 0;
    Operand oc = take_apart(c, accumulator_min_exponent(u.output));
    if (oc.significand == 0) oc.exponent = c_zero_exponent;
    int largest = oc.exponent;
    for (int i = 0; i < count; ++i) {
        const double x = operand_a(i), y = operand_b(i);
        if (!is_finite(x) || !is_finite(y)) {
            if (x != x || y != y || x == 0 || y == 0)
                nan = true;
            else if ((x < 0) == (y < 0))
                positive_infinity = true;
            else
                negative_infinity = true;
            continue;
        }
        if (u.zero == ZeroOperand::ignored && (x == 0 || y == 0)) continue;
        const int ex =
            x == 0 ? zero_operand_exponent(u.zero, u.a_min_exponent) : take_apart(x, u.a_min_exponent).exponent;
        const int ey =
            y == 0 ? zero_operand_exponent(u.zero, u.b_min_exponent) : take_apart(y, u.b_min_exponent).exponent;
        const int e = ex + ey;
        if (e > largest) largest = e;
    }
    if (nan || (positive_infinity && negative_infinity)) return canonical_nan();
    if (positive_infinity || negative_infinity)
        return from_bits(positive_infinity ? 0x7FF0000000000000u : 0xFFF0000000000000u);

    const int unit = largest - u.fraction_bits;
    std::int64_t sum = align(oc.significand, oc.lsb, unit, oc.negative);
    for (int i = 0; i < count; ++i) {
        const Operand x = take_apart(operand_a(i), u.a_min_exponent), y = take_apart(operand_b(i), u.b_min_exponent);
        sum += align(static_cast<Wide>(x.significand) * y.significand, x.lsb + y.lsb, unit, x.negative != y.negative);
    }
    return write_output(sum, unit, u.output);
}

template <class A, class B>
FAULTLINE_HD double add(const MatrixUnit& u, const A& a, const B& b, int count, double c) {
    return add(u, a, b, count, c, zero_exponent(u.output));
}

}  // namespace faultline::fused
