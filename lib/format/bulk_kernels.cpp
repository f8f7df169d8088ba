// SPDX-License-Identifier: Apache-2.0
#include <faultline/base/clones.hpp>
#include <faultline/format/bulk_kernels.hpp>

// The lanes are called from functions compiled for several instruction sets: inlined, they take the caller's.
#define FAULTLINE_INLINE [[gnu::always_inline]] inline

namespace faultline::detail {
namespace {

template <class T, class Round>
FAULTLINE_INLINE void for_each(const T* from, T* to, std::size_t count, Round round_one) {
    // from and to may be the same array, which does not make one iteration depend on another.
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) to[i] = round_one(from[i]);
}

template <Rounding R, LaneFamily Family, class T>
FAULTLINE_INLINE void round_family(const T* from, T* to, std::size_t count, const LaneFormat<T>& lane) {
    for_each(
        from, to, count, [=](T x) __attribute__((always_inline)) {
            if constexpr (is_shared(Family)) {
                return lane_round_shared<R, Family>(x, lane, 0);
            } else if constexpr (R == Rounding::nearest_even) {
                return lane_round_narrow_nearest<Family>(x, lane);
            } else {
                return lane_round_narrow<R, Family>(x, lane, 0);
            }
        });
}

template <Rounding R, class T>
FAULTLINE_INLINE void round_mode(const T* from, T* to, std::size_t count, const LaneFormat<T>& lane) {
    switch (lane.family) {
        case LaneFamily::shared:
            return round_family<R, LaneFamily::shared>(from, to, count, lane);
        case LaneFamily::shared_saturating:
            return round_family<R, LaneFamily::shared_saturating>(from, to, count, lane);
        case LaneFamily::narrow:
            return round_family<R, LaneFamily::narrow>(from, to, count, lane);
        case LaneFamily::narrow_to_nan:
            return round_family<R, LaneFamily::narrow_to_nan>(from, to, count, lane);
        case LaneFamily::none:
            break;
    }
}

template <class T>
FAULTLINE_INLINE void round_array(const T* from, T* to, std::size_t count, const LaneFormat<T>& lane, Rounding mode) {
    switch (mode) {
        case Rounding::nearest_even:
            return round_mode<Rounding::nearest_even>(from, to, count, lane);
        case Rounding::nearest_away:
            return round_mode<Rounding::nearest_away>(from, to, count, lane);
        case Rounding::toward_zero:
            return round_mode<Rounding::toward_zero>(from, to, count, lane);
        case Rounding::upward:
            return round_mode<Rounding::upward>(from, to, count, lane);
        case Rounding::downward:
            return round_mode<Rounding::downward>(from, to, count, lane);
        case Rounding::to_odd:
            return round_mode<Rounding::to_odd>(from, to, count, lane);
        case Rounding::stochastic:
            break;
    }
}

}  // namespace

FAULTLINE_CLONES void round_float(const float* from, float* to, std::size_t count, LaneFormat<float> lane,
                                  Rounding mode) {
    round_array(from, to, count, lane, mode);
}

FAULTLINE_CLONES void round_double(const double* from, double* to, std::size_t count, LaneFormat<double> lane,
                                   Rounding mode) {
    round_array(from, to, count, lane, mode);
}

namespace {

// One iteration of the inner loop is one lane: one block, eight elements, each contiguous from lane to lane. The eight are
// written out because the vectoriser wants no loop inside. Surplus: 16 random bits are more than the format discards.
template <bool Surplus>
FAULTLINE_INLINE void round_groups(const float* from, float* to, std::size_t groups, const LaneFormat<float>& lane,
                                   std::uint64_t key, std::uint64_t group) {
    for (std::size_t g = 0; g < groups; ++g, from += stochastic_group, to += stochastic_group) {
#pragma GCC ivdep
        for (int l = 0; l < stochastic_lanes; ++l) {
            const Block4x32 block = stochastic_block(key, group + g, static_cast<std::uint32_t>(l), 0);
            const auto one = [&](int at, std::uint32_t random) __attribute__((always_inline)) {
                if constexpr (Surplus) random >>= 16 - lane.shift;
                to[at + l] = lane_round_shared<Rounding::stochastic, LaneFamily::shared>(
                    from[at + l], lane, static_cast<std::int32_t>(random));
            };
            one(0, block.word[0] & 0xFFFFu);
            one(16, block.word[1] & 0xFFFFu);
            one(32, block.word[2] & 0xFFFFu);
            one(48, block.word[3] & 0xFFFFu);
            one(64, block.word[0] >> 16);
            one(80, block.word[1] >> 16);
            one(96, block.word[2] >> 16);
            one(112, block.word[3] >> 16);
        }
    }
}

/// round_one(x, i) of a family for elements with given random words. The words are read from a buffer that `to` never
/// overlaps.
template <class T, class Round>
FAULTLINE_INLINE void for_each_word(const T* from, T* to, std::size_t count, const std::uint32_t* words,
                                    Round round_one) {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) to[i] = round_one(from[i], words[i]);
}

template <LaneFamily Family, class T>
FAULTLINE_INLINE void round_words(const T* from, T* to, std::size_t count, const LaneFormat<T>& lane,
                                  const std::uint32_t* words) {
    for_each_word(
        from, to, count, words, [=](T x, std::uint32_t word) __attribute__((always_inline)) {
            using Unsigned = typename Lane<T>::Unsigned;
            const Unsigned random = static_cast<Unsigned>(word) << (Lane<T>::width - 32);
            if constexpr (is_shared(Family)) {
                return lane_round_shared<Rounding::stochastic, Family>(
                    x, lane, static_cast<typename Lane<T>::Signed>(random >> (Lane<T>::width - lane.shift)));
            } else {
                return lane_round_narrow<Rounding::stochastic, Family>(x, lane, random);
            }
        });
}

template <class T>
FAULTLINE_INLINE void round_any_words(const T* from, T* to, std::size_t count, const LaneFormat<T>& lane,
                                      const std::uint32_t* words) {
    switch (lane.family) {
        case LaneFamily::shared:
            return round_words<LaneFamily::shared>(from, to, count, lane, words);
        case LaneFamily::shared_saturating:
            return round_words<LaneFamily::shared_saturating>(from, to, count, lane, words);
        case LaneFamily::narrow:
            return round_words<LaneFamily::narrow>(from, to, count, lane, words);
        case LaneFamily::narrow_to_nan:
            return round_words<LaneFamily::narrow_to_nan>(from, to, count, lane, words);
        case LaneFamily::none:
            break;
    }
}

}  // namespace

FAULTLINE_CLONES void round_stochastic_shared(const float* from, float* to, std::size_t groups, LaneFormat<float> lane,
                                              std::uint64_t key, std::uint64_t group) {
    if (lane.shift == 16) {
        round_groups<false>(from, to, groups, lane, key, group);
    } else {
        round_groups<true>(from, to, groups, lane, key, group);
    }
}

FAULTLINE_CLONES void stochastic_words(std::uint32_t* words, std::uint64_t key, std::uint64_t group) {
#pragma GCC ivdep
    for (int l = 0; l < stochastic_lanes; ++l) {
        const Block4x32 upper = stochastic_block(key, group, static_cast<std::uint32_t>(l), 0);
        const Block4x32 lower = stochastic_block(key, group, static_cast<std::uint32_t>(l), 1);
        const auto pair = [&](int at, std::uint32_t high, std::uint32_t low) __attribute__((always_inline)) {
            words[at + l] = (high << 16) | (low & 0xFFFFu);
            words[at + l + 4 * stochastic_lanes] = (high & 0xFFFF0000u) | (low >> 16);
        };
        pair(0, upper.word[0], lower.word[0]);
        pair(16, upper.word[1], lower.word[1]);
        pair(32, upper.word[2], lower.word[2]);
        pair(48, upper.word[3], lower.word[3]);
    }
}

FAULTLINE_CLONES void round_with_words(const float* from, float* to, std::size_t count, LaneFormat<float> lane,
                                       const std::uint32_t* words) {
    round_any_words(from, to, count, lane, words);
}

namespace {

/// Stochastic rounding of doubles all of which are zero or normal in a narrow format and not beyond its largest number:
/// there `shift` bits are discarded whatever the exponent, and an addition to the bits of the double rounds them, as in
/// the shared family. Of the random word only the upper `shift` bits (32 at most) can matter: the discarded bits stand at
/// the top of the 64 that they are compared with. False, and `to` not all written, where another double is among them.
FAULTLINE_INLINE bool round_normal_words(const double* from, double* to, std::size_t count,
                                         const LaneFormat<double>& lane, const std::uint32_t* words) {
    const std::int64_t least = lane.emin_field << Lane<double>::trailing, most = bits_as<std::int64_t>(lane.max);
    const std::uint64_t kept = ~((std::uint64_t{1} << lane.shift) - 1);
    const auto up = static_cast<unsigned>(lane.shift > 32 ? lane.shift - 32 : 0);
    const auto down = static_cast<unsigned>(lane.shift < 32 ? 32 - lane.shift : 0);
    std::int64_t others = 0;
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
        const auto bits = bits_as<std::uint64_t>(from[i]);
        const std::int64_t magnitude = lane_magnitude(from[i]);
        others |= (magnitude == 0 ? 0 : magnitude - least) | (most - magnitude);  // negative outside
        const std::uint64_t random = (std::uint64_t{words[i]} << up) >> down;
        to[i] = bits_as<double>((bits + random) & kept);
    }
    return others >= 0;
}

}  // namespace

FAULTLINE_CLONES void round_with_words(const double* from, double* to, std::size_t count, LaneFormat<double> lane,
                                       const std::uint32_t* words) {
    double rounded[stochastic_group];  // from and to may be the same array
    const bool narrow = lane.family == LaneFamily::narrow || lane.family == LaneFamily::narrow_to_nan;
    if (narrow && count <= stochastic_group && round_normal_words(from, rounded, count, lane, words)) {
        for (std::size_t i = 0; i < count; ++i) to[i] = rounded[i];
        return;
    }
    round_any_words(from, to, count, lane, words);
}

}  // namespace faultline::detail
