// SPDX-License-Identifier: Apache-2.0
// How the models are held against what a card returned: checksums of results and histograms of differences from the
// correctly rounded value, both over all 2^23 floats of one sign and exponent.
//
// Origin of every measured figure in these tests: one NVIDIA H200, 2026-11-29, ex2.approx.f32 and lg2.approx.f32 as
// inline PTX (nvcc 13.0, sm_90, no fast math) over whole binades. The card's results as little-endian 32-bit words give
// the checksums (XXH3, 64 bits); they were computed from the card's data, not from the model.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include <mpfr.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace faultline::special_test {

constexpr std::uint32_t binade = 1u << 23;

inline float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

/// Results, as bits, for the floats whose bits are base + i, first <= i < 2^23.
template <class F>
std::vector<std::uint32_t> results(F function, std::uint32_t base, std::uint32_t first = 0) {
    std::vector<std::uint32_t> bits(binade - first);
    for (std::uint32_t i = first; i < binade; ++i) bits[i - first] = bits_of(function(from_bits(base + i)));
    return bits;
}

template <class T>
std::uint64_t checksum(const std::vector<T>& values) {
    static_assert(std::endian::native == std::endian::little);
    return XXH3_64bits(values.data(), values.size() * sizeof(T));
}

enum class Function { exp2, log2 };

/// Correctly rounded to fp32: the C library's double result, or MPFR's float where that is so near a midpoint that an
/// error of libm_ulps of the double could tip it.
inline float correctly_rounded(Function function, float x) {
    constexpr std::uint64_t libm_ulps = 4;  // glibc promises 1 (manual, "Known Maximum Errors"); others are near it
    const double y = function == Function::exp2 ? std::exp2(static_cast<double>(x)) : std::log2(static_cast<double>(x));
    constexpr std::uint64_t midpoint = std::uint64_t{1} << 28, below = (std::uint64_t{1} << 29) - 1;
    const std::uint64_t rest = std::bit_cast<std::uint64_t>(y) & below;
    if (rest < midpoint - libm_ulps || rest > midpoint + libm_ulps) return static_cast<float>(y);
    mpfr_t exact;
    mpfr_init2(exact, 24);
    mpfr_set_flt(exact, x, MPFR_RNDN);
    (function == Function::exp2 ? mpfr_exp2 : mpfr_log2)(exact, exact, MPFR_RNDN);
    const float rounded = mpfr_get_flt(exact, MPFR_RNDN);
    mpfr_clear(exact);
    return rounded;
}

/// Result minus correctly rounded value, in encodings, clipped to +-127 as the measured differences are.
inline std::vector<std::int8_t> differences(Function function, const std::vector<std::uint32_t>& bits,
                                            std::uint32_t base) {
    std::vector<std::int8_t> d(bits.size());
    for (std::uint32_t i = 0; i < bits.size(); ++i) {
        const std::uint32_t right = bits_of(correctly_rounded(function, from_bits(base + i)));
        const std::int64_t difference = static_cast<std::int64_t>(bits[i]) - static_cast<std::int64_t>(right);
        d[i] = static_cast<std::int8_t>(std::clamp<std::int64_t>(difference, -127, 127));
    }
    return d;
}

using Histogram = std::map<int, std::uint32_t>;

/// What is at or beyond +-limit is counted at +-limit.
inline Histogram histogram(const std::vector<std::int8_t>& differences, int limit = 127) {
    Histogram h;
    for (const std::int8_t d : differences) ++h[std::clamp<int>(d, -limit, limit)];
    return h;
}

}  // namespace faultline::special_test
