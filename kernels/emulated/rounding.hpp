// SPDX-License-Identifier: Apache-2.0
// round() of lib/format where it is called for every element of every tile: the common case of it in a few instructions.
#pragma once

#include <faultline/format/format.hpp>
#include <faultline/format/stochastic_bits.hpp>

namespace faultline::emulated {

FAULTLINE_HD_CALLED inline double rounded_in_general(double x, const Format& f, Rounding mode, std::uint64_t random) {
    return faultline::round(x, f, mode, random);
}

/// faultline::round(x, f, mode), not stochastic. To nearest even, a number in the format's normal range below its largest
/// binade is rounded by adding half of the last place to its bits: the carry goes into the exponent by itself.
FAULTLINE_HD inline double rounded(double x, const Format& f, Rounding mode) {
    if (is_exact(f)) return x;
    const auto bits = detail::bits_as<std::uint64_t>(x);
    if ((bits << 1) == 0) return x;
    const int exponent = static_cast<int>(bits >> 52 & 0x7FF) - 1023;
    if (mode != Rounding::nearest_even || exponent < f.emin || exponent >= f.emax) {
        const bool infinite = (bits << 1) == detail::infinity64 << 1;  // what a mask leaves, in half of a diagonal tile
        return infinite && f.infinities && !f.saturates ? x : rounded_in_general(x, f, mode, 0);
    }
    const int drop = 53 - f.precision;
    if (drop == 0) return x;
    const std::uint64_t last = std::uint64_t{1} << drop;
    const std::uint64_t odd = bits >> drop & 1;
    return detail::bits_as<double>((bits + (last / 2 - 1) + odd) & ~(last - 1));
}

/// A rule's rounding at one tile.
struct Rounder {
    Format format;
    Rounding mode;
    RandomStream stream;  ///< where it is stochastic

    [[nodiscard]] FAULTLINE_HD double operator()(double x, std::uint64_t counter) const {
        if (mode != Rounding::stochastic) return rounded(x, format, mode);
        if (is_exact(format)) return x;
        return rounded_in_general(x, format, mode, stochastic_bits(stream, counter));
    }
};

}  // namespace faultline::emulated
