// SPDX-License-Identifier: Apache-2.0
// Alterations as the kernels of a device apply them, element by element in their registers.
#pragma once

#include <cstdint>

#include <faultline/base/host_device.hpp>
#include <faultline/cpu/alteration_law.hpp>

namespace faultline {

/// An alteration of the tiles of one head where it acts, as a device's kernels read it.
struct HeadAlteration {
    Alteration change;   ///< batch: number of the first sequence
    int touched = 0;     ///< whether it acts here and now
    int micro_step = 0;  ///< of a training step
};

/// Bits of stochastic rounding, of elements in any order. A block of Threefry serves the elements of a group of 128 that are 16
/// apart, so what was drawn last is kept.
struct RoundingDraws {
    std::uint64_t key, at = ~std::uint64_t{0};
    Block4x32 upper{}, lower{};

    FAULTLINE_HD explicit RoundingDraws(const RandomStream& stream) : key(stream.key) {}
    /// stochastic_bits(stream, element).
    FAULTLINE_HD std::uint64_t bits(std::uint64_t element) {
        const std::uint64_t place = element / 128 * 16 + element % 16;
        if (place != at) {
            at = place;
            upper = detail::stochastic_block(key, element / 128, static_cast<std::uint32_t>(element % 16), 0);
            lower = detail::stochastic_block(key, element / 128, static_cast<std::uint32_t>(element % 16), 1);
        }
        const auto word = static_cast<unsigned>(element / 16 % 4), shift = static_cast<unsigned>(element / 64 % 2 * 16);
        const std::uint32_t u = of(upper, word) >> shift, l = of(lower, word) >> shift;
        return (static_cast<std::uint64_t>(u & 0xFFFFu) << 48) | (static_cast<std::uint64_t>(l & 0xFFFFu) << 32);
    }

  private:
    FAULTLINE_HD static std::uint32_t of(const Block4x32& b, unsigned word) {  // no index: the block stays in registers
        const std::uint32_t low = word & 1 ? b.word[1] : b.word[0], high = word & 1 ? b.word[3] : b.word[2];
        return word & 2 ? high : low;
    }
};

/// drawn_sign of numbers in any order; what was drawn last is kept.
struct SignDraws {
    RandomStream stream;
    std::uint64_t at = ~std::uint64_t{0}, drawn = 0;

    FAULTLINE_HD explicit SignDraws(const RandomStream& of) : stream(of) {}
    FAULTLINE_HD double sign(std::uint64_t n) {
        if (n / 64 != at) {
            at = n / 64;
            drawn = stream.bits(at);
        }
        return sign_of_bit(drawn, n % 64);
    }
};

/// held_change without a call to a function of its own on the device.
[[nodiscard]] FAULTLINE_HD inline double held_change_inlined(const Alteration& a, double changed,
                                                             std::uint64_t random) {
    if (a.hold == Alteration::Hold::exact) return changed;
    const bool stochastic = a.hold == Alteration::Hold::stochastic;
    return faultline::round(changed, a.format, stochastic ? Rounding::stochastic : Rounding::nearest_even, random);
}

}  // namespace faultline
