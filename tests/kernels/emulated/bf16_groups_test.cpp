// SPDX-License-Identifier: Apache-2.0
// Ampere's groups of eight products by Hopper's unit and an anchor, both by the rule of lib/tensor_core, bit for bit.
#include <faultline/emulated/bf16_groups.hpp>

#include <array>
#include <cstdint>
#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include <faultline/tensor_core/fused_add.hpp>

namespace faultline {
namespace {

constexpr MatrixUnit ampere{8, 24, OutputFormat::f32_rz, -126, -126, 0, ZeroOperand::ignored};
constexpr MatrixUnit hopper{16, 25, OutputFormat::f32_rz, -126, -126, 0, ZeroOperand::ignored};

float float_of(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
double value_of(std::uint16_t bits) { return static_cast<double>(float_of(std::uint32_t{bits} << 16)); }

using emulated::groups::terms;
using Operands = std::array<std::uint16_t, terms>;

std::uint32_t pair_of(std::uint32_t low, std::uint32_t high) { return low | high << 16; }
std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof x);
    return bits;
}

/// The anchors of a row with two columns, as a thread finds them: by pairs of columns, or by pairs of terms.
std::uint32_t anchors_of(const Operands& x, const std::array<Operands, 2>& y, const std::array<float, 2>& c,
                         bool by_columns) {
    using namespace emulated::groups;
    std::uint32_t products = 0, of[2] = {};
    for (std::size_t t = 0; t < terms; ++t)
        products = larger_sums(exponents(pair_of(x[t], x[t])), magnitudes(pair_of(y[0][t], y[1][t])), products);
    for (std::size_t t = 0; t < terms; t += 2)
        for (std::size_t n = 0; n < 2; ++n)
            of[n] = larger_sums(exponents(pair_of(x[t], x[t + 1])), magnitudes(pair_of(y[n][t], y[n][t + 1])), of[n]);
    if (!by_columns) {
        const std::uint32_t even = pair_of(of[0] & 0xFFFF, of[1] & 0xFFFF), odd = pair_of(of[0] >> 16, of[1] >> 16);
        products = larger_sums(even, 0, odd);
    }
    return anchors(products, pair_of(bits_of(c[0]) >> 16, bits_of(c[1]) >> 16));
}
/// A fused add of eight products by Hopper's unit, the other eight an anchor and its negative.
float anchored(const Operands& x, const Operands& y, std::uint16_t anchor, float c) {
    const double a = value_of(anchor);
    return static_cast<float>(fused::add(
        hopper, [&](int t) { return t < terms       ? value_of(x[static_cast<std::size_t>(t)])
                                    : t < terms + 2 ? a
                                                    : 0.0; },
        [&](int t) {
            return t < terms        ? value_of(y[static_cast<std::size_t>(t)])
                   : t == terms     ? 1.0
                   : t == terms + 1 ? -1.0
                                    : 0.0;
        },
        hopper.terms, static_cast<double>(c)));
}
float by_ampere(const Operands& x, const Operands& y, float c) {
    return static_cast<float>(fused::add(
        ampere, [&](int t) { return value_of(x[static_cast<std::size_t>(t)]); },
        [&](int t) { return value_of(y[static_cast<std::size_t>(t)]); }, terms, static_cast<double>(c)));
}
bool are_decided(const Operands& x, const Operands& y) { return emulated::groups::are_decided(x.data(), y.data(), 1); }

/// Biased exponents of operands and of c, from the first to the last.
struct Range {
    int operands, operand_count, sums, sum_count;
    bool decided;  ///< no anchor is low
};

class Bf16Groups : public ::testing::TestWithParam<Range> {};

TEST_P(Bf16Groups, HaveTheRulesBits) {
    const Range range = GetParam();
    std::mt19937_64 random(7);
    const auto any = [&](int first, int count) {
        return static_cast<std::uint32_t>(first) + static_cast<std::uint32_t>(random() % static_cast<unsigned>(count));
    };
    const auto operands = [&] {
        Operands x;
        const bool zeros = random() % 16 == 0;
        for (std::uint16_t& v : x) {
            const auto sign = static_cast<std::uint32_t>(random() % 2) << 15;
            const bool zero = zeros || random() % 16 == 0;
            v = static_cast<std::uint16_t>(zero ? sign
                                                : sign | any(range.operands, range.operand_count) << 7 | any(0, 128));
        }
        return x;
    };
    const auto sum = [&] {
        const auto sign = static_cast<std::uint32_t>(random() % 2) << 31;
        const float c =
            random() % 8 == 0 ? 0.0f : float_of(sign | any(range.sums, range.sum_count) << 23 | any(0, 1 << 23));
        return emulated::groups::can_begin(c) ? c : 0.0f;
    };
    int differ = 0, undecided = 0, checked = 0;
    for (int trial = 0; trial < 20000; ++trial) {
        const Operands x = operands();
        const std::array<Operands, 2> y{operands(), operands()};
        const std::array<float, 2> c{sum(), sum()};
        const std::uint32_t found = anchors_of(x, y, c, trial % 2 == 0);
        EXPECT_EQ(found, anchors_of(x, y, c, trial % 2 != 0));
        for (std::size_t n = 0; n < 2; ++n) {
            const auto anchor = static_cast<std::uint16_t>(found >> 16 * n);
            if (emulated::groups::are_low(pair_of(anchor, anchor)) && !are_decided(x, y[n])) {
                ++undecided;
                continue;
            }
            ++checked;
            differ += bits_of(anchored(x, y[n], anchor, c[n])) != bits_of(by_ampere(x, y[n], c[n])) ? 1 : 0;
        }
    }
    EXPECT_EQ(differ, 0);
    EXPECT_GT(checked, 20000);
    if (range.decided)
        EXPECT_EQ(undecided, 0);
    else
        EXPECT_GT(undecided, 0);
}

INSTANTIATE_TEST_SUITE_P(Sizes, Bf16Groups,
                         ::testing::Values(Range{124, 5, 120, 16, true},    // near each other
                                           Range{110, 25, 100, 50, true},   // most are cut
                                           Range{90, 57, 90, 60, true},     // most vanish
                                           Range{0, 148, 1, 254, false}));  // subnormals, too, and beyond the limits

/// With an anchor of another size the bits are others: the cut is what the anchor makes it.
TEST(Bf16Groups, AreNotHadWithoutTheAnchor) {
    const Operands x{0x3F80, 0x3F81}, y{0x4780, 0x3A83};  // 2^16 and 1.0078 * 0.001, whose last bit lies below 2^-8
    EXPECT_EQ(by_ampere(x, y, 0.0f), anchored(x, y, 0x4800, 0.0f));
    std::mt19937_64 random(8);
    int differ = 0;
    for (int trial = 0; trial < 1000; ++trial) {
        Operands a{}, b{};
        for (std::size_t t = 0; t < terms; ++t) {
            a[t] = static_cast<std::uint16_t>(random() % 0x8000 % (25 << 7) + (110 << 7) + (random() % 2 << 15));
            b[t] = static_cast<std::uint16_t>(random() % 0x8000 % (25 << 7) + (110 << 7));
        }
        differ += anchored(a, b, 0, 0.0f) != by_ampere(a, b, 0.0f) ? 1 : 0;
    }
    EXPECT_GT(differ, 0);
}

/// A sum of zeros keeps what it has, whatever it began with.
TEST(Bf16Groups, OfZerosKeepTheSum) {
    for (const float c : {0.0f, 0x1p-100f, -0x1.8p-130f, 0x1.fffffep59f}) {
        const Operands zeros{}, large{0x497F, 0x497F};  // 2^20 and more
        const auto anchor = static_cast<std::uint16_t>(anchors_of(zeros, {large, large}, {c, c}, true));
        EXPECT_EQ(bits_of(anchored(zeros, large, anchor, c)), bits_of(c)) << c;
    }
}

/// 32 products of e4m3, most subnormal in some trials, four times eight of them with one anchor.
TEST(Bf16Groups, MakeTheFusedAddsOfE4m3) {
    using namespace emulated::groups;
    constexpr MatrixUnit narrow{
        32, narrow_fraction_bits, OutputFormat::e8m13_rz, narrow_min_exponent, narrow_min_exponent,
        0,  ZeroOperand::ignored};
    std::mt19937_64 random(9);
    int differ = 0, cut = 0;
    for (int trial = 0; trial < 20000; ++trial) {
        const unsigned exponents_of = 1 + trial % 18;  // from -9, the last subnormal number, up
        const auto operand = [&] {
            const auto sign = static_cast<std::uint32_t>(random() % 2) << 15;
            const auto exponent = static_cast<std::uint32_t>(127 - 9 + random() % exponents_of);
            const std::uint32_t fraction = exponent < 127 - 6 ? 0 : static_cast<std::uint32_t>(random() % 8) << 4;
            return static_cast<std::uint16_t>(random() % 8 == 0 ? sign : sign | exponent << 7 | fraction);
        };
        std::array<Operands, 4> x, y;
        for (auto* const all : {&x, &y})
            for (Operands& part : *all)
                for (std::uint16_t& v : part) v = operand();
        const auto sign = static_cast<std::uint32_t>(random() % 2) << 31;
        const float c = random() % 8 == 0 ? 0.0f
                                          : float_of(sign | static_cast<std::uint32_t>(100 + random() % 50) << 23 |
                                                     static_cast<std::uint32_t>(random() % (1 << 23)));
        std::uint32_t products = 0;
        for (std::size_t part = 0; part < 4; ++part)
            for (std::size_t t = 0; t < terms; ++t)
                products = larger_sums(narrow_exponents(x[part][t]), narrow_exponents(y[part][t]), products);
        const auto anchor = static_cast<std::uint16_t>(anchors(products, bits_of(c) >> 16, narrow_fraction_bits));
        float sum = c;
        for (std::size_t part = 0; part < 4; ++part) sum = anchored(x[part], y[part], anchor, sum);
        const std::uint32_t found = bits_of(sum) & ~0u << (23 - narrow_fraction_bits);
        cut += found != bits_of(sum) ? 1 : 0;
        const auto wanted = static_cast<float>(fused::add(
            narrow,
            [&](int t) {
                return value_of(x[static_cast<std::size_t>(t) / terms][static_cast<std::size_t>(t) % terms]);
            },
            [&](int t) {
                return value_of(y[static_cast<std::size_t>(t) / terms][static_cast<std::size_t>(t) % terms]);
            },
            narrow.terms, static_cast<double>(c)));
        differ += found != bits_of(wanted) ? 1 : 0;
    }
    EXPECT_EQ(differ, 0);
    EXPECT_GT(cut, 1000);
}

TEST(Bf16Groups, TakeOperandsBelowTheirLimit) {
    const std::uint32_t largest = std::uint32_t{127 + 20} << 7 | 0x7F, smallest_beyond = largest + 1;
    for (const std::uint32_t sign : {0u, 0x8000u}) {
        EXPECT_TRUE(emulated::groups::are_operands((largest | sign) << 16 | largest));
        EXPECT_FALSE(emulated::groups::are_operands((smallest_beyond | sign) << 16));
        EXPECT_FALSE(emulated::groups::are_operands(smallest_beyond | sign));
    }
}

}  // namespace
}  // namespace faultline
