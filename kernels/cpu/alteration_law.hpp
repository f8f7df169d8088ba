// SPDX-License-Identifier: Apache-2.0
// The arithmetic of an Alteration of kind `fault`, element by element, for host and device: which random number belongs to an
// element, what is asked of it, how the changed value is held, and in which order the squares of a tile are added up.
#pragma once

#include <cstddef>
#include <cstdint>

#include <faultline/base/host_device.hpp>
#include <faultline/cpu/alteration.hpp>
#include <faultline/format/stochastic_bits.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {

/// What a stream of a fault is for: keeps persistent signs, element signs and roundings of one place apart.
namespace fault_stream {
inline constexpr std::uint64_t head_signs = 1, column_signs = 2, step_signs = 3, element_signs = 4, roundings = 5;
}  // namespace fault_stream

[[nodiscard]] FAULTLINE_HD constexpr double sign_of_bit(std::uint64_t bits, std::uint64_t bit) {
    return (bits >> bit & 1) != 0 ? -1.0 : 1.0;
}

/// The stream that those of a head's tiles are named after.
[[nodiscard]] FAULTLINE_HD inline RandomStream head_stream(const Alteration& a, std::uint64_t purpose) {
    return RandomStream(a.seed, purpose, a.site_number, a.step, a.layer, a.batch, a.head);
}
/// The stream of a tile, from its head's. `tile`: its first row and key as (row << 32 | key), or a model's tile.
[[nodiscard]] FAULTLINE_HD inline RandomStream tile_stream(const RandomStream& of_head, std::uint64_t tile, int part) {
    constexpr std::uint32_t numbers_of_head_stream = 7;
    return of_head.with(numbers_of_head_stream, tile, part);
}
/// The stream of a tile for one purpose.
[[nodiscard]] FAULTLINE_HD inline RandomStream tile_stream(const Alteration& a, std::uint64_t purpose,
                                                           std::uint64_t tile, int part) {
    return tile_stream(head_stream(a, purpose), tile, part);
}
[[nodiscard]] FAULTLINE_HD inline RandomStream column_stream(const Alteration& a) {
    return RandomStream(a.seed, fault_stream::column_signs, a.site_number, a.layer, a.head);
}

/// The error that is asked for at x. `amplitude`: magnitude times the rms of the tile, where the size is of_rms. The signs of the
/// element's column and of the element are only asked for where the law has them.
template <class ColumnSign, class ElementSign>
[[nodiscard]] FAULTLINE_HD inline double asked_change(const Alteration& a, double x, double amplitude,
                                                      ColumnSign&& column_sign, ElementSign&& element_sign) {
    const double size = a.size == Alteration::Size::of_value ? a.magnitude * x
                        : a.size == Alteration::Size::of_ulp ? a.magnitude * ulp(x, a.format)
                                                             : amplitude;
    switch (a.sign_of) {
        case Alteration::Sign::of_operand:
            return size * (x > 0 ? 1.0 : (x < 0 ? -1.0 : 0.0));
        case Alteration::Sign::of_column:
            return size * column_sign();
        case Alteration::Sign::of_element:
            return size * element_sign();
        default:
            return size * a.sign;
    }
}
/// The sign of column or element n of a stream.
[[nodiscard]] FAULTLINE_HD inline double drawn_sign(const RandomStream& stream, std::uint64_t n) {
    return sign_of_bit(stream.bits(n / 64), n % 64);
}

FAULTLINE_HD_CALLED inline double rounded_in_any_case(double x, const Format& f, bool stochastic,
                                                      std::uint64_t random) {
    return faultline::round(x, f, stochastic ? Rounding::stochastic : Rounding::nearest_even, random);
}

/// round(x, f, nearest even or stochastic, random), the common case in a few instructions: a number in the normal range below
/// the largest binade is rounded by an addition to its bits, whose carry goes into the exponent by itself. Stochastically
/// the addend is the upper bits of `random` that stand where the discarded bits do: both sums carry out together.
[[nodiscard]] FAULTLINE_HD inline double rounded_quickly(double x, const Format& f, bool stochastic,
                                                         std::uint64_t random) {
    const auto bits = detail::bits_as<std::uint64_t>(x);
    const int exponent = static_cast<int>(bits >> 52 & 0x7FF) - 1023;
    const int drop = 53 - f.precision;
    if (exponent < f.emin || exponent >= f.emax || drop == 0) return rounded_in_any_case(x, f, stochastic, random);
    const std::uint64_t last = std::uint64_t{1} << drop;
    const std::uint64_t addend = stochastic ? random >> (64 - drop) : last / 2 - 1 + (bits >> drop & 1);
    return detail::bits_as<double>((bits + addend) & ~(last - 1));
}

/// The changed value as the fault's site holds it. `random`: stochastic_bits of the tile's stream for roundings at the
/// element; only read where the hold is stochastic.
[[nodiscard]] FAULTLINE_HD inline double held_change(const Alteration& a, double changed, std::uint64_t random) {
    if (a.hold == Alteration::Hold::exact) return changed;
    return rounded_quickly(changed, a.format, a.hold == Alteration::Hold::stochastic, random);
}

/// Squares of a tile are added up in lanes, so that a row of threads can: of a row lane l has the columns l, l + 16, … in
/// ascending order, the lanes are joined by halves; the sums of the rows are added up in the same way.
inline constexpr int square_lanes = 16;

/// The lanes joined: 0 with 8, 1 with 9, …; then 0 with 4, …. What a butterfly of 16 threads gives in each of them.
[[nodiscard]] FAULTLINE_HD inline double joined_lanes(const double (&lane)[square_lanes]) {
    double sum[square_lanes / 2];
    for (int l = 0; l < 8; ++l) sum[l] = lane[l] + lane[l + 8];
    for (int half = 4; half > 0; half /= 2)
        for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
    return sum[0];
}

/// Squares and count of the elements of a tile, one thread. `square(i, j)`: the element's square, or a negative number where
/// the fault does not touch it; row i has seen(i) columns.
template <class Seen, class Square>
FAULTLINE_HD void sum_squares(std::ptrdiff_t rows, Seen&& seen, Square&& square, double& squares, double& count) {
    double of_rows[square_lanes] = {};
    for (std::ptrdiff_t i = 0; i < rows; ++i) {
        double lane[square_lanes] = {};
        const std::ptrdiff_t columns = seen(i);
        for (std::ptrdiff_t j = 0; j < columns; ++j)
            if (const double s = square(i, j); s >= 0) {
                lane[j % square_lanes] += s;
                count += 1;
            }
        of_rows[i % square_lanes] += joined_lanes(lane);
    }
    squares = joined_lanes(of_rows);
}

}  // namespace faultline
