// SPDX-License-Identifier: Apache-2.0
// What an instrument does to the values of a tile, as plain data: for a back end whose tiles are not in the host's memory and
// who cannot call Instrument::at() on them.
#pragma once

#include <cstdint>

#include <faultline/format/format.hpp>

namespace faultline {

/// A change of tiles of one query head. With a tile's element x, its exact value e and its position, row-major:
///   fault   x <- held(x + asked): size times sign, as injectors/apply.cpp has it; masked elements and those that are not
///           finite stay
///   flip    x <- e - (x - e) where the element's bit of the tile's stream is set and that is finite
struct Alteration {
    enum class Kind : unsigned char { fault, flip };
    enum class Size : unsigned char {
        of_rms,    ///< magnitude times the rms of the tile's values
        of_value,  ///< magnitude times x
        of_ulp,    ///< magnitude times the ulp of `format` at x
    };
    enum class Sign : unsigned char {
        one,         ///< `sign`
        of_operand,  ///< that of x; 0 for 0
        of_column,   ///< of the column: bit of stream (seed, 2, site_number, layer, head)
        of_element,  ///< of the element: bit of stream (seed, 4, site_number, step, layer, batch, head, tile, part)
    };
    enum class Hold : unsigned char {
        exact,       ///< x + asked
        nearest,     ///< rounded to `format`
        stochastic,  ///< rounded stochastically, by stream (seed, 5, …) as of_element's
    };

    Kind kind = Kind::fault;
    std::uint64_t sites = 0;      ///< bit index(site): where it stands
    bool at_repetitions = false;  ///< Instrument::alters
    Size size = Size::of_rms;
    Sign sign_of = Sign::one;
    Hold hold = Hold::exact;
    double magnitude = 0;  ///< 0 changes nothing
    double sign = 1;
    Format format = exact;
    std::uint64_t seed = 0, site_number = 0,
                  number = 0;  ///< flip: stream (seed, number, site, head, q_tile and k_tile, part unless it is 0)
    std::int64_t step = 0;
    int layer = 0, batch = 0, head = 0;
};

}  // namespace faultline
