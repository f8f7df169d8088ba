// SPDX-License-Identifier: Apache-2.0
// Number formats as values, and one correct rounding into any of them. Host and device, constant expressions too: the
// rounding is integer arithmetic on the bits of a binary64, so there is one truth for all.
//
// Formats: IEEE 754-2019 (fp32, fp16, binary64), PTX ISA (tf32, bf16, cvt.satfinite), OCP 8-bit Floating Point
// Specification 1.0 (e4m3, e5m2), OCP Microscaling Formats 1.0 (e3m2, e2m3, e2m1).
#pragma once

#include <faultline/base/host_device.hpp>
#include <faultline/random/bits_as.hpp>

#include <cstdint>

namespace faultline {

/// Where a value between two neighbours of the format goes.
enum class Rounding : unsigned char {
    nearest_even,  ///< the nearer; a tie goes to the even significand (RNE)
    nearest_away,  ///< the nearer; a tie goes away from zero (RNA)
    toward_zero,   ///< RZ
    upward,        ///< toward +infinity (RU)
    downward,      ///< toward -infinity (RD)
    to_odd,        ///< the neighbour with the odd significand, so that a later rounding is not a double rounding
    stochastic,    ///< away from zero with probability equal to the discarded fraction, see round()
};

/// How a format spends codes on NaN.
enum class NanKind : unsigned char {
    none,         ///< no NaN at all (fp6, fp4)
    single_code,  ///< one code per sign, all ones: it takes the place of the largest finite number (e4m3)
    ieee,         ///< the all-ones exponent field is reserved for infinity and NaNs
};

/// A binary floating-point format, described by independent fields. Finite values are k * 2^q with |k| < 2^precision.
/// A structural type: usable as a template argument. validate() in names.hpp says whether the fields make a format.
struct Format {
    int precision;           ///< significant bits, the hidden one included: 2 to 53
    int emin;                ///< exponent of the smallest normal number, 2^emin
    int emax;                ///< exponent of the largest binade that holds finite numbers
    bool subnormals = true;  ///< false: nothing lies between 0 and 2^emin, and rounding there chooses one of the two
    bool infinities = true;  ///< only with NanKind::ieee
    NanKind nans = NanKind::ieee;
    bool saturates = false;  ///< overflow and infinities become the largest finite number (cvt.satfinite)
    bool rounds = true;      ///< false: a binary64 container in which nothing is rounded, see `exact`

    friend constexpr bool operator==(const Format&, const Format&) = default;
};

inline constexpr Format binary64{.precision = 53, .emin = -1022, .emax = 1023};
inline constexpr Format fp32{.precision = 24, .emin = -126, .emax = 127};
inline constexpr Format tf32{.precision = 11, .emin = -126, .emax = 127};
inline constexpr Format bf16{.precision = 8, .emin = -126, .emax = 127};
inline constexpr Format fp16{.precision = 11, .emin = -14, .emax = 15};
/// The two OCP 8-bit formats saturate by default, as the only fp32 conversion of NVIDIA hardware does (PTX
/// cvt.rn.satfinite); OCP also defines the non-saturating conversion: with_saturation(e4m3, false).
inline constexpr Format e5m2{.precision = 3, .emin = -14, .emax = 15, .saturates = true};
inline constexpr Format e4m3{
    .precision = 4, .emin = -6, .emax = 8, .infinities = false, .nans = NanKind::single_code, .saturates = true};
inline constexpr Format e3m2{
    .precision = 3, .emin = -2, .emax = 4, .infinities = false, .nans = NanKind::none, .saturates = true};
inline constexpr Format e2m3{
    .precision = 4, .emin = 0, .emax = 2, .infinities = false, .nans = NanKind::none, .saturates = true};
inline constexpr Format e2m1{
    .precision = 2, .emin = 0, .emax = 2, .infinities = false, .nans = NanKind::none, .saturates = true};
/// No rounding: round() is the identity on every binary64, NaN payloads included.
inline constexpr Format exact{.precision = 53, .emin = -1022, .emax = 1023, .rounds = false};

[[nodiscard]] FAULTLINE_HD constexpr bool is_exact(Format f) { return !f.rounds; }

/// The same format with the other overflow policy. A format that has neither infinity nor NaN can only saturate
/// (validate() rejects the rest).
[[nodiscard]] FAULTLINE_HD constexpr Format with_saturation(Format f, bool saturates) {
    f.saturates = saturates;
    return f;
}

namespace detail {

inline constexpr std::uint64_t sign_bit64 = std::uint64_t{1} << 63;
inline constexpr std::uint64_t infinity64 = std::uint64_t{0x7FF} << 52;
inline constexpr std::uint64_t quiet_nan64 = std::uint64_t{0xFFF} << 51;

/// 2^e, -1074 <= e <= 1023.
FAULTLINE_HD constexpr double power_of_two(int e) {
    return e >= -1022 ? detail::bits_as<double>(static_cast<std::uint64_t>(e + 1023) << 52)
                      : detail::bits_as<double>(std::uint64_t{1} << (e + 1074));
}

/// A finite non-zero |x| as significand * 2^(exponent-52), 2^52 <= significand < 2^53.
struct Parts {
    std::uint64_t significand;
    int exponent;
};

FAULTLINE_HD constexpr Parts split(std::uint64_t magnitude) {
    if (magnitude >> 52 != 0) {
        return {(magnitude & 0xFFFFFFFFFFFFFu) | (std::uint64_t{1} << 52), static_cast<int>(magnitude >> 52) - 1023};
    }
    int exponent = -1022;
    while ((magnitude >> 52) == 0) {
        magnitude <<= 1;
        --exponent;
    }
    return {magnitude, exponent};
}

/// Exponent of the spacing of the format's numbers in the binade 2^exponent.
FAULTLINE_HD constexpr int quantum_exponent(int exponent, Format f) {
    if (exponent >= f.emin) return exponent - (f.precision - 1);
    return f.subnormals ? f.emin - (f.precision - 1) : f.emin;
}

FAULTLINE_HD constexpr double with_sign(double magnitude, std::uint64_t sign) {
    return detail::bits_as<double>(detail::bits_as<std::uint64_t>(magnitude) | sign);
}

}  // namespace detail

/// Width of the exponent field: enough for every finite binade, the subnormals, and the reserved all-ones field if any.
[[nodiscard]] FAULTLINE_HD constexpr int exponent_bits(Format f) {
    const int largest_field = f.emax - f.emin + 1 + (f.nans == NanKind::ieee ? 1 : 0);
    int width = 0;
    while ((largest_field >> width) != 0) ++width;
    return width;
}

/// Width of a code: sign, exponent field, trailing significand. fp32 32, tf32 19, bf16 16, e4m3 8, e2m1 4.
[[nodiscard]] FAULTLINE_HD constexpr int code_bits(Format f) { return 1 + exponent_bits(f) + (f.precision - 1); }

/// The largest finite number: all significand bits set in the top binade, less one unit where the all-ones code is the
/// NaN (this alone makes e4m3 end at 448).
[[nodiscard]] FAULTLINE_HD constexpr double max_finite(Format f) {
    const bool top_code_is_nan = f.nans == NanKind::single_code && f.emax - f.emin + 1 == (1 << exponent_bits(f)) - 1;
    const std::uint64_t k = (std::uint64_t{1} << f.precision) - 1 - (top_code_is_nan ? 1 : 0);
    return static_cast<double>(k) * detail::power_of_two(f.emax - (f.precision - 1));
}

/// 2^emin.
[[nodiscard]] FAULTLINE_HD constexpr double min_normal(Format f) { return detail::power_of_two(f.emin); }

/// The smallest positive number of the format; min_normal where there are no subnormals.
[[nodiscard]] FAULTLINE_HD constexpr double min_subnormal(Format f) {
    return detail::power_of_two(detail::quantum_exponent(f.emin - 1, f));
}

/// Half the distance from 1 to the next larger number, 2^-precision: the bound of the relative error of a rounding to
/// nearest in the normal range.
[[nodiscard]] FAULTLINE_HD constexpr double unit_roundoff(Format f) { return detail::power_of_two(-f.precision); }

/// Unit in the last place of the format at x: the spacing of its numbers in the binade of x, the subnormal spacing at and
/// near 0, that of the top binade beyond it. NaN for an infinite or NaN x. For `exact` that of binary64.
[[nodiscard]] FAULTLINE_HD constexpr double ulp(double x, Format f) {
    const std::uint64_t magnitude = detail::bits_as<std::uint64_t>(x) & ~detail::sign_bit64;
    if (magnitude >= detail::infinity64) return detail::bits_as<double>(detail::quiet_nan64);
    if (magnitude == 0) return min_subnormal(f);
    const int exponent = detail::split(magnitude).exponent;
    return detail::power_of_two(detail::quantum_exponent(exponent < f.emax ? exponent : f.emax, f));
}

namespace detail {

/// What a NaN becomes: the quiet NaN 0x7FF8..., or the largest finite number where the format has no NaN: PTX ISA, cvt,
/// .satfinite to .e2m1x2, .e2m3x2, .e3m2x2 gives positive MAX_NORM for a NaN of either sign.
FAULTLINE_HD constexpr double rounded_nan(Format f) {
    return f.nans == NanKind::none ? max_finite(f) : detail::bits_as<double>(quiet_nan64);
}

/// What an infinity becomes: cvt.satfinite and OCP's saturating conversion clamp it; without infinities it is NaN.
FAULTLINE_HD constexpr double rounded_infinity(Format f, std::uint64_t sign) {
    if (f.saturates) return with_sign(max_finite(f), sign);
    if (f.infinities) return with_sign(detail::bits_as<double>(infinity64), sign);
    return detail::bits_as<double>(quiet_nan64);
}

/// What a finite number becomes whose rounding with unbounded exponent lies beyond the largest finite one. Modes that
/// round toward zero there stop at the largest finite number (IEEE 754, 7.4); round-to-odd never leaves the finite
/// numbers either, so that "inexact" stays visible to the rounding that follows it.
FAULTLINE_HD constexpr double rounded_overflow(Format f, Rounding mode, std::uint64_t sign) {
    const bool stays_finite = mode == Rounding::toward_zero || mode == Rounding::to_odd ||
                              (mode == Rounding::upward && sign != 0) || (mode == Rounding::downward && sign == 0);
    return stays_finite ? with_sign(max_finite(f), sign) : rounded_infinity(f, sign);
}

/// Whether |x| = (kept + discarded/2^shift) quanta goes to kept + 1. 0 < discarded < 2^shift. Significands have at most
/// 53 bits, so from shift 54 on the discarded part is below one half.
FAULTLINE_HD constexpr bool rounds_away(std::uint64_t kept, std::uint64_t discarded, int shift, bool negative,
                                        Rounding mode, std::uint64_t random_bits) {
    const std::uint64_t half = std::uint64_t{1} << ((shift < 55 ? shift : 55) - 1);
    switch (mode) {
        case Rounding::nearest_even:
            return discarded > half || (discarded == half && (kept & 1) != 0);
        case Rounding::nearest_away:
            return discarded >= half;
        case Rounding::toward_zero:
            return false;
        case Rounding::upward:
            return !negative;
        case Rounding::downward:
            return negative;
        case Rounding::to_odd:
            return (kept & 1) == 0;
        case Rounding::stochastic:
            break;
    }
    std::uint64_t fraction = 0;  // discarded/2^shift in units of 2^-64, truncated
    if (shift <= 64) {
        fraction = discarded << (64 - shift);
    } else if (shift < 128) {
        fraction = discarded >> (shift - 64);
    }
    return random_bits > ~fraction;  // the sum of the two carries out of 64 bits
}

}  // namespace detail

/// x rounded once into the format f. Any x: subnormals, infinities, NaN, signed zeros (the sign of a zero result is that
/// of x). A NaN becomes the positive quiet NaN, or max_finite in a format without NaN; see detail::rounded_*.
///
/// Stochastic: with t the discarded fraction of a quantum, 0 <= t < 1, the result is the neighbour farther from zero
/// exactly when floor(2^64 t) + random_bits >= 2^64. For uniform random_bits that has probability t, exactly when t has
/// at most 64 bits (always, for a float x and any format here; else to 2^-64). With only the upper n bits of random_bits
/// random and the rest 0, it is t truncated to n bits. A representable x returns itself.
[[nodiscard]] FAULTLINE_HD constexpr double round(double x, Format f, Rounding mode = Rounding::nearest_even,
                                                  std::uint64_t random_bits = 0) {
    if (is_exact(f)) return x;
    const auto bits = detail::bits_as<std::uint64_t>(x);
    const std::uint64_t sign = bits & detail::sign_bit64;
    const std::uint64_t magnitude = bits ^ sign;
    if (magnitude > detail::infinity64) return detail::rounded_nan(f);
    if (magnitude == detail::infinity64) return detail::rounded_infinity(f, sign);
    if (magnitude == 0) return x;

    const auto [significand, exponent] = detail::split(magnitude);
    if (exponent > f.emax) return detail::rounded_overflow(f, mode, sign);
    const int quantum = detail::quantum_exponent(exponent, f);
    const int shift = quantum - (exponent - 52);  // >= 0 because precision <= 53
    std::uint64_t kept = shift < 64 ? significand >> shift : 0;
    const std::uint64_t discarded = shift < 64 ? significand & ((std::uint64_t{1} << shift) - 1) : significand;
    if (discarded != 0 && detail::rounds_away(kept, discarded, shift, sign != 0, mode, random_bits)) ++kept;

    const double result = static_cast<double>(kept) * detail::power_of_two(quantum);  // exact
    if (result > max_finite(f)) return detail::rounded_overflow(f, mode, sign);
    return detail::with_sign(result, sign);
}

/// The code of x in the format, sign bit uppermost in its code_bits() bits. An x that is not a number of the format is
/// first rounded to nearest even; a NaN gets the quiet NaN code with all lower significand bits 0 (ieee) or the single one.
[[nodiscard]] FAULTLINE_HD constexpr std::uint64_t encode(double x, Format f) {
    if (f.precision == 53) return detail::bits_as<std::uint64_t>(x);  // binary64 and exact
    x = round(x, f);
    const auto bits = detail::bits_as<std::uint64_t>(x);
    const std::uint64_t magnitude = bits & ~detail::sign_bit64;
    const int trailing = f.precision - 1;
    const std::uint64_t sign = (bits >> 63) << (code_bits(f) - 1);
    const std::uint64_t all_ones_field = ((std::uint64_t{1} << exponent_bits(f)) - 1) << trailing;
    if (magnitude > detail::infinity64) {
        return f.nans == NanKind::ieee ? all_ones_field | (std::uint64_t{1} << (trailing - 1))
                                       : all_ones_field | ((std::uint64_t{1} << trailing) - 1);
    }
    if (magnitude == detail::infinity64) return sign | all_ones_field;
    if (magnitude == 0) return sign;
    const auto [significand, exponent] = detail::split(magnitude);
    if (exponent < f.emin) {
        return sign | (significand >> (f.emin - trailing - (exponent - 52)));
    }
    const std::uint64_t hidden = std::uint64_t{1} << trailing;
    const std::uint64_t field = static_cast<std::uint64_t>(exponent - f.emin + 1) << trailing;
    return sign | field | ((significand >> (52 - trailing)) - hidden);
}

/// The number a code stands for; bits above code_bits() are ignored. Every NaN code gives the positive quiet NaN; a
/// subnormal code of a format without subnormals gives a zero of its sign, as a flush-to-zero load does. A format made by
/// hand may leave exponent fields above emax unused: those codes stand for no number and give NaN.
[[nodiscard]] FAULTLINE_HD constexpr double decode(std::uint64_t code, Format f) {
    if (f.precision == 53) return detail::bits_as<double>(code);
    const int trailing = f.precision - 1;
    const std::uint64_t sign = ((code >> (code_bits(f) - 1)) & 1) << 63;
    const std::uint64_t all_ones_field = (std::uint64_t{1} << exponent_bits(f)) - 1;
    const std::uint64_t all_ones_trailing = (std::uint64_t{1} << trailing) - 1;
    const std::uint64_t field = (code >> trailing) & all_ones_field;
    const std::uint64_t fraction = code & all_ones_trailing;
    const bool top = field == all_ones_field;
    if (top && f.nans == NanKind::ieee) {
        return fraction != 0 ? detail::bits_as<double>(detail::quiet_nan64)
                             : detail::with_sign(detail::bits_as<double>(detail::infinity64), sign);
    }
    if (top && f.nans == NanKind::single_code && fraction == all_ones_trailing) {
        return detail::bits_as<double>(detail::quiet_nan64);
    }
    if (static_cast<int>(field) > f.emax - f.emin + 1) return detail::bits_as<double>(detail::quiet_nan64);
    if (field == 0) {
        const double magnitude =
            f.subnormals ? static_cast<double>(fraction) * detail::power_of_two(f.emin - trailing) : 0.0;
        return detail::with_sign(magnitude, sign);
    }
    const auto k = static_cast<double>((std::uint64_t{1} << trailing) | fraction);
    return detail::with_sign(k * detail::power_of_two(f.emin + static_cast<int>(field) - 1 - trailing), sign);
}

}  // namespace faultline

#include <faultline/format/round_lane.hpp>  // round<F, R>(float)
