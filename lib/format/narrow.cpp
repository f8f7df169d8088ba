// SPDX-License-Identifier: Apache-2.0
#include <faultline/format/narrow.hpp>

#include <algorithm>
#include <bit>

#include <faultline/base/clones.hpp>

namespace faultline {
namespace {

/// After so many values it is asked whether all were held: often enough to end early, seldom enough for vectors.
constexpr std::size_t part = 2048;

/// Bits in which x is not the float.
inline std::uint64_t lost(double x, float as_float) {
    return std::bit_cast<std::uint64_t>(x) ^ std::bit_cast<std::uint64_t>(static_cast<double>(as_float));
}

FAULTLINE_CLONES
bool bf16_part(const double* from, std::size_t count, std::uint16_t* to) {
    std::uint64_t differ = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const float x = static_cast<float>(from[i]);
        const auto bits = std::bit_cast<std::uint32_t>(x);
        differ |= lost(from[i], x) | (bits & 0xFFFFu);
        to[i] = static_cast<std::uint16_t>(bits >> 16);
    }
    return differ == 0;
}

FAULTLINE_CLONES
bool fp32_part(const double* from, std::size_t count, float* to) {
    std::uint64_t differ = 0;
    for (std::size_t i = 0; i < count; ++i) {
        to[i] = static_cast<float>(from[i]);
        differ |= lost(from[i], to[i]);
    }
    return differ == 0;
}

template <class To, class Part>
bool in_parts(const double* from, std::size_t count, To* to, Part&& of_part) {
    for (std::size_t at = 0; at < count; at += part)
        if (!of_part(from + at, std::min(part, count - at), to + at)) return false;
    return true;
}

}  // namespace

bool narrow_to_bf16(const double* from, std::size_t count, std::uint16_t* to) {
    return in_parts(from, count, to, bf16_part);
}

bool narrow_to_fp32(const double* from, std::size_t count, float* to) { return in_parts(from, count, to, fp32_part); }

FAULTLINE_CLONES
void widen(const float* from, std::size_t count, double* to) {
    for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<double>(from[i]);
}

}  // namespace faultline
