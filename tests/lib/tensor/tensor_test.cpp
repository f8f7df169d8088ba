// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/tensor.hpp>

#include <cmath>
#include <limits>
#include <numeric>

#include "support.hpp"

namespace faultline {
namespace {

using test::request_error;

constexpr double infinity = std::numeric_limits<double>::infinity();

template <class Bits>
std::vector<double> every_encoding(Dtype dtype) {
    std::vector<Bits> bits(std::size_t{1} << (8 * sizeof(Bits)));
    std::iota(bits.begin(), bits.end(), Bits{0});
    return make_tensor<Bits>("x", {static_cast<std::int64_t>(bits.size())}, bits, dtype).to_double();
}

/// Value of an encoding by the definition of a binary float: sign * 2^(e - bias) * 1.m, the lowest exponent without the
/// leading 1. Written with strings of bits so that it shares nothing with the code under test.
double by_definition(unsigned bits, int exponent_bits, int mantissa_bits) {
    std::string text;
    for (int i = exponent_bits + mantissa_bits; i >= 0; --i) text += bits >> i & 1u ? '1' : '0';
    const int exponent = std::stoi(text.substr(1, static_cast<std::size_t>(exponent_bits)), nullptr, 2);
    double fraction = exponent == 0 ? 0.0 : 1.0;
    for (int i = 0; i < mantissa_bits; ++i) {
        if (text[static_cast<std::size_t>(1 + exponent_bits + i)] == '1') fraction += std::pow(2.0, -(i + 1));
    }
    const double value =
        fraction * std::pow(2.0, (exponent == 0 ? 1 : exponent) - (std::pow(2.0, exponent_bits - 1) - 1));
    return text[0] == '1' ? -value : value;
}

TEST(ToDouble, EveryEncodingOfF16AndE5m2) {
    const auto f16 = every_encoding<std::uint16_t>(Dtype::f16);
    for (unsigned i = 0; i < f16.size(); ++i) {
        if ((i & 0x7C00u) == 0x7C00u) {
            if ((i & 0x3FFu) == 0)
                EXPECT_EQ(f16[i], i & 0x8000u ? -infinity : infinity);
            else
                EXPECT_TRUE(std::isnan(f16[i]));
        } else {
            ASSERT_EQ(f16[i], by_definition(i, 5, 10)) << i;
            ASSERT_EQ(std::signbit(f16[i]), (i & 0x8000u) != 0);
        }
    }
    // E5M2 is the upper byte of a float16 (OCP FP8, 5.1).
    const auto e5m2 = every_encoding<std::uint8_t>(Dtype::e5m2);
    for (unsigned i = 0; i < e5m2.size(); ++i) {
        if (std::isnan(e5m2[i]))
            EXPECT_TRUE(std::isnan(f16[i << 8])) << i;
        else
            EXPECT_EQ(e5m2[i], f16[i << 8]) << i;
    }
}

TEST(ToDouble, EveryEncodingOfE4m3) {
    const auto e4m3 = every_encoding<std::uint8_t>(Dtype::e4m3);
    for (unsigned i = 0; i < e4m3.size(); ++i) {
        if ((i & 0x7Fu) == 0x7Fu)
            EXPECT_TRUE(std::isnan(e4m3[i]));
        else
            EXPECT_EQ(e4m3[i], by_definition(i, 4, 3)) << i;
    }
    EXPECT_EQ(e4m3[0x7E], 448.0);              // OCP FP8, table 2: largest
    EXPECT_EQ(e4m3[0x01], std::pow(2.0, -9));  // smallest subnormal
}

TEST(ToDouble, EveryEncodingOfBf16) {
    const auto bf16 = every_encoding<std::uint16_t>(Dtype::bf16);
    for (unsigned i = 0; i < bf16.size(); ++i) {
        if ((i & 0x7F80u) == 0x7F80u) {
            if ((i & 0x7Fu) == 0)
                EXPECT_EQ(bf16[i], i & 0x8000u ? -infinity : infinity);
            else
                EXPECT_TRUE(std::isnan(bf16[i]));
        } else {
            ASSERT_EQ(bf16[i], by_definition(i, 8, 7)) << i;
        }
    }
}

TEST(ToDouble, IntegersAndBools) {
    EXPECT_EQ(make_tensor<std::int8_t>("x", {2}, std::vector<std::int8_t>{-128, 127}).to_double(),
              (std::vector<double>{-128, 127}));
    EXPECT_EQ(make_tensor<std::uint64_t>("x", {1}, std::vector<std::uint64_t>{~0ull}).to_double(),
              (std::vector<double>{18446744073709551616.0}));
    EXPECT_EQ(make_tensor<std::uint8_t>("x", {3}, std::vector<std::uint8_t>{0, 1, 7}, Dtype::boolean).to_double(),
              (std::vector<double>{0, 1, 1}));
    EXPECT_EQ(make_tensor<double>("x", {}, std::vector<double>{0.1}).to_float(), (std::vector<float>{0.1f}));
}

TEST(Tensor, ShapeText) {
    EXPECT_EQ(shape_text(std::vector<std::int64_t>{1, 8, 512, 64}), "[1, 8, 512, 64]");
    EXPECT_EQ(shape_text(std::vector<std::int64_t>{}), "[]");
}

TEST(Tensor, ByteCountRefusesWhatOverflows) {
    const std::int64_t big = std::int64_t{1} << 31;
    EXPECT_EQ(byte_count(Dtype::f32, std::vector<std::int64_t>{2, 3}), 24u);
    EXPECT_EQ(byte_count(Dtype::f32, std::vector<std::int64_t>{}), 4u);
    EXPECT_EQ(byte_count(Dtype::f32, std::vector<std::int64_t>{big, 0, 5}), 0u);
    EXPECT_EQ(byte_count(Dtype::u8, std::vector<std::int64_t>{big, big}), std::uint64_t{1} << 62);
    EXPECT_FALSE(byte_count(Dtype::u16, std::vector<std::int64_t>{big, big}));
    EXPECT_FALSE(byte_count(Dtype::u8, std::vector<std::int64_t>{big, big, big, 0}));
    EXPECT_FALSE(byte_count(Dtype::u8, std::vector<std::int64_t>{-1}));
}

TEST(Tensor, MakeTensorChecksShapeAndWidth) {
    EXPECT_EQ(request_error([] {
                  (void)make_tensor<float>("q", {2, 2}, std::vector<float>{1, 2, 3});
              }),
              "tensor \"q\": 3 values: expected as many as shape [2, 2] has");
    EXPECT_EQ(request_error([] { (void)make_tensor<float>("q", {1}, std::vector<float>{1}, Dtype::bf16); }),
              "tensor \"q\": values of 4 bytes: expected 2 bytes for bfloat16");
}

TEST(TensorSet, MissingTensorIsNamedWithWhatThereIs) {
    TensorSet set{"run7.safetensors", {}, {}};
    EXPECT_EQ(request_error([&] { (void)set.at("q"); }),
              "run7.safetensors: tensor \"q\" is missing: expected a file that holds tensors");
    set.add(make_tensor<float>("layer0.k", {}, std::vector<float>{1}));
    set.add(make_tensor<float>("layer0.v", {}, std::vector<float>{1}));
    EXPECT_EQ(request_error([&] { (void)set.at("layer0.q"); }),
              "run7.safetensors: tensor \"layer0.q\" is missing: expected one of \"layer0.k\", \"layer0.v\"");
    EXPECT_EQ(set.find("layer0.q"), nullptr);
    EXPECT_EQ(set.at("layer0.k").to_double(), std::vector<double>{1});
    EXPECT_EQ(request_error([&] { set.add(make_tensor<float>("layer0.v", {}, std::vector<float>{1})); }),
              "run7.safetensors: tensor \"layer0.v\" occurs twice: expected every name once");
}

}  // namespace
}  // namespace faultline
