// SPDX-License-Identifier: Apache-2.0
// Values that a copy by way of smaller types could lose, and arrays whose type changes where a piece ends.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace faultline::testing {

/// Infinities, zeros, subnormals of bf16, floats and doubles, NaNs of either sign: quiet, signalling, with payloads of each type.
inline std::vector<double> special_values() {
    std::vector<double> values;
    for (const double sign : {1.0, -1.0}) {
        for (const double size : {0.0, HUGE_VAL, 0x1p-133, 0x1.FCp-127, 0x1p-149, 0x1.FFFFFCp-127, 0x1p-150, 0x1p-1074,
                                  0x0.FFFFFFFFFFFFFp-1022, 0x1.FEp127, 0x1.FFFFFEp127, 0x1.FFFFFFFFFFFFFp1023})
            values.push_back(std::copysign(size, sign));
        const std::uint64_t negative = sign < 0 ? std::uint64_t{1} << 63 : 0;
        for (const std::uint64_t payload : std::initializer_list<std::uint64_t>{
                 0x8000000000000u, 0x8200000000000u, 0xFE00000000000u, 0x8000020000000u, 0xFFFFFE0000000u,
                 0x8000000000001u, 0xFFFFFFFFFFFFFu, 0x4000000000000u, 0x0200000000000u, 0x0000020000000u,
                 0x0000000000001u})
            values.push_back(std::bit_cast<double>(negative | 0x7FF0000000000000u | payload));
    }
    return values;
}

/// An array for a copy in pieces of `bytes` bytes.
struct Pieces {
    std::string what;
    std::vector<double> values;
};

/// Numbers of bf16 as far as said, then, from elements where pieces end and one before and behind, values of wider types; and every
/// special value in the first, a middle and the last place of a piece.
inline std::vector<Pieces> arrays_of_pieces(std::size_t bytes) {
    const std::size_t shorts = bytes / 2, floats = bytes / 4, doubles = bytes / 8;
    const auto plain = [](std::size_t count) {
        std::vector<double> values(count);
        for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<double>(i % 255) - 127;
        return values;
    };
    std::vector<Pieces> all{{"bf16 in whole pieces and a rest", plain(2 * shorts + 3)}, {"one value", plain(1)}};
    const auto with = [&](const std::string& what, std::size_t count, std::size_t at, double value) {
        all.push_back({what + " at " + std::to_string(at), plain(count)});
        all.back().values[at] = value;
    };
    constexpr double of_float = 1 + 0x1p-20, of_double = 1 + 0x1p-50;
    for (const std::size_t at : {std::size_t{0}, shorts - 1, shorts, 2 * shorts - 1, 2 * shorts + 2})
        with("a float", 2 * shorts + 3, at, of_float);
    for (const std::size_t at : {std::size_t{0}, floats - 1, floats, 4 * floats, 5 * floats - 1, 5 * floats + 1})
        with("a double", 5 * floats + 2, at, of_double);
    // bf16, floats from the second piece on, doubles from the fourth on, and numbers of bf16 behind those.
    Pieces changing{"bf16, floats, doubles, bf16", plain(shorts + 2 * floats + 3 * doubles + 5)};
    changing.values[shorts + 1] = of_float;
    changing.values[shorts + 2 * floats + doubles - 1] = of_double;
    all.push_back(std::move(changing));
    const std::vector<double> special = special_values();
    for (const std::size_t at : {std::size_t{0}, shorts - special.size(), shorts, 2 * shorts - special.size()}) {
        all.push_back({"all special values at " + std::to_string(at), plain(2 * shorts)});
        std::copy(special.begin(), special.end(), all.back().values.begin() + static_cast<std::ptrdiff_t>(at));
    }
    for (const double x : special) {
        const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
        all.push_back({"the value of bits " + std::to_string(bits), plain(shorts + 7)});
        all.back().values[shorts / 2] = all.back().values[shorts + 6] = x;
    }
    return all;
}

}  // namespace faultline::testing
