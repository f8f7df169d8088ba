// SPDX-License-Identifier: Apache-2.0
// What tensor cores returned. Source: measured on an NVIDIA H200 by kernels/cuda/hardware_probe, 2026-11-29 with seed 7 and, of
// fp16 accumulators, 2026-12-01 with seed 1; docs/results/tensor-core-rule.md. These are the dot products that told the rule from
// three earlier guesses: that a zero accumulator stands at 2^-126, that one of fp16 stands where one of fp32 does, and that a
// tf32 input's NaN is judged before its low 13 bits are dropped.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/tensor_core/accumulate.hpp>
#include <faultline/tensor_core/reference.hpp>

#include "numbers.hpp"

namespace faultline {
namespace {

using testing::bits;

struct Measured {
    const char* unit;
    std::uint32_t c, card;              // fp32 bits; of f16acc fp16
    std::array<std::uint32_t, 8> a, b;  // registers, k ascending, the lower half of a register first
    friend std::ostream& operator<<(std::ostream& out, const Measured& m) { return out << m.unit << ' ' << m.c; }
};

constexpr Measured table[] = {
    // Sum of the exact products in units of 2^-149: 1.8376. All stand at 2^-150 or below. Cut at 2^(-126-25), a quarter of
    // that unit, they make 2.
    {"hopper-mma-bf16",
     0x80000000,
     0x00000001,
     {0x208fa26a, 0xa0d5a16e, 0xa12d21ec, 0x20e3a0b1, 0xa20020c9, 0x2080a237, 0xa180a236, 0xa10d2080},
     {0x9127117f, 0x119292ff, 0x120012c8, 0x121e1200, 0x113f91eb, 0x127f1200, 0x11a09223, 0x92201215}},
    // -19.145; cut at 2^-151 it is -18.5.
    {"hopper-wgmma-bf16",
     0x80000000,
     0x80000013,
     {0x13249280, 0x92c511ff, 0x927f9300, 0x922e935e, 0x13009300, 0x92cd92b3, 0x133f1193, 0x13009300},
     {0xa22d218f, 0xa180a366, 0xa2d8a300, 0x236121fd, 0xa2d92339, 0xa37fa20b, 0xa182a2fe, 0xa32ca200}},
    // Largest exponent -127. One product, -477681.125, has bits below 2^-151; the sum is 3756341.875, or 3756342 when
    // they are cut.
    {"hopper-mma-tf32",
     0x80000000,
     0x00395135,
     {0x97000000, 0x97337100, 0x17ffffff, 0x17c788c5, 0x9815def3, 0x174d1ceb, 0x177dd422, 0x9777731b},
     {0x264e84be, 0xa7ffffff, 0xa6800000, 0xa73bd27c, 0xa785c7ad, 0x26991a69, 0xa6a691b3, 0x26716703}},
    // -624728.8125, to the unit 2^(-127-25) -624728.875; cut at 2^-151 it is -624729.
    {"hopper-wgmma-tf32",
     0x00000000,
     0x80098858,
     {0x9f000000, 0x9fc8f52e, 0xa0ffffff, 0x1f800000, 0x1f48bbc9, 0x20157abd, 0xa00efd1a, 0x20de08af},
     {0x9d8842be, 0x1ec679bd, 0x9f000000, 0x9ed19a0b, 0x1dffffff, 0x9f47612b, 0x9f5711bf, 0x9effffff}},
    // One NaN each whose payload lies in the 13 bits that tf32 drops: ff801820, ff80160f, 7f80138d, 7f800f00. Read as
    // infinities they win over everything else, with the sign of their product: (-inf)(-), (-)(-inf), (+inf)(-), (+inf)(+).
    {"hopper-mma-tf32",
     0xce1501b4,
     0x7f800000,
     {0xde584f68, 0x9cc9b8c5, 0xf3ea9239, 0x4f7ca816, 0xb5d31c20, 0x57cc8d2e, 0xff801820, 0x728e2ecc},
     {0x8d6595d4, 0xe93f1eae, 0x232d047a, 0xba68eb1f, 0xe77cd773, 0x527e5a58, 0x8fbf948a, 0xc5cc40bf}},
    {"hopper-mma-tf32",
     0xbdc8831b,
     0x7f800000,
     {0xc1000000, 0x402888ab, 0x41519d3e, 0x4063152c, 0x41070c24, 0x412f0a77, 0xbf85d3f7, 0x4069127a},
     {0xff80160f, 0x4119cdf4, 0x417fffff, 0x41ad79d4, 0xc0a04fbf, 0xbfb5678b, 0xc0800000, 0xc14e8048}},
    {"hopper-wgmma-tf32",
     0x2b6a2b06,
     0xff800000,
     {0x36769cd8, 0x6d427485, 0xf2209040, 0x7f80138d, 0xd8c43ee4, 0x8837b45f, 0x1d9d4620, 0xa1d77ab2},
     {0x67d0e42e, 0x6614a7a8, 0xeab3699e, 0x92fff0c5, 0x2ef7b37d, 0x5fda2e86, 0x71595ac2, 0x4164ebf6}},
    {"hopper-wgmma-tf32",
     0xbe000000,
     0x7f800000,
     {0xc1924a18, 0x3da340b5, 0xbfbf48f9, 0x40af87b7, 0xbe000000, 0x7f800f00, 0x40800000, 0x40ffffff},
     {0x417fffff, 0xbf8e1fe7, 0x40751608, 0xc1ffffff, 0xc062aa09, 0x3d9b0c0f, 0x40000000, 0xbf7fffff}},
    // fp16 accumulators, C = 0. Exact sums in units of 2^-48, where a tie between 0 and 2^-24 is 2^23: 2^23 + 6, which is
    // 2^23 - 4 when each product is cut to 2^(-21-25) = 2^-46.
    {"hopper-mma-fp16-f16acc",
     0x8000,
     0x0000,
     {0x06230419, 0x8644842a, 0x84c70400, 0x040005de, 0x87ff0400, 0x0795076c, 0x84000400, 0x04000400},
     {0x04008400, 0x056384a3, 0x85f107ff, 0x84fb0400, 0x85f58400, 0x056a85a0, 0x04000400, 0x05dc0400}},
    // 2^23 + 2; cut, 2^23 - 8.
    {"hopper-mma-fp16-f16acc",
     0x0000,
     0x0000,
     {0x87540400, 0x85438631, 0x07dc0423, 0x84000776, 0x87ff07ff, 0x04788400, 0x85898569, 0x04000588},
     {0x0735847d, 0x84b085c6, 0x040004b1, 0x040004e5, 0x84008400, 0x04cd0484, 0x040087ff, 0x05170400}},
    // -(2^23 + 4); cut, -(2^23 - 4).
    {"hopper-mma-fp16-f16acc",
     0x8000,
     0x0000,
     {0x87648660, 0x8400846d, 0x868a06da, 0x04908785, 0x05cc050b, 0x862706c1, 0x066407ff, 0x06bc873a},
     {0x07eb8400, 0x062f054c, 0x054207ff, 0x05ac0422, 0x07a68604, 0x040087ff, 0x062c845d, 0x06410619}},
    // 2^23 - 3; cut, 2^23 + 4.
    {"hopper-wgmma-fp16-f16acc",
     0x0000,
     0x0001,
     {0x07ff058c, 0x861d0400, 0x05178635, 0x861787ff, 0x87ff8776, 0x07ab0781, 0x058e0784, 0x040007ee},
     {0x85d704f0, 0x8400071d, 0x07ff079d, 0x87ff044a, 0x84008400, 0x04008637, 0x047a075a, 0x05ff87ff}},
    // -(2^23 + 9); cut, -2^23, a tie, which goes to 0.
    {"hopper-wgmma-fp16-f16acc",
     0x8000,
     0x0000,
     {0x84bb8400, 0x8400052a, 0x07ff049b, 0x065787ff, 0x04430767, 0x8613049e, 0x84008400, 0x84000475},
     {0x04cc05c6, 0x867f8535, 0x863606aa, 0x04230581, 0x06fc877d, 0x067e042a, 0x059604a7, 0x84af0548}},
    // 2^23 + 3; cut, 2^23 - 4.
    {"hopper-wgmma-fp16-f16acc",
     0x0000,
     0x0000,
     {0x0714847b, 0x040005b5, 0x04000526, 0x061e0476, 0x85d085ea, 0x843e07a6, 0x849107a8, 0x85250435},
     {0x87ff859a, 0x06cb05de, 0x840487ff, 0x04ed0799, 0x06798400, 0x0675063a, 0x04000575, 0x8623074c}},
    // -(3 2^23 + 6); cut, -(3 2^23 - 4).
    {"hopper-wgmma-fp16-f16acc",
     0x8000,
     0x8001,
     {0x07828400, 0x07ff866a, 0x86268400, 0x040087fa, 0x84000400, 0x86b706c2, 0x07ff85a6, 0x84cd07a7},
     {0x8757077c, 0x872407d7, 0x07ff04a0, 0x0458079f, 0x05ec8453, 0x87fc84fc, 0x873304e4, 0x05c506fc}},
    // 2^23 + 5; cut, 2^23 - 4.
    {"hopper-wgmma-fp16-f16acc",
     0x0000,
     0x0000,
     {0x04000400, 0x05da8673, 0x071987ff, 0x869184a9, 0x852d043a, 0x06b28644, 0x040004dc, 0x874d87ff},
     {0x84ce05fe, 0x06eb06c5, 0x863486aa, 0x862b8400, 0x04008610, 0x07ff871f, 0x85d30475, 0x87bb0614}},
};

double from_pattern(std::uint64_t pattern) {
    double x;
    std::memcpy(&x, &pattern, sizeof x);
    return x;
}

/// An fp32 number as a double. A NaN keeps its payload and stays signalling, which a conversion would not leave it.
double widen(std::uint32_t pattern) {
    float x;
    std::memcpy(&x, &pattern, sizeof x);
    if (!std::isnan(x)) return static_cast<double>(x);
    return from_pattern(std::uint64_t{pattern >> 31} << 63 | 0x7FF0000000000000u |
                        std::uint64_t{pattern & 0x7FFFFF} << 29);
}

bool has(const char* unit, std::string_view part) {
    return std::string_view(unit).find(part) != std::string_view::npos;
}

/// A finite fp16 number.
double from_half(std::uint32_t bits) {
    const int field = static_cast<int>(bits >> 10 & 31);
    const double significand = static_cast<double>((bits & 1023) | (field != 0 ? 1024u : 0u));
    return std::ldexp((bits >> 15 & 1) != 0 ? -significand : significand, (field != 0 ? field : 1) - 25);
}

double accumulator(const char* unit, std::uint32_t bits) { return has(unit, "f16acc") ? from_half(bits) : widen(bits); }

std::vector<double> operands(const char* unit, const std::array<std::uint32_t, 8>& registers) {
    std::vector<double> r;
    for (const std::uint32_t word : registers) {
        if (has(unit, "tf32")) {
            r.push_back(widen(word));
            continue;
        }
        for (const std::uint32_t half : {word & 0xFFFFu, word >> 16})  // bf16: the upper half of an fp32
            r.push_back(has(unit, "bf16") ? widen(half << 16) : from_half(half));
    }
    return r;
}

class OnH200 : public ::testing::TestWithParam<Measured> {};

TEST_P(OnH200, ReferenceAndFastPathGiveTheCardsBits) {
    const Measured& m = GetParam();
    const Accumulation unit = find_accumulation(m.unit).value();
    const std::vector<double> a = operands(m.unit, m.a), b = operands(m.unit, m.b);
    const auto k = static_cast<std::ptrdiff_t>(a.size());
    double c = accumulator(m.unit, m.c);
    EXPECT_EQ(bits(reference::dot(unit, a.data(), 1, b.data(), 1, k, c)), bits(accumulator(m.unit, m.card)));
    multiply_accumulate(unit, {a.data(), 1, k}, {b.data(), k, 1}, {&c, 1, 1});
    EXPECT_EQ(bits(c), bits(accumulator(m.unit, m.card)));
}

INSTANTIATE_TEST_SUITE_P(Measured, OnH200, ::testing::ValuesIn(table));

/// c + 2^-149 - 2^small, through both paths.
double beside_the_last_subnormal(const char* name, int small, double c) {
    const Accumulation unit = find_accumulation(name).value();
    const std::vector<double> a = {0x1p-75, -0x1p-80}, b = {0x1p-74, std::ldexp(1.0, small + 80)};
    const double plain = reference::dot(unit, a.data(), 1, b.data(), 1, 2, c);
    multiply_accumulate(unit, {a.data(), 1, 2}, {b.data(), 2, 1}, {&c, 1, 1});
    EXPECT_EQ(bits(c), bits(plain));
    return c;
}

// Where the zero accumulator stands, by the smallest term that is not cut: 2^(-133-25) = 2^-158. The sum 2^-149 - 2^-158
// is below the last subnormal number and truncates to 0; with 2^-159 cut, 2^-149 stays. One exponent higher would cut
// 2^-158 too, one lower would keep 2^-159.
TEST(ZeroAccumulator, StandsAtMinus133) {
    for (const char* unit : {"hopper-mma-bf16", "hopper-wgmma-bf16", "hopper-mma-tf32", "hopper-wgmma-tf32"})
        for (const double zero : {0.0, -0.0}) {
            EXPECT_EQ(beside_the_last_subnormal(unit, -157, zero), 0.0) << unit;
            EXPECT_EQ(beside_the_last_subnormal(unit, -158, zero), 0.0) << unit;
            EXPECT_EQ(beside_the_last_subnormal(unit, -159, zero), 0x1p-149) << unit;
        }
}

// A subnormal accumulator stands at -126: unit 2^-151. 2^-149 + 2^-149 - 2^-151 truncates to 2^-149, with 2^-152 cut it
// is 2^-148.
TEST(SubnormalAccumulator, StandsAtMinus126) {
    for (const char* unit : {"hopper-mma-bf16", "hopper-wgmma-bf16", "hopper-mma-tf32", "hopper-wgmma-tf32"}) {
        EXPECT_EQ(beside_the_last_subnormal(unit, -151, 0x1p-149), 0x1p-149) << unit;
        EXPECT_EQ(beside_the_last_subnormal(unit, -152, 0x1p-149), 0x1p-148) << unit;
    }
}

/// c + 2^-25 + 2^small, through both paths, of a unit that adds up in fp16.
double beside_half_the_last_of_fp16(const char* name, int small, double c) {
    const Accumulation unit = find_accumulation(name).value();
    const std::vector<double> a = {0x1p-13, 0x1p-24}, b = {0x1p-12, std::ldexp(1.0, small + 24)};
    const double plain = reference::dot(unit, a.data(), 1, b.data(), 1, 2, c);
    multiply_accumulate(unit, {a.data(), 1, 2}, {b.data(), 2, 1}, {&c, 1, 1});
    EXPECT_EQ(bits(c), bits(plain));
    return c;
}

// The same of fp16: a zero stands at -21, so that 2^(-21-25) = 2^-46 is the smallest term that is not cut. 2^-25 is a tie,
// which goes to 0; with 2^-46 beside it, it is above. A subnormal accumulator stands at -14, unit 2^-39.
TEST(ZeroAccumulator, OfFp16StandsAtMinus21) {
    for (const char* unit : {"hopper-mma-fp16-f16acc", "hopper-wgmma-fp16-f16acc"})
        for (const double zero : {0.0, -0.0}) {
            EXPECT_EQ(beside_half_the_last_of_fp16(unit, -45, zero), 0x1p-24) << unit;
            EXPECT_EQ(beside_half_the_last_of_fp16(unit, -46, zero), 0x1p-24) << unit;
            EXPECT_EQ(beside_half_the_last_of_fp16(unit, -47, zero), 0.0) << unit;
            EXPECT_EQ(beside_half_the_last_of_fp16(unit, -48, zero), 0.0) << unit;
            EXPECT_EQ(beside_half_the_last_of_fp16(unit, -39, 0x1p-23), 0x1.8p-23) << unit;
            EXPECT_EQ(beside_half_the_last_of_fp16(unit, -40, 0x1p-23), 0x1p-23) << unit;
        }
}

}  // namespace
}  // namespace faultline
