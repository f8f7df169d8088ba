// SPDX-License-Identifier: Apache-2.0
// round_bulk and round<F, R>(float) against round(), bit for bit.
#include "judge.hpp"

#include <faultline/format/bulk.hpp>

#include <gtest/gtest.h>
#include <cmath>
#include <limits>
#include <vector>

namespace faultline {
namespace {

using testing::Case;

/// Floats of all sorts: every 4099th bit pattern (NaNs, infinities, subnormals among them), every number of the format
/// (sampled for the wide ones), every midpoint and the neighbours of each.
std::vector<float> inputs(const Case& c) {
    std::vector<float> values;
    for (std::uint64_t bits = 0; bits <= 0xFFFFFFFFu; bits += 4099) {
        values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    }
    const std::uint64_t last = encode(c.max, c.format);
    const std::uint64_t stride = c.bits <= 8 ? 1 : c.bits <= 16 ? 3 : c.bits == 19 ? 67 : 801'007;
    for (std::uint64_t code = 0; code <= last; code += stride) {
        const double low = decode(code, c.format);
        const auto middle = static_cast<float>(low + ulp(low, c.format) / 2);
        for (const float x : {static_cast<float>(low), middle, std::nextafter(middle, 0.0f),
                              std::nextafter(middle, std::numeric_limits<float>::infinity())}) {
            values.push_back(x);
            values.push_back(-x);
        }
    }
    for (const float x : {0.0f, 1e-45f, std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
        values.push_back(x);
        values.push_back(-x);
    }
    return values;
}

const RandomStream stream(11, 7);

template <class T>
double expected(T x, Format f, Rounding mode, std::uint64_t counter) {
    return round(static_cast<double>(x), f, mode, mode == Rounding::stochastic ? stochastic_bits(stream, counter) : 0);
}

template <class T>
auto bits_of(T x) {
    if constexpr (sizeof(T) == 4) {
        return std::bit_cast<std::uint32_t>(x);
    } else {
        return std::bit_cast<std::uint64_t>(x);
    }
}

class EveryFormatInBulk : public ::testing::TestWithParam<Case> {};

TEST_P(EveryFormatInBulk, FloatsAreRoundedAsOneByOne) {
    const Case& c = GetParam();
    const std::vector<float> from = inputs(c);
    std::vector<float> to(from.size());
    constexpr std::uint64_t first_counter = 77;  // starts inside a group of random numbers
    for (const Rounding mode : all_roundings()) {
        round_bulk(std::span(from), std::span(to), c.format, mode, stream, first_counter);
        std::vector<float> in_place = from;
        round_bulk(std::span(in_place), c.format, mode, stream, first_counter);
        for (std::size_t i = 0; i < from.size(); ++i) {
            const auto right = static_cast<float>(expected(from[i], c.format, mode, first_counter + i));
            ASSERT_EQ(bits_of(to[i]), bits_of(right)) << c.name << " " << name(mode) << " of " << std::hexfloat
                                                      << from[i] << ": got " << to[i] << ", expected " << right;
            ASSERT_EQ(bits_of(in_place[i]), bits_of(right)) << c.name << " in place";
        }
    }
}

TEST_P(EveryFormatInBulk, DoublesAreRoundedAsOneByOne) {
    const Case& c = GetParam();
    std::vector<double> from;
    const std::vector<float> floats = inputs(c);
    for (std::size_t i = 0; i < floats.size(); i += 5) {
        const auto x = static_cast<double>(floats[i]);
        from.push_back(x);
        from.push_back(std::nextafter(x, 1e308));
        from.push_back(std::bit_cast<double>(stream.bits(i)));
        from.push_back(x * (1 + stream.uniform(i)));
    }
    std::vector<double> to(from.size());
    std::vector<float> narrow(from.size());
    for (const Rounding mode : all_roundings()) {
        round_bulk(std::span<const double>(from), std::span<double>(to), c.format, mode, stream, 3);
        round_bulk(std::span<const double>(from), std::span<float>(narrow), c.format, mode, stream, 3);
        for (std::size_t i = 0; i < from.size(); ++i) {
            const double right = expected(from[i], c.format, mode, 3 + i);
            ASSERT_EQ(bits_of(to[i]), bits_of(right)) << c.name << " " << name(mode) << " of " << std::hexfloat
                                                      << from[i] << ": got " << to[i] << ", expected " << right;
            ASSERT_EQ(bits_of(narrow[i]), bits_of(static_cast<float>(right))) << c.name << " to float";
        }
    }
}

// Groups of doubles that are all zero or normal in the format take a shorter way.
TEST_P(EveryFormatInBulk, OrdinaryDoublesAreRoundedAsOneByOne) {
    const Case& c = GetParam();
    if (is_exact(c.format)) return;
    const double least = std::ldexp(1.0, c.format.emin), most = max_finite(c.format);
    std::vector<double> from{0.0, -0.0, least, -least, most, -most, std::nextafter(most, 0.0)};
    for (std::uint64_t i = 0; from.size() < 1000; ++i) {
        const double x = std::ldexp(stream.normal(i), static_cast<int>(stream.bits(i) % 7) - 3);
        if (std::fabs(x) >= least && std::fabs(x) <= most) from.push_back(x);
    }
    std::vector<double> to(from.size());
    round_bulk(std::span<const double>(from), std::span<double>(to), c.format, Rounding::stochastic, stream, 40);
    for (std::size_t i = 0; i < from.size(); ++i) {
        const double right = expected(from[i], c.format, Rounding::stochastic, 40 + i);
        ASSERT_EQ(bits_of(to[i]), bits_of(right)) << c.name << " of " << std::hexfloat << from[i];
    }
}

INSTANTIATE_TEST_SUITE_P(Formats, EveryFormatInBulk, ::testing::ValuesIn(testing::cases()), testing::label);

/// round<F, R>(float) for all modes of one format.
template <class Constant>
class EveryFormatCompiled : public ::testing::Test {};

template <Format F>
struct Constant {
    static constexpr Format format = F;
};
using Compiled = ::testing::Types<Constant<fp32>, Constant<tf32>, Constant<bf16>, Constant<fp16>, Constant<e5m2>,
                                  Constant<e4m3>, Constant<e3m2>, Constant<e2m3>, Constant<e2m1>,
                                  Constant<with_saturation(e4m3, false)>, Constant<with_saturation(e5m2, false)>>;
TYPED_TEST_SUITE(EveryFormatCompiled, Compiled);

template <Format F, Rounding R>
void expect_compiled(float x, std::uint64_t random_bits) {
    const auto right = static_cast<float>(round(static_cast<double>(x), F, R, random_bits));
    ASSERT_EQ(bits_of(round<F, R>(x, random_bits)), bits_of(right)) << name(F) << " " << name(R) << " of " << x;
}

TYPED_TEST(EveryFormatCompiled, AgreesWithRound) {
    constexpr Format f = TypeParam::format;
    for (const Case& c : testing::cases()) {
        if (c.format != f) continue;
        std::uint64_t counter = 0;
        for (const float x : inputs(c)) {
            const std::uint64_t random_bits = stream.bits(counter++);
            expect_compiled<f, Rounding::nearest_even>(x, random_bits);
            expect_compiled<f, Rounding::nearest_away>(x, random_bits);
            expect_compiled<f, Rounding::toward_zero>(x, random_bits);
            expect_compiled<f, Rounding::upward>(x, random_bits);
            expect_compiled<f, Rounding::downward>(x, random_bits);
            expect_compiled<f, Rounding::to_odd>(x, random_bits);
            expect_compiled<f, Rounding::stochastic>(x, random_bits);
            if (this->HasFatalFailure()) return;
        }
        EXPECT_GT(counter, 1'000'000u);
    }
}

TEST(Bulk, PiecesWithContinuedCountersAreTheWhole) {
    std::vector<float> whole(1000), pieces(1000);
    for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = pieces[i] = static_cast<float>(stream.normal(i));
    for (const Format f : {bf16, e4m3}) {
        round_bulk(std::span(whole), f, Rounding::stochastic, stream, 5);
        for (std::size_t first = 0; first < pieces.size();) {
            const std::size_t length = std::min<std::size_t>(1 + first % 301, pieces.size() - first);
            round_bulk(std::span(pieces).subspan(first, length), f, Rounding::stochastic, stream, 5 + first);
            first += length;
        }
        EXPECT_EQ(whole, pieces);
    }
}

TEST(Bulk, EveryLengthAndAlignment) {
    for (std::size_t offset = 0; offset < 17; ++offset) {
        for (std::size_t length = 0; length < 300; length += 1 + length / 40) {
            std::vector<float> values(offset + length + 1, 1.00390625f);  // a bf16 tie
            round_bulk(std::span(values).subspan(offset, length), bf16);
            for (std::size_t i = 0; i < values.size(); ++i) {
                const bool inside = i >= offset && i < offset + length;
                ASSERT_EQ(values[i], inside ? 1.0f : 1.00390625f) << "offset " << offset << " length " << length;
            }
        }
    }
}

TEST(Bulk, CountersNearTheEndOfTheirRangeWrap) {
    std::vector<float> values(40, 1.001f);
    const std::uint64_t first = ~std::uint64_t{0} - 20;
    round_bulk(std::span(values), bf16, Rounding::stochastic, stream, first);
    for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(values[i], static_cast<float>(expected(1.001f, bf16, Rounding::stochastic, first + i)));
    }
}

TEST(Bulk, ExactLeavesEveryBitAlone) {
    std::vector<float> values = {1.1f, std::bit_cast<float>(0x7F800123u), -0.0f};
    const std::vector<float> before = values;
    round_bulk(std::span(values), exact);
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(bits_of(values[i]), bits_of(before[i]));
}

TEST(Bulk, Binary64ChangesNothingButNans) {
    std::vector<double> values;
    for (std::uint64_t i = 0; i < 1000; ++i) values.push_back(detail::bits_as<double>(stream.bits(i)));
    values.push_back(-std::numeric_limits<double>::quiet_NaN());
    for (const Rounding mode : all_roundings()) {
        std::vector<double> rounded = values;
        round_bulk(std::span(rounded), binary64, mode, stream, 9);
        for (std::size_t i = 0; i < values.size(); ++i) {
            ASSERT_EQ(bits_of(rounded[i]), bits_of(expected(values[i], binary64, mode, 9 + i)));
        }
    }
}

TEST(Bulk, RefusesWhatItCannotDo) {
    std::vector<float> three(3), two(2);
    EXPECT_THROW(round_bulk(std::span<const float>(three), std::span<float>(two), bf16), std::invalid_argument);
    EXPECT_THROW(round_bulk(std::span(three), binary64), std::invalid_argument);
    std::vector<double> doubles(3);
    EXPECT_THROW(round_bulk(std::span<const double>(doubles), std::span<float>(three), exact), std::invalid_argument);
}

}  // namespace
}  // namespace faultline
