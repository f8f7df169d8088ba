// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/dtype.hpp>

#include <gtest/gtest.h>

namespace faultline {
namespace {

TEST(Dtype, NamesGoThereAndBack) {
    for (int i = 0; i < dtype_count; ++i) {
        const auto dtype = static_cast<Dtype>(i);
        EXPECT_EQ(dtype_from_safetensors(safetensors_name(dtype)), dtype);
        EXPECT_EQ(dtype_from_print_name(print_name(dtype)), dtype);
    }
}

TEST(Dtype, WidthIsTheNumberInTheName) {
    for (int i = 0; i < dtype_count; ++i) {
        const auto dtype = static_cast<Dtype>(i);
        std::string digits;
        for (const char c : safetensors_name(dtype)) {
            if (c >= '0' && c <= '9')
                digits += c;
            else if (!digits.empty())
                break;
        }
        EXPECT_EQ(width(dtype) * 8, digits.empty() ? 8u : static_cast<unsigned>(std::stoi(digits)))
            << print_name(dtype);
    }
}

TEST(Dtype, UnknownNamesAreNothing) {
    EXPECT_FALSE(dtype_from_safetensors("F4"));
    EXPECT_FALSE(dtype_from_safetensors("f32"));
    EXPECT_FALSE(dtype_from_print_name(""));
}

TEST(Dtype, ScalesOfOneExponentAreTheirCodes) { EXPECT_EQ(dtype_from_safetensors("F8_E8M0"), Dtype::u8); }

TEST(Dtype, OfCxxTypes) {
    EXPECT_EQ(dtype_of<double>(), Dtype::f64);
    EXPECT_EQ(dtype_of<const float>(), Dtype::f32);
    EXPECT_EQ(dtype_of<bool>(), Dtype::boolean);
    EXPECT_EQ(dtype_of<long long>(), Dtype::i64);
    EXPECT_EQ(dtype_of<std::uint16_t>(), Dtype::u16);
    EXPECT_EQ(dtype_of<std::int8_t>(), Dtype::i8);
}

}  // namespace
}  // namespace faultline
