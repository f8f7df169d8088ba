// SPDX-License-Identifier: Apache-2.0
// round() again as short branch-free sequences on one float or double, which a compiler turns into vector code: the
// bodies of round_bulk and of round<F, R>(float). Every result has the bits of round(); the tests compare them.
//
// Two families of formats, seen from the container T (float or double):
//   shared   the exponent range of T itself (bf16 and tf32 in float): rounding is an addition to the bits of T, and the
//            carry out of the significand moves the exponent, up to infinity, all by itself.
//            Saturating formats of that range cap the result (shared_saturating).
//   narrow   a smaller range (fp16 and all below; every format in double): the place of the last bit depends on the
//            exponent, and both ends of the range want a decision. Formats that overflow to NaN, whose sign is not that of
//            the operand, are apart (narrow_to_nan), for the others are spared that question.
#pragma once

#include <faultline/format/format.hpp>
#include <faultline/random/bits_as.hpp>

namespace faultline {

/// Whether every number of f is a float, so that a float can hold the result. True of `exact`, in which a float stays.
[[nodiscard]] FAULTLINE_HD constexpr bool fits_float(Format f) {
    return is_exact(f) || (f.precision <= 24 && f.emax <= 127 && f.emin - (f.subnormals ? f.precision - 1 : 0) >= -149);
}

namespace detail {

/// Integers of the container. Magnitudes are signed (they never reach the sign bit) because AVX2 compares signed only.
template <class T>
struct Lane;
template <>
struct Lane<float> {
    using Unsigned = std::uint32_t;
    using Signed = std::int32_t;
    static constexpr int trailing = 23, bias = 127, width = 32;
};
template <>
struct Lane<double> {
    using Unsigned = std::uint64_t;
    using Signed = std::int64_t;
    static constexpr int trailing = 52, bias = 1023, width = 64;
};

enum class LaneFamily : unsigned char { none, shared, shared_saturating, narrow, narrow_to_nan };

FAULTLINE_HD constexpr bool is_shared(LaneFamily family) {
    return family == LaneFamily::shared || family == LaneFamily::shared_saturating;
}

/// What the lanes need to know of a format and a mode, worked out once per array.
template <class T>
struct LaneFormat {
    using Signed = typename Lane<T>::Signed;
    LaneFamily family = LaneFamily::none;  ///< none: only round() itself will do
    Signed shift = 0;                      ///< bits discarded in the normal range
    Signed emin_field = 0;                 ///< exponent field of T at emin
    Signed beyond = 0;                     ///< bits of T of 2^(emax+1)
    T max = 0;                             ///< largest finite number
    T overflow[2] = {0, 0};                ///< magnitude that overflow becomes, by sign
    T infinite = 0;                        ///< magnitude that an infinity becomes
    T nan = 0;                             ///< what a NaN becomes, sign included
};

/// The mode to round a T into f with: where f has the precision and the range of T, a T is a number of f already, nothing
/// is discarded, and cutting off nothing (toward_zero) is all there is to do in every mode.
template <class T>
FAULTLINE_HD constexpr Rounding lane_mode(Format f, Rounding mode) {
    const bool all_of_it =
        f.precision == Lane<T>::trailing + 1 && f.emin == 1 - Lane<T>::bias && f.emax == Lane<T>::bias;
    return all_of_it ? Rounding::toward_zero : mode;
}

template <class T>
FAULTLINE_HD constexpr LaneFormat<T> lane_format(Format f, Rounding mode) {
    using L = Lane<T>;
    using Signed = typename L::Signed;
    LaneFormat<T> lane;
    const int shift = L::trailing + 1 - f.precision;
    if (is_exact(f) || !f.subnormals || shift < 0) return lane;
    const bool shared = f.emin == 1 - L::bias && f.emax == L::bias;
    if (shift == 0 && !(shared && mode == Rounding::toward_zero)) return lane;  // see lane_mode
    // Narrow: the smallest number is normal in T, and 2^(emax+1+shift), the largest constant below, is finite in T.
    const bool narrow = f.emin - (f.precision - 1) >= 1 - L::bias && f.emax + 1 + shift <= L::bias;
    const bool to_nan = !f.saturates && !f.infinities;
    if (shared && !to_nan) {
        lane.family = f.saturates ? LaneFamily::shared_saturating : LaneFamily::shared;
    } else if (narrow) {
        lane.family = to_nan ? LaneFamily::narrow_to_nan : LaneFamily::narrow;
    } else {
        return lane;
    }
    lane.shift = shift;
    lane.emin_field = f.emin + L::bias;
    lane.beyond = static_cast<Signed>(f.emax + 1 + L::bias) << L::trailing;
    lane.max = static_cast<T>(max_finite(f));
    const auto magnitude = [](double x) {
        return static_cast<T>(bits_as<double>(bits_as<std::uint64_t>(x) & ~sign_bit64));
    };
    lane.overflow[0] = magnitude(rounded_overflow(f, mode, 0));
    lane.overflow[1] = magnitude(rounded_overflow(f, mode, sign_bit64));
    lane.infinite = magnitude(rounded_infinity(f, 0));
    lane.nan = static_cast<T>(rounded_nan(f));
    return lane;
}

/// Largest magnitude bits: above it NaN.
template <class T>
inline constexpr typename Lane<T>::Signed lane_infinity = static_cast<typename Lane<T>::Signed>(2 * Lane<T>::bias + 1)
                                                          << Lane<T>::trailing;

template <class T>
FAULTLINE_HD constexpr typename Lane<T>::Signed lane_magnitude(T x) {
    using L = Lane<T>;
    return static_cast<typename L::Signed>(bits_as<typename L::Unsigned>(x) & (~typename L::Unsigned{0} >> 1));
}

/// The result: magnitude bits under the sign of x; the NaN of the format, with its own sign, where x is one. A NaN that
/// the format's overflow makes is positive as well.
template <LaneFamily Family, class T>
FAULTLINE_HD constexpr T lane_result(typename Lane<T>::Signed result, T x, const LaneFormat<T>& f) {
    using L = Lane<T>;
    using Unsigned = typename L::Unsigned;
    Unsigned sign = bits_as<Unsigned>(x) & (Unsigned{1} << (L::width - 1));
    if constexpr (Family == LaneFamily::narrow_to_nan) sign = result > lane_infinity<T> ? 0 : sign;
    const T with_sign = bits_as<T>(static_cast<Unsigned>(result) | sign);
    return x != x ? f.nan : with_sign;
}

/// What is added to a magnitude before the lowest `shift` bits are cut: carries out of them exactly when the mode rounds
/// away from zero. Not for to_odd. `random`: uniform, in the lowest `shift` bits.
template <Rounding R, class Signed>
FAULTLINE_HD constexpr Signed lane_addend(Signed magnitude, Signed shift, bool negative, Signed random) {
    const Signed mask = (Signed{1} << shift) - 1;
    if constexpr (R == Rounding::nearest_even) return (mask >> 1) + ((magnitude >> shift) & 1);
    if constexpr (R == Rounding::nearest_away) return (mask >> 1) + 1;
    if constexpr (R == Rounding::upward) return negative ? 0 : mask;
    if constexpr (R == Rounding::downward) return negative ? mask : 0;
    if constexpr (R == Rounding::stochastic) return random;
    return 0;
}

/// `random`: for stochastic, `shift` uniform bits in the lowest places. The sign bit rides along: the carry ends at the
/// latest in the exponent field, where it makes the infinity (of magnitude bits `infinite`, or the cap).
template <Rounding R, LaneFamily Family, class T>
FAULTLINE_HD constexpr T lane_round_shared(T x, const LaneFormat<T>& f, typename Lane<T>::Signed random) {
    using Signed = typename Lane<T>::Signed;
    using Unsigned = typename Lane<T>::Unsigned;
    const auto bits = bits_as<Unsigned>(x);
    const Unsigned mask = (Unsigned{1} << f.shift) - 1;
    Unsigned result = 0;
    if constexpr (R == Rounding::to_odd) {
        result = (bits & ~mask) | ((bits & mask) != 0 ? mask + 1 : 0);
    } else {
        const bool negative = bits_as<Signed>(x) < 0;
        const auto addend = static_cast<Unsigned>(lane_addend<R>(static_cast<Signed>(bits), f.shift, negative, random));
        result = (bits + addend) & ~mask;
    }
    if constexpr (Family == LaneFamily::shared_saturating) {
        const auto magnitude = static_cast<Signed>(result & (~Unsigned{0} >> 1));
        const Signed cap = bits_as<Signed>(f.infinite);
        return lane_result<Family>(magnitude < cap ? magnitude : cap, x, f);
    } else {
        return x != x ? f.nan : bits_as<T>(result);
    }
}

/// Nearest even in a narrow format: adding and subtracting C = 2^(shift+e), e the exponent of x but at least emin, leaves
/// x rounded by the adder to the spacing of the format at e. Relies on the default rounding mode of the machine.
template <LaneFamily Family, class T>
FAULTLINE_HD constexpr T lane_round_narrow_nearest(T x, const LaneFormat<T>& f) {
    using L = Lane<T>;
    using Signed = typename L::Signed;
    const Signed magnitude = lane_magnitude(x);
    const Signed capped = magnitude < f.beyond ? magnitude : f.beyond;
    const Signed exponent = capped & lane_infinity<T>;
    const Signed emin_bits = f.emin_field << L::trailing;
    const T c = bits_as<T>((exponent > emin_bits ? exponent : emin_bits) + (f.shift << L::trailing));
    const T rounded = (bits_as<T>(capped) + c) - c;
    return lane_result<Family>(bits_as<Signed>(rounded > f.max ? f.infinite : rounded), x, f);
}

/// Any other mode in a narrow format. `random`: uniform over all bits of the container, as unsigned.
template <Rounding R, LaneFamily Family, class T>
FAULTLINE_HD constexpr T lane_round_narrow(T x, const LaneFormat<T>& f, typename Lane<T>::Unsigned random) {
    using L = Lane<T>;
    using Signed = typename L::Signed;
    using Unsigned = typename L::Unsigned;
    constexpr Signed hidden = Signed{1} << L::trailing;
    const Signed magnitude = lane_magnitude(x);
    const bool negative = bits_as<Signed>(x) < 0;
    const Signed field = magnitude >> L::trailing;
    const Signed significand = (magnitude & (hidden - 1)) | (field != 0 ? hidden : 0);
    const Signed at_least_one = field > 1 ? field : 1;
    const Signed place = at_least_one > f.emin_field ? at_least_one : f.emin_field;
    const Signed full_shift = f.shift + (place - at_least_one);
    // Beyond trailing + 3 the discarded part stays below one half whatever the shift.
    const Signed shift = full_shift < L::trailing + 3 ? full_shift : L::trailing + 3;
    Signed kept = 0;
    if constexpr (R == Rounding::stochastic) {
        const Signed discarded = significand & ((Signed{1} << shift) - 1);
        const Signed left = full_shift < L::width ? L::width - full_shift : 0;
        const Signed too_far = full_shift - L::width;
        const Signed right = too_far < 0 ? 0 : too_far < L::width - 1 ? too_far : L::width - 1;
        const Unsigned fraction = (static_cast<Unsigned>(discarded) << left) >> right;
        kept = (significand >> shift) + (random > static_cast<Unsigned>(~fraction) ? 1 : 0);
    } else if constexpr (R == Rounding::to_odd) {
        kept = (significand >> shift) | ((significand & ((Signed{1} << shift) - 1)) != 0 ? 1 : 0);
    } else {
        kept = (significand + lane_addend<R>(significand, shift, negative, Signed{0})) >> shift;
    }
    const T scale = bits_as<T>((place + f.shift - L::trailing) << L::trailing);
    T result = static_cast<T>(kept) * scale;  // exact, or beyond the range of T and so of f
    result = result > f.max ? (negative ? f.overflow[1] : f.overflow[0]) : result;
    result = magnitude >= lane_infinity<T> ? f.infinite : result;
    return lane_result<Family>(bits_as<Signed>(result), x, f);
}

}  // namespace detail

/// round(x, F, R, random_bits) on floats, the same bits, inlined and free of branches. `exact` returns x.
template <Format F, Rounding R = Rounding::nearest_even>
[[nodiscard]] FAULTLINE_HD constexpr float round(float x, std::uint64_t random_bits = 0) {
    static_assert(fits_float(F), "a float cannot hold every number of this format");
    constexpr Rounding mode = detail::lane_mode<float>(F, R);
    constexpr detail::LaneFormat<float> lane = detail::lane_format<float>(F, mode);
    if constexpr (is_exact(F)) {
        return x;
    } else if constexpr (detail::is_shared(lane.family)) {
        const std::uint64_t random = mode == Rounding::stochastic ? random_bits >> (64 - lane.shift) : 0;
        return detail::lane_round_shared<mode, lane.family>(x, lane, static_cast<std::int32_t>(random));
    } else if constexpr (lane.family != detail::LaneFamily::none && R == Rounding::nearest_even) {
        return detail::lane_round_narrow_nearest<lane.family>(x, lane);
    } else if constexpr (lane.family != detail::LaneFamily::none && R != Rounding::stochastic) {
        return detail::lane_round_narrow<R, lane.family>(x, lane, 0u);
    } else {  // stochastic takes all 64 random bits, which a 32-bit lane does not hold
        return static_cast<float>(round(static_cast<double>(x), F, R, random_bits));
    }
}

}  // namespace faultline
