// SPDX-License-Identifier: Apache-2.0
// Inputs for the tests: numbers of a format as doubles, drawn so that the rule's corners are met.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <faultline/tensor_core/accumulate.hpp>

namespace faultline::testing {

struct Shape {
    int min_exponent, max_exponent, fraction_bits;
};
constexpr Shape fp16{-14, 15, 10}, bf16{-126, 127, 7}, tf32{-126, 127, 10}, fp32{-126, 127, 23}, e4m3{-6, 8, 3},
    e5m2{-14, 15, 2}, wide{-126, 127, 52};

/// The operand format of a named unit.
inline Shape operand_shape(std::string_view unit) {
    if (unit.find("bf16") != unit.npos) return bf16;
    if (unit.find("tf32") != unit.npos) return tf32;
    if (unit.find("e4m3") != unit.npos) return e4m3;
    if (unit.find("e5m2") != unit.npos) return e5m2;
    return fp16;
}

class Numbers {
    std::mt19937_64 bits_;

  public:
    explicit Numbers(std::uint64_t seed) : bits_(seed) {}

    std::uint64_t next() { return bits_(); }
    int between(int low, int high) {
        return low + static_cast<int>(next() % static_cast<std::uint64_t>(high - low + 1));
    }
    bool one_in(int n) { return next() % static_cast<std::uint64_t>(n) == 0; }
    double sign() { return one_in(2) ? -1.0 : 1.0; }

    /// A normal number with exponent in [low, high] clipped to the format; one fraction in four is zero, one in eight
    /// all ones.
    double normal(const Shape& f, int low, int high) {
        low = std::clamp(low, f.min_exponent, f.max_exponent);
        high = std::clamp(high, low, f.max_exponent);
        const std::uint64_t all = (std::uint64_t{1} << f.fraction_bits) - 1;
        std::uint64_t fraction = next() & all;
        const std::uint64_t corner = next() % 8;
        if (corner < 2) fraction = 0;
        if (corner == 2) fraction = all;
        if (f.max_exponent == e4m3.max_exponent) fraction = std::min(fraction, all - 1);  // 480 would be NaN
        return sign() * std::ldexp(static_cast<double>(fraction + all + 1), between(low, high) - f.fraction_bits);
    }
    double subnormal(const Shape& f) {
        return sign() * std::ldexp(static_cast<double>(next() & ((std::uint64_t{1} << f.fraction_bits) - 1)),
                                   f.min_exponent - f.fraction_bits);
    }
    /// The mixture that the comparisons run on; `style` picks what a matrix looks like.
    double of_style(const Shape& f, int style) {
        switch (style % style_count) {
            case 0:
                return normal(f, -4, 1);
            case 1:
                return normal(f, -20, 20);
            case 2:
                return normal(f, f.min_exponent, f.max_exponent);
            case 3:
                return one_in(2) ? subnormal(f) : normal(f, f.max_exponent - 8, f.max_exponent);
            case 4:
                return one_in(4) ? normal(f, -30, 30) : sign() * 0.0;
            case 5:
                return normal(f, -70, -60);  // products and sums around fp32's smallest normal number
            case 6:
                return one_in(3) ? normal(f, -126, -100) : normal(f, -3, 3);
            case 7:
                return normal(f, 60, 64);  // sums around fp32's largest number
            default:
                return one_in(40) ? special() : normal(f, -4, 4);
        }
    }
    static constexpr int style_count = 9;

    double special() {
        switch (next() % 5) {
            case 0:
                return std::numeric_limits<double>::quiet_NaN();
            case 4: {  // signalling, with a payload that may lie wholly below what a tf32 input reads
                const std::uint64_t pattern =
                    next() << 63 | 0x7FF0000000000000u | ((next() >> 12) >> between(1, 50)) | 1;
                double x;
                std::memcpy(&x, &pattern, sizeof x);
                return x;
            }
            case 1:
                return 0.0;
            default:
                return sign() * std::numeric_limits<double>::infinity();
        }
    }
    /// A starting value: zero, a number of the accumulator's format of any size, or one that undoes `product`.
    double accumulator(OutputFormat output, int style, double product) {
        const Shape f = output == OutputFormat::f16_rne ? fp16 : fp32;
        if (one_in(4)) return sign() * 0.0;
        if (one_in(4) && output != OutputFormat::f16_rne && std::isfinite(product))
            return -static_cast<double>(static_cast<float>(product));
        if (one_in(8)) return subnormal(f);
        if (style == style_count - 1 && one_in(10)) return special();
        return normal(f, one_in(2) ? -40 : f.min_exponent, one_in(2) ? 40 : f.max_exponent);
    }
};

/// Bits of a double: equality that tells -0 from +0 and one NaN from another.
inline std::uint64_t bits(double x) {
    std::uint64_t r;
    std::memcpy(&r, &x, sizeof r);
    return r;
}

}  // namespace faultline::testing
