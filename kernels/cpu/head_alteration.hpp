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

/// Upper 16 bits of the random numbers of stochastic rounding, of elements in any order. A block of Threefry serves the elements
/// of a group of 128 that are 16 apart, so what was drawn last is kept.
struct RoundingDraws {
    RandomStream stream;
    std::uint64_t at = ~std::uint64_t{0};
    Block4x32 block{};

    FAULTLINE_HD explicit RoundingDraws(const RandomStream& of) : stream(of) {}
    /// stochastic_bits(stream, element) >> 48.
    FAULTLINE_HD std::uint32_t upper_bits(std::uint64_t element) {
        const std::uint64_t place = element / 128 * 16 + element % 16;
        if (place != at) {
            at = place;
            block = detail::stochastic_block(stream.key, element / 128, static_cast<std::uint32_t>(element % 16), 0);
        }
        return of(block, static_cast<unsigned>(element / 16 % 4)) >> (element / 64 % 2 * 16) & 0xFFFFu;
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

/// held = held_change(a, changed, random) where the upper 16 bits of `random` decide it and a few instructions do: zeros and what
/// rounded_quickly() is quick for. False where not: the lower bits decide of one in 65,536 there, so nobody else draws them.
[[nodiscard]] FAULTLINE_HD inline bool held_quickly(const Alteration& a, double changed, std::uint32_t upper,
                                                    double& held) {
    held = changed;
    if (a.hold == Alteration::Hold::exact || changed == 0) return true;
    const auto bits = detail::bits_as<std::uint64_t>(changed);
    const int exponent = static_cast<int>(bits >> 52 & 0x7FF) - 1023, drop = 53 - a.format.precision;
    if (exponent < a.format.emin || exponent >= a.format.emax || drop < 16) return false;
    const std::uint64_t last = std::uint64_t{1} << drop, discarded = bits & (last - 1), kept = bits - discarded;
    bool up = false;
    if (a.hold == Alteration::Hold::stochastic) {  // discarded + the random number's upper bits carry over
        const std::uint32_t sum = static_cast<std::uint32_t>(discarded >> (drop - 16)) + upper;
        if (sum == 0xFFFFu) return false;
        up = sum > 0xFFFFu;
    } else {
        up = discarded > last / 2 || (discarded == last / 2 && (kept >> drop & 1) != 0);
    }
    held = detail::bits_as<double>(up ? kept + last : kept);
    return true;
}
/// held_change of `element` of the stream of roundings, in any case and without a call to a function of its own on the device.
[[nodiscard]] FAULTLINE_HD inline double held_change_inlined(const Alteration& a, double changed,
                                                             const RandomStream& roundings, std::uint64_t element) {
    if (a.hold == Alteration::Hold::exact) return changed;
    const bool stochastic = a.hold == Alteration::Hold::stochastic;
    const std::uint64_t random = stochastic ? stochastic_bits(roundings, element) : 0;
    return faultline::round(changed, a.format, stochastic ? Rounding::stochastic : Rounding::nearest_even, random);
}

}  // namespace faultline
