// SPDX-License-Identifier: Apache-2.0
// The matrix units' rule (fused_add.hpp) by floating-point operations, for a thread of a device that has directed rounding
// and no fast shifts of 128 bits. It is fused_fast.cpp's wide path, element by element: with the unit 2^u of the aligned sum,
//   - a product rounded toward zero to binary64 truncates to the same multiple of 2^u as the exact one, since 2^u is at least
//     2^(E-40) for the largest exponent E and binary64's spacing there at most 2^(E-51);
//   - x + 2^(u+52), toward zero and with x's sign on both, has no room for anything below 2^u;
//   - the sum of the multiples has fewer than 53 bits (1024 products of F + 2 <= 42 bits).
// Infinities, NaN and exponents that could leave binary64's range take fused::add. The host has the same functions, with
// directed rounding made of the error of rounding to nearest, so that tests without a device judge what a device runs.
#pragma once

#include <cmath>
#include <cstdint>

#include <faultline/tensor_core/fused_add.hpp>

namespace faultline::fused {

namespace detail {

/// |x| one step smaller.
FAULTLINE_HD inline double toward_zero(double x) { return from_bits(bits_of(x) - 1); }

/// a b toward zero; what underflows may be either neighbour, and is far below any unit.
FAULTLINE_HD inline double product_toward_zero(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dmul_rz(a, b);
#else
    const double p = a * b;
    constexpr std::uint64_t low27 = (1u << 27) - 1;
    if (((bits_of(a) | bits_of(b)) & low27) == 0) return p;  // 26 bits each: exact
    const double error = std::fma(a, b, -p);
    return (error < 0 && p > 0) || (error > 0 && p < 0) ? toward_zero(p) : p;
#endif
}

/// x + anchor toward zero, |anchor| > |x|, both of one sign.
FAULTLINE_HD inline double sum_toward_zero(double x, double anchor) {
#if defined(__CUDA_ARCH__)
    return __dadd_rz(x, anchor);
#else
    const double sum = x + anchor, error = x - (sum - anchor);
    return (error < 0 && sum > 0) || (error > 0 && sum < 0) ? toward_zero(sum) : sum;
#endif
}

/// |x| < 2^128, as fp32, toward zero.
FAULTLINE_HD inline double fp32_toward_zero(double x) {
#if defined(__CUDA_ARCH__)
    return static_cast<double>(__double2float_rz(x));
#else
    const float nearest = static_cast<float>(x);
    const double value = static_cast<double>(nearest);
    if (std::fabs(value) <= std::fabs(x)) return value;
    return static_cast<double>(std::nextafterf(nearest, 0.0f));
#endif
}

FAULTLINE_HD inline double with_sign_of(double magnitude, double sign) {
    return from_bits(bits_of(magnitude) | (bits_of(sign) & 0x8000000000000000u));
}

/// Past this exponent of a product fused::add decides.
inline constexpr int huge_exponent = 500;

/// The exponent by which a unit aligns x, not 0; of what is not finite one that is huge.
FAULTLINE_HD inline int exponent_of(double x, int min_exponent, int of_zero) {
    const std::uint64_t bits = bits_of(x);
    const int field = static_cast<int>(bits >> 52 & 0x7FF);
    if (field == 0x7FF) return 1 << 20;
    if ((bits << 1) == 0) return of_zero;
    return field - 1023 > min_exponent ? field - 1023 : min_exponent;
}

// Exponent fields where they stand in the upper half of a double: maxima and sums of them need no shift.
inline constexpr std::uint32_t field_mask = 0x7FF00000u, magnitude_mask = 0x7FFFFFFFu;
FAULTLINE_HD inline std::uint32_t upper_half(double x) { return static_cast<std::uint32_t>(bits_of(x) >> 32); }
FAULTLINE_HD inline std::uint32_t larger(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }

template <class A, class B>
FAULTLINE_HD_CALLED double add_in_general(const MatrixUnit& u, const A& a, const B& b, int count, double c) {
    return add(u, a, b, count, c);
}

FAULTLINE_HD_CALLED inline double written_in_general(double sum, int unit, OutputFormat format) {
    if (sum == 0) return 0.0;
    if (format != OutputFormat::f32_rz)
        return write_output(static_cast<std::int64_t>(sum * power_of_two(-unit)), unit, format);
    if (std::fabs(sum) >= 0x1p128) return with_sign_of(from_bits(0x7FF0000000000000u), sum);
    const double r = fp32_toward_zero(sum);
    return r == 0 ? 0.0 : r;
}
/// The sum in the output format by clearing the bits that it has no place for; false, where that is neither 0 nor a normal
/// fp32 number, or the format rounds. A sum whose upper half is 0 is 0: no unit is as small as 2^-1022.
FAULTLINE_HD inline bool written_as_normal(double sum, OutputFormat format, double& result) {
    constexpr std::uint32_t smallest_normal = (1023u - 126) << 20, overflow = (1023u + 128) << 20;
    const std::uint32_t magnitude = upper_half(sum) & magnitude_mask;
    const std::uint64_t kept = bits_of(sum) & ~std::uint64_t{0} << (format == OutputFormat::f32_rz ? 52 - 23 : 52 - 13);
    result = from_bits(magnitude == 0 ? 0 : kept);
    return magnitude == 0 ||
           (format != OutputFormat::f16_rne && magnitude - smallest_normal < overflow - smallest_normal);
}
/// The sum, a multiple of 2^unit, in the output format: write_output().
FAULTLINE_HD inline double written(double sum, int unit, OutputFormat format) {
    double result;
    return written_as_normal(sum, format, result) ? result : written_in_general(sum, unit, format);
}

/// At most `terms` products, which stay in registers between the search for the largest exponent and the sum.
template <int terms, class A, class B>
FAULTLINE_HD double add_by_floats(const MatrixUnit& u, const A& a, const B& b, int count, double c) {
    if (u.zero != ZeroOperand::ignored) return add_in_general(u, a, b, count, c);
    const auto min_a = static_cast<std::uint32_t>(u.a_min_exponent + 1023) << 20;
    const auto min_b = static_cast<std::uint32_t>(u.b_min_exponent + 1023) << 20;
    std::uint32_t sums = 0, magnitudes = 0;  // the largest sum of two fields, and upper half of a product
    double product[terms];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < terms; ++i) {
        product[i] = 0;
        if (i < count) {
            double x = a(i), y = b(i);
            if (u.input_fraction_bits != 0) {
                x = truncate_input(x, u.input_fraction_bits, u.a_min_exponent);
                y = truncate_input(y, u.input_fraction_bits, u.b_min_exponent);
            }
            product[i] = product_toward_zero(x, y);
            const std::uint32_t magnitude = upper_half(product[i]) & magnitude_mask;
            const std::uint32_t sum =
                larger(upper_half(x) & field_mask, min_a) + larger(upper_half(y) & field_mask, min_b);
            // A product whose upper half is 0 is 0, or too far below zero_exponent() to count.
            sums = larger(sums, magnitude != 0 ? sum : 0);
            magnitudes = larger(magnitudes, magnitude);  // infinite or NaN where an operand is
        }
    }
    const int of_products = static_cast<int>(sums >> 20) - 2046;
    int largest = exponent_of(c, accumulator_min_exponent(u.output), zero_exponent(u.output));
    largest = of_products > largest ? of_products : largest;
    if (largest > huge_exponent || magnitudes >= field_mask) return add_in_general(u, a, b, count, c);
    const int unit = largest - u.fraction_bits;
    const double anchor = power_of_two(unit + 52);
    const double c_anchor = with_sign_of(anchor, c);
    double sum = sum_toward_zero(c, c_anchor) - c_anchor;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < terms; ++i) {
        const double own = with_sign_of(anchor, product[i]);
        sum += sum_toward_zero(product[i], own) - own;
    }
    return written(sum, unit, u.output);
}

}  // namespace detail

/// c + sum over i < k of x(i) y(i) in fused adds of u.terms products each: add() of fused_add.hpp, group after group.
template <class X, class Y>
FAULTLINE_HD double sum_of_products(const MatrixUnit& u, std::ptrdiff_t k, double c, const X& x, const Y& y) {
    for (std::ptrdiff_t first = 0; first < k; first += u.terms) {
        const auto a = [&](int i) { return x(first + i); };
        const auto b = [&](int i) { return y(first + i); };
        const std::ptrdiff_t rest = k - first;
        const int count = rest < u.terms ? static_cast<int>(rest) : u.terms;
        if (u.terms <= 8)
            c = detail::add_by_floats<8>(u, a, b, count, c);
        else if (u.terms <= 16)
            c = detail::add_by_floats<16>(u, a, b, count, c);
        else if (u.terms <= 32)
            c = detail::add_by_floats<32>(u, a, b, count, c);
        else
            c = detail::add_in_general(u, a, b, count, c);
    }
    return c;
}

}  // namespace faultline::fused
