// SPDX-License-Identifier: Apache-2.0
// How far a result is from the correctly rounded one, and what such distances come to over all floats.
#pragma once

#include <cstdint>

#include <faultline/base/host_device.hpp>
#include <faultline/random/bits_as.hpp>
#include <faultline/special/correct_rounding.hpp>

namespace faultline::probe {

/// By the correctly rounded value: one that is normal; one below 2^-126; 0, infinities and NaN.
enum class Kind { normal, subnormal, end };
constexpr int kinds = 3;
constexpr int widest = 4;  ///< distances of that many encodings and more are counted together

/// One result beside the correctly rounded value.
struct Outcome {
    Kind kind;
    int distance;     ///< result - correctly rounded value, in encodings; of unequal signs, or where one is NaN, 2^30
    bool flushed;     ///< the result is 0, the value is not
    bool one;         ///< the value, rounded, is 1: all 2^x of small x
    double in_ulps;   ///< |result - exact value| in steps of fp32 there; 0 at an end, infinite where the result is
    double absolute;  ///< |result - exact value|, likewise
};

FAULTLINE_HD inline Outcome outcome_of(float result, const RoundedValue& right) {
    constexpr std::uint32_t magnitude = 0x7FFFFFFFu, infinity = 0x7F800000u, smallest_normal = 0x800000u;
    constexpr int incomparable = 1 << 30;
    const std::uint32_t is = detail::bits_as<std::uint32_t>(result),
                        should = detail::bits_as<std::uint32_t>(right.nearest);
    const std::uint32_t size = should & magnitude;
    Outcome found{};
    found.kind = size == 0 || size >= infinity ? Kind::end : size < smallest_normal ? Kind::subnormal : Kind::normal;
    const bool nans = (is & magnitude) > infinity, nan_asked = size > infinity;
    if (nans || nan_asked)
        found.distance = nans && nan_asked ? 0 : incomparable;
    else if ((is & magnitude) == 0 && size == 0)
        found.distance = 0;  // either zero
    else if ((is ^ should) >> 31)
        found.distance = incomparable;
    else
        found.distance = static_cast<int>(is & magnitude) - static_cast<int>(size);
    found.one = should == 0x3F800000u;
    found.flushed = (is & magnitude) == 0 && size != 0;
    if (found.kind != Kind::end && !nans) {
        const std::uint32_t exponent = size >> 23 == 0 ? 1 : size >> 23;
        const double step = detail::bits_as<double>(static_cast<std::uint64_t>(exponent + 1023 - 127 - 23) << 52);
        const double apart = static_cast<double>(result) - right.wide;
        found.absolute = apart < 0 ? -apart : apart;
        found.in_ulps = found.absolute / step;
    }
    return found;
}

/// Counts over floats. An extreme is kept with its argument: of two that are equal, the argument with the larger bits.
struct Accuracy {
    unsigned long long histogram[kinds]
                                [2 * widest + 1];  ///< by kind and distance, those of +-widest and beyond at the ends
    unsigned long long flushed[kinds];
    unsigned long long ones;  ///< of the normal ones, those that are 1
    unsigned long long
        farthest[kinds];  ///< |distance| in the upper 32 bits, the argument's bits below; flushed ones apart
    unsigned long long
        in_ulps[kinds];  ///< largest, as the bits of a double (which order as it does where it is not negative)
    unsigned long long absolute;  ///< largest over normal values, likewise
    unsigned long long breaks;    ///< neighbours whose results are in the wrong order
    unsigned long long
        worst_break;  ///< size in encodings in the upper 32 bits, below it the bits of the one nearer to 0
};

FAULTLINE_HD inline void raise(unsigned long long& most, unsigned long long what) { most = what > most ? what : most; }

/// Adds the result of one float, whose bits x are.
FAULTLINE_HD inline void tally(Accuracy& sum, std::uint32_t x, const Outcome& found) {
    const int kind = static_cast<int>(found.kind);
    const int near = found.distance > widest ? widest : found.distance < -widest ? -widest : found.distance;
    ++sum.histogram[kind][near + widest];
    if (found.one) ++sum.ones;
    if (found.flushed) {
        ++sum.flushed[kind];
        return;
    }
    const auto size = static_cast<unsigned long long>(found.distance < 0 ? -found.distance : found.distance);
    raise(sum.farthest[kind], size << 32 | x);
    if (found.kind == Kind::end) return;
    raise(sum.in_ulps[kind], detail::bits_as<unsigned long long>(found.in_ulps));
    if (found.kind == Kind::normal) raise(sum.absolute, detail::bits_as<unsigned long long>(found.absolute));
}

}  // namespace faultline::probe
