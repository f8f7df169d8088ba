// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_core/fused_lanes.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>

#include <faultline/base/clones.hpp>
#include <faultline/tensor_core/fused_add.hpp>
#include <faultline/tensor_core/fused_v3.hpp>
#include <faultline/tensor_core/lanes.hpp>

namespace faultline::fused {
namespace {

using lanes::Float16;
using lanes::Int16;
using lanes::load;
using lanes::store;
using lanes::width;

/// Largest exponent of each column's products.
[[gnu::always_inline]] inline void largest_exponents(const Group& g, std::int16_t* largest) {
    lanes::Short32 e = lanes::Short32{} + static_cast<std::int16_t>(2 * no_exponent);
    for (int t = 0; t < g.count; ++t) {
        lanes::Short32 y;
        load(y, g.b_exponents + t * g.stride);
        y += g.a_exponents[t];
        e = y > e ? y : e;
    }
    store(largest, e);
}

/// x toward zero to an integer, |x| < 2^51, in rounding mode toward zero: the sum with 2^52 of x's sign has no room for a
/// fraction. Infinities and NaN pass. In place of std::trunc, of which g++ 12 makes scalar code.
[[gnu::always_inline]] inline double truncated(double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits = (bits & 0x8000000000000000u) | 0x4330000000000000u;
    double anchor;
    std::memcpy(&anchor, &bits, sizeof anchor);
    return (x + anchor) - anchor;
}

/// sum * down, exact in binary64, to fp16 by round-to-nearest-even.
[[gnu::always_inline]] inline void write_half(const double* sum, const double* down, double* c) {
    // Normal results: half an ulp less one bit, and the bit that decides a tie, carry into the eleven bits that stay.
    std::uint64_t subnormal = 0;
    for (int j = 0; j < width; ++j) {
        const double v = sum[j] * down[j], magnitude = std::fabs(v);
        std::uint64_t bits;
        std::memcpy(&bits, &magnitude, sizeof bits);
        subnormal |= static_cast<std::uint64_t>(bits != 0) & static_cast<std::uint64_t>(magnitude < 0x1p-14);
        bits = (bits + ((std::uint64_t{1} << 41) - 1) + (bits >> 42 & 1)) & ~((std::uint64_t{1} << 42) - 1);
        double r;
        std::memcpy(&r, &bits, sizeof r);
        r = r >= 65536.0 ? HUGE_VAL : r;
        r = v != v ? canonical_nan() : std::copysign(r, v);
        c[j] = v == 0 ? 0.0 : r;
    }
    if (subnormal == 0) return;
    for (int j = 0; j < width; ++j)
        if (std::fabs(sum[j] * down[j]) < 0x1p-14)
            c[j] = write_output(static_cast<std::int64_t>(sum[j]), static_cast<int>(bits_of(down[j]) >> 52) - 1023,
                                OutputFormat::f16_rne);
}

}  // namespace

FAULTLINE_CLONES void wide_add(const MatrixUnit& unit, const Group& g, double* c) {
    alignas(64) std::int16_t product_exponent[width];
    alignas(64) double scale[width], back[width], sum[width];
    largest_exponents(g, product_exponent);
    const int c_min = accumulator_min_exponent(unit.output), c_zero = zero_exponent(unit.output);
    for (int j = 0; j < width; ++j) {
        std::int64_t bits;
        std::memcpy(&bits, c + j, sizeof bits);
        std::int64_t e = std::max<std::int64_t>((bits >> 52 & 0x7FF) - 1023, c_min);
        e = (bits & 0x7FFFFFFFFFFFFFFF) == 0 ? c_zero : e;
        e = std::min<std::int64_t>(std::max<std::int64_t>(e, product_exponent[j]), exponent_cap);
        const std::int64_t up = (unit.fraction_bits - e + 1023) << 52, down = (e - unit.fraction_bits + 1023) << 52;
        std::memcpy(scale + j, &up, sizeof up);
        std::memcpy(back + j, &down, sizeof down);
    }
    for (int j = 0; j < width; ++j) sum[j] = truncated(c[j] * scale[j]);
    for (int t = 0; t < g.count; ++t) {
        const double x = g.a[t];
        const double* y = g.b + t * g.stride;
        for (int j = 0; j < width; ++j) sum[j] += truncated(x * y[j] * scale[j]);
    }
    if (unit.output == OutputFormat::f16_rne) return write_half(sum, back, c);
    // Truncation by clearing the bits past the last one, in binary64 for normal results, in units of the smallest
    // subnormal number below them.
    const int fraction_bits = unit.output == OutputFormat::e8m13_rz ? 13 : 23;
    const std::uint64_t keep = ~std::uint64_t{0} << (52 - fraction_bits);
    const double up = power_of_two(126 + fraction_bits), down = power_of_two(-126 - fraction_bits);
    const double smallest_normal = power_of_two(-126), overflow = 0x1p128, infinity = HUGE_VAL, nan = canonical_nan();
    for (int j = 0; j < width; ++j) {
        const double v = sum[j] * back[j], magnitude = std::fabs(v);
        std::uint64_t bits;
        std::memcpy(&bits, &v, sizeof bits);
        bits &= keep;
        double r;
        std::memcpy(&r, &bits, sizeof r);
        r = magnitude < smallest_normal ? truncated(v * up) * down : r;
        r = magnitude >= overflow ? std::copysign(infinity, v) : r;
        r = r + 0.0;  // -0 becomes +0
        c[j] = v != v ? nan : r;
    }
}

namespace {

// The two powers of two that follow from each column's largest exponent, as bits. False when one exponent lies outside
// the window. Plain loops over integers: g++ 12 takes comparisons of 512-bit integer vectors apart, element by element,
// and does not vectorise a loop that turns floats into integers by memcpy and branches on them.
struct Scaling {
    alignas(64) std::int32_t up[width];
    alignas(64) std::int64_t down[width];
};

[[gnu::always_inline]] inline bool scaling(const MatrixUnit& unit, const float* c, const std::int16_t* product_exponent,
                                           Scaling& s) {
    const std::int32_t c_min = accumulator_min_exponent(unit.output), c_zero = zero_exponent(unit.output);
    const std::int32_t fraction_bits = unit.fraction_bits;
    alignas(64) std::int32_t c_bits[width], largest[width];
    std::memcpy(c_bits, c, sizeof c_bits);
    std::int32_t outside = 0;
    for (int j = 0; j < width; ++j) {
        const std::int32_t magnitude = c_bits[j] & 0x7FFFFFFF, p = product_exponent[j];
        std::int32_t e = std::max((magnitude >> 23) - 127, c_min);
        e = magnitude == 0 ? c_zero : e;
        e = std::max(p, e);
        const std::int32_t all_zero =
            -static_cast<std::int32_t>(magnitude == 0) & -static_cast<std::int32_t>(p < no_product);
        e &= ~all_zero;                                         // any exponent serves then
        outside |= (e - narrow_lowest) | (narrow_highest - e);  // negative when e is outside
        largest[j] = e;
    }
    for (int j = 0; j < width; ++j) s.up[j] = (fraction_bits + 127 - largest[j]) << 23;
    for (int j = 0; j < width; ++j) s.down[j] = (static_cast<std::int64_t>(largest[j]) + (1023 - fraction_bits)) << 52;
    return outside >= 0;
}

/// The sum, exact in binary64, to fp32; the rounding mode is toward zero, so the conversion truncates. Results are
/// normal fp32 numbers or zero: a unit is at least 2^(narrow_lowest - 25) = 2^-125.
[[gnu::always_inline]] inline void write_narrow(const MatrixUnit& unit, const double* sum, const Scaling& s, float* c) {
    alignas(64) double down[width];
    std::memcpy(down, s.down, sizeof down);
    if (unit.output == OutputFormat::f16_rne) {
        alignas(64) double half[width];
        write_half(sum, down, half);
        for (int j = 0; j < width; ++j) c[j] = static_cast<float>(half[j]);
        return;
    }
    alignas(64) float r[width];
    alignas(64) std::int32_t bits[width];
    for (int j = 0; j < width; ++j) r[j] = static_cast<float>(sum[j] * down[j] + 0.0);
    std::memcpy(bits, r, sizeof bits);
    const std::int32_t keep = unit.output == OutputFormat::e8m13_rz ? ~0x3FF : ~0;
    for (int j = 0; j < width; ++j) bits[j] &= keep;
    std::memcpy(c, bits, sizeof bits);
}

}  // namespace

int most_products(const MatrixUnit& unit) {
    return static_cast<int>(((std::int64_t{1} << 31) - 1) >> (unit.fraction_bits + 2)) - 1;
}

FAULTLINE_CLONES bool narrow_add(const MatrixUnit& unit, const Group& g, float* c) {
    alignas(64) std::int16_t product_exponent[width];
    largest_exponents(g, product_exponent);
    Scaling s;
    if (!scaling(unit, c, product_exponent, s)) return false;
    const int chunk = most_products(unit);
    Float16 c0, c1, up0, up1;
    load(c0, c);
    load(c1, c + 16);
    load(up0, s.up);
    load(up1, s.up + 16);
    Int16 i0 = __builtin_convertvector(c0 * up0, Int16), i1 = __builtin_convertvector(c1 * up1, Int16);
    alignas(64) std::int32_t part[width];
    alignas(64) double sum[width]{};
    for (int t = 0; t < g.count;) {
        const int end = std::min(g.count, t + chunk);
        for (; t < end; ++t) {
            Float16 y0, y1;
            load(y0, g.b_narrow + t * g.stride);
            load(y1, g.b_narrow + t * g.stride + 16);
            i0 += __builtin_convertvector(g.a_narrow[t] * y0 * up0, Int16);
            i1 += __builtin_convertvector(g.a_narrow[t] * y1 * up1, Int16);
        }
        store(part, i0);
        store(part + 16, i1);
        for (int j = 0; j < width; ++j) sum[j] += part[j];
        i0 = i1 = Int16{};
    }
    write_narrow(unit, sum, s, c);
    return true;
}

}  // namespace faultline::fused
