// SPDX-License-Identifier: Apache-2.0
#include <faultline/format/bulk.hpp>
#include <faultline/format/bulk_kernels.hpp>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace faultline {
namespace {

using detail::LaneFamily;
using detail::LaneFormat;
using detail::stochastic_group;

/// Element by element: formats that no lane serves (without subnormals, or of an odd range).
template <class T>
void round_one_by_one(const T* from, T* to, std::size_t count, Format f, Rounding mode, RandomStream stream,
                      std::uint64_t counter) {
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t random = mode == Rounding::stochastic ? stochastic_bits(stream, counter + i) : 0;
        to[i] = static_cast<T>(round(static_cast<double>(from[i]), f, mode, random));
    }
}

/// Stochastic: whole groups of random numbers by the fused kernels, the rest through a buffer of one group.
template <class T>
void round_stochastic(const T* from, T* to, std::size_t count, const LaneFormat<T>& lane, RandomStream stream,
                      std::uint64_t counter) {
    while (count > 0) {
        const std::uint64_t group = counter / stochastic_group;
        const auto inside = static_cast<std::size_t>(counter % stochastic_group);
        std::size_t done = std::min(count, static_cast<std::size_t>(stochastic_group) - inside);
        bool fused = false;
        if constexpr (std::is_same_v<T, float>) {
            if (inside == 0 && count >= stochastic_group && lane.family == LaneFamily::shared && lane.shift <= 16) {
                const std::size_t groups = count / stochastic_group;
                detail::round_stochastic_shared(from, to, groups, lane, stream.key, group);
                done = groups * stochastic_group;
                fused = true;
            }
        }
        if (!fused) {
            std::array<std::uint32_t, stochastic_group> words;
            detail::stochastic_words(words.data(), stream.key, group);
            detail::round_with_words(from, to, done, lane, words.data() + inside);
        }
        from += done;
        to += done;
        count -= done;
        counter += done;
    }
}

template <class T>
void round_array(const T* from, T* to, std::size_t count, Format f, Rounding mode, RandomStream stream,
                 std::uint64_t counter) {
    mode = detail::lane_mode<T>(f, mode);
    const LaneFormat<T> lane = detail::lane_format<T>(f, mode);
    if (lane.family == LaneFamily::none) {
        round_one_by_one(from, to, count, f, mode, stream, counter);
    } else if (mode == Rounding::stochastic) {
        round_stochastic(from, to, count, lane, stream, counter);
    } else if constexpr (std::is_same_v<T, float>) {
        detail::round_float(from, to, count, lane, mode);
    } else {
        detail::round_double(from, to, count, lane, mode);
    }
}

void check_lengths(std::size_t from, std::size_t to) {
    if (from != to) {
        throw std::invalid_argument("round_bulk: " + std::to_string(from) + " values into an array of " +
                                    std::to_string(to) + ": expected equal lengths");
    }
}

void check_float(Format f) {
    if (!fits_float(f)) throw std::invalid_argument("round_bulk: expected a format all of whose numbers are floats");
}

}  // namespace

void round_bulk(std::span<float> values, Format f, Rounding mode, RandomStream stream, std::uint64_t first_counter) {
    round_bulk(std::span<const float>(values), values, f, mode, stream, first_counter);
}

void round_bulk(std::span<double> values, Format f, Rounding mode, RandomStream stream, std::uint64_t first_counter) {
    round_bulk(std::span<const double>(values), values, f, mode, stream, first_counter);
}

void round_bulk(std::span<const float> from, std::span<float> to, Format f, Rounding mode, RandomStream stream,
                std::uint64_t first_counter) {
    check_lengths(from.size(), to.size());
    check_float(f);
    if (is_exact(f)) {
        if (from.data() != to.data()) std::copy(from.begin(), from.end(), to.begin());
        return;
    }
    round_array(from.data(), to.data(), from.size(), f, mode, stream, first_counter);
}

void round_bulk(std::span<const double> from, std::span<double> to, Format f, Rounding mode, RandomStream stream,
                std::uint64_t first_counter) {
    check_lengths(from.size(), to.size());
    if (is_exact(f)) {
        if (from.data() != to.data()) std::copy(from.begin(), from.end(), to.begin());
        return;
    }
    round_array(from.data(), to.data(), from.size(), f, mode, stream, first_counter);
}

void round_bulk(std::span<const double> from, std::span<float> to, Format f, Rounding mode, RandomStream stream,
                std::uint64_t first_counter) {
    check_lengths(from.size(), to.size());
    check_float(f);
    if (is_exact(f)) throw std::invalid_argument("round_bulk: doubles into floats: expected a format that rounds");
    std::array<double, 1024> buffer;  // a few pages of cache: rounded in double, then narrowed, which is exact
    for (std::size_t first = 0; first < from.size(); first += buffer.size()) {
        const std::size_t length = std::min(buffer.size(), from.size() - first);
        round_array(from.data() + first, buffer.data(), length, f, mode, stream, first_counter + first);
        for (std::size_t i = 0; i < length; ++i) to[first + i] = static_cast<float>(buffer[i]);
    }
}

}  // namespace faultline
