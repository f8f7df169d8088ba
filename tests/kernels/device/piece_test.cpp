// SPDX-License-Identifier: Apache-2.0
// What the host stores of a large copy, read back by the definition of each type: small pieces, on any machine.
#include <faultline/device/piece.hpp>

#include <cstring>

#include <gtest/gtest.h>

#include "special_values.hpp"

namespace faultline::device {
namespace {

/// bf16 is the upper half of a float. A NaN's sign and payload are the upper bits of the double's; the conversion of C++ may make
/// a signalling NaN quiet, so that they are moved by hand.
double of_float_bits(std::uint32_t bits) {
    if ((bits & 0x7F800000u) != 0x7F800000u) return static_cast<double>(std::bit_cast<float>(bits));
    return std::bit_cast<double>(std::uint64_t{bits & 0x80000000u} << 32 | 0x7FF0000000000000u |
                                 std::uint64_t{bits & 0x007FFFFFu} << 29);
}

std::vector<double> read_back(PieceType type, const unsigned char* slot, std::size_t count) {
    std::vector<double> values(count);
    for (std::size_t i = 0; i < count; ++i) {
        std::uint16_t half = 0;
        std::uint32_t word = 0;
        if (type == PieceType::bf16) {
            std::memcpy(&half, slot + 2 * i, 2);
            values[i] = of_float_bits(std::uint32_t{half} << 16);
        } else if (type == PieceType::fp32) {
            std::memcpy(&word, slot + 4 * i, 4);
            values[i] = of_float_bits(word);
        } else {
            std::memcpy(&values[i], slot + 8 * i, 8);
        }
    }
    return values;
}

TEST(Pieces, HoldEveryBit) {
    constexpr std::size_t bytes = 1024;
    std::vector<std::uint64_t> slot(bytes / 8 + 1);
    std::size_t by_type[3] = {};
    for (const testing::Pieces& array : testing::arrays_of_pieces(bytes)) {
        SCOPED_TRACE(array.what);
        PieceType type = PieceType::bf16;
        std::vector<double> found;
        while (found.size() < array.values.size()) {
            slot.back() = 0xA5A5A5A5A5A5A5A5u;  // behind its end
            const std::size_t n =
                store_piece(type, array.values.data() + found.size(), array.values.size() - found.size(),
                            reinterpret_cast<unsigned char*>(slot.data()), bytes);
            ASSERT_GT(n, 0u);
            ASSERT_EQ(slot.back(), 0xA5A5A5A5A5A5A5A5u);
            ++by_type[static_cast<int>(type)];
            const std::vector<double> piece = read_back(type, reinterpret_cast<unsigned char*>(slot.data()), n);
            found.insert(found.end(), piece.begin(), piece.end());
        }
        EXPECT_EQ(found.size(), array.values.size());
        EXPECT_EQ(std::memcmp(found.data(), array.values.data(), found.size() * sizeof(double)), 0);
    }
    for (const std::size_t pieces : by_type) EXPECT_GT(pieces, 10u);
}

}  // namespace
}  // namespace faultline::device
