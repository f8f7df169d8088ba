// SPDX-License-Identifier: Apache-2.0
// Inputs with scales stand for exact numbers: against lib/format's own dequantisation, whose blocks are floats, and by hand
// where the products need more bits than a float has.
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/attribution/capture.hpp>
#include <faultline/base/error.hpp>
#include <faultline/format/block.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t rows = 12, size = 48;  // a last block that is shorter than 32

std::vector<float> numbers(std::uint64_t seed, std::int64_t count) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < count; ++i)
        values.push_back(static_cast<float>(RandomStream(seed).normal(static_cast<std::uint64_t>(i))));
    return values;
}

TensorSet plain() {
    TensorSet set;
    set.source = "test";
    std::uint64_t seed = 1;
    for (const char* name : {"l.q", "l.k", "l.v", "l.do"})
        set.add(make_tensor<float>(name, {1, 1, rows, size}, numbers(seed++, rows * size)));
    return set;
}

void replace(TensorSet& set, Tensor tensor) {
    set.tensors.erase(tensor.name);
    set.add(std::move(tensor));
}

Tensor bytes(const char* name, std::vector<std::int64_t> shape, const std::vector<std::uint8_t>& codes,
             Dtype dtype = Dtype::u8) {
    return make_tensor<std::uint8_t>(name, std::move(shape), codes, dtype);
}

/// Two codes to a byte, the first in the low half.
std::vector<std::uint8_t> in_pairs(const std::vector<std::uint8_t>& codes) {
    std::vector<std::uint8_t> pairs;
    for (std::size_t i = 0; i < codes.size(); i += 2)
        pairs.push_back(static_cast<std::uint8_t>(codes[i] | (codes[i + 1] << 4)));
    return pairs;
}

std::vector<double> wide(const std::vector<float>& x) { return {x.begin(), x.end()}; }

TEST(ScaledInputs, BlocksAreWhatTheirFormatSays) {
    for (const auto& [format, dtype] :
         {std::pair{mxfp8_e4m3, Dtype::e4m3}, {mxfp8_e5m2, Dtype::e5m2}, {mxfp4, Dtype::u8}}) {
        const QuantisedRows quantised = quantise(numbers(7, rows * size), size, format);
        TensorSet set = plain();
        if (dtype == Dtype::u8)
            replace(set, bytes("l.k", {1, 1, rows, size / 2}, in_pairs(quantised.elements)));
        else
            replace(set, bytes("l.k", {1, 1, rows, size}, quantised.elements, dtype));
        set.add(bytes("l.k_scale", {1, 1, rows, 2}, quantised.scales));
        const Capture capture = capture_of(set);
        EXPECT_EQ(capture["l"].k.values, wide(dequantise(quantised)));
        EXPECT_TRUE(capture.unused.empty());
    }
}

TEST(ScaledInputs, Nvfp4HasTwoLevelsOfScales) {
    const QuantisedRows quantised = quantise(numbers(8, rows * size), size, nvfp4);
    TensorSet set = plain();
    replace(set, bytes("l.q", {1, 1, rows, size / 2}, in_pairs(quantised.elements)));
    set.add(bytes("l.q_scale", {1, 1, rows, 3}, quantised.scales, Dtype::e4m3));
    set.add(make_tensor<float>("l.q_global_scale", {1}, std::vector{quantised.tensor_scale}));
    const std::vector<double> exact = capture_of(set)["l"].q.values;
    const std::vector<float> rounded = dequantise(quantised);
    int finer = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
        EXPECT_EQ(static_cast<float>(exact[i]), rounded[i]);
        finer += exact[i] != static_cast<double>(rounded[i]);  // 2 + 4 + 24 bits do not fit a float's 24
    }
    EXPECT_GT(finer, 0);
}

// Blocks of V down the sequence: the transposed matrix in blocks along its rows.
TEST(ScaledInputs, BlocksDownTheSequence) {
    const std::vector<float> values = numbers(9, rows * size);
    std::vector<float> turned(values.size());
    for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t c = 0; c < size; ++c) turned[c * rows + i] = values[i * size + c];
    const QuantisedRows quantised = quantise(turned, rows, mxfp8_e4m3);
    const std::vector<float> back = dequantise(quantised);
    std::vector<std::uint8_t> elements(values.size());
    for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t c = 0; c < size; ++c) elements[i * size + c] = quantised.elements[c * rows + i];
    TensorSet set = plain();
    replace(set, bytes("l.v", {1, 1, rows, size}, elements, Dtype::e4m3));
    set.add(bytes("l.v_scale", {1, 1, 1, size}, quantised.scales));
    const Capture capture = capture_of(set);
    const MatrixView<const double> v = capture["l"].v(0, 0);
    for (std::ptrdiff_t i = 0; i < rows; ++i)
        for (std::ptrdiff_t c = 0; c < size; ++c) EXPECT_EQ(v(i, c), back[static_cast<std::size_t>(c * rows + i)]);
}

TEST(ScaledInputs, DescaleIsOfTheTensorTheHeadOrBatchAndHead) {
    std::vector<std::uint8_t> codes;
    for (std::int64_t i = 0; i < 2 * 3 * rows * size; ++i) codes.push_back(static_cast<std::uint8_t>(i % 120));
    for (const std::int64_t count : {1, 3, 6}) {
        TensorSet set;
        set.source = "test";
        for (const char* name : {"l.q", "l.v"})
            set.add(make_tensor<float>(name, {2, 3, rows, size}, numbers(3, 6 * rows * size)));
        set.add(bytes("l.k", {2, 3, rows, size}, codes, Dtype::e4m3));
        std::vector<float> factors = numbers(4, count);
        for (float& factor : factors) factor = std::abs(factor);
        set.add(make_tensor<float>(
            "l.k_descale", count == 6 ? std::vector<std::int64_t>{2, 3} : std::vector<std::int64_t>{count}, factors));
        const Capture capture = capture_of(set);
        for (std::ptrdiff_t b = 0; b < 2; ++b)
            for (std::ptrdiff_t h = 0; h < 3; ++h) {
                const float factor = factors[static_cast<std::size_t>(count == 1 ? 0 : count == 3 ? h : 3 * b + h)];
                const auto at = static_cast<std::size_t>((b * 3 + h) * rows * size + 17);
                EXPECT_EQ(capture["l"].k(b, h)(0, 17), decode(codes[at], e4m3) * static_cast<double>(factor));
            }
    }
}

TEST(ScaledInputs, WhatDoesNotFitIsNamed) {
    const auto refused = [](const std::function<void(TensorSet&)>& change, const char* what) {
        TensorSet set = plain();
        replace(set, bytes("l.k", {1, 1, rows, size}, std::vector<std::uint8_t>(rows * size, 1), Dtype::e4m3));
        change(set);
        try {
            (void)capture_of(set);
            ADD_FAILURE() << "expected: " << what;
        } catch (const RequestError& error) {
            EXPECT_THAT(error.what(), HasSubstr(what));
        }
    };
    const auto scale = [](std::vector<std::int64_t> shape, std::size_t count, Dtype dtype = Dtype::u8) {
        return bytes("l.k_scale", std::move(shape), std::vector<std::uint8_t>(count, 127), dtype);
    };
    refused([&](TensorSet& s) { s.add(scale({1, 1, rows, 3}, 36)); }, "expected a scale for each block of 32");
    refused([&](TensorSet& s) { s.add(scale({rows, 2}, 24)); }, "expected the rank of l.k");
    refused(
        [&](TensorSet& s) {
            s.add(scale({1, 1, rows, 3}, 36, Dtype::e4m3));
        },
        "expected uint8 (e8m0) beside float8");
    refused([&](TensorSet& s) { s.tensors.erase("l.k"), s.add(scale({1, 1, rows, 2}, 24)); }, "stands without \"l.k\"");
    refused(
        [&](TensorSet& s) {
            std::vector<std::uint8_t> nan(24, 127);
            nan[5] = 255;
            s.add(bytes("l.k_scale", {1, 1, rows, 2}, nan));
        },
        "element [0, 0, 2, 32] is NaN");
    refused([&](TensorSet& s) { s.add(make_tensor<float>("l.k_descale", {5}, std::vector<float>(5, 1))); },
            "expected one floating-point number, [1] or [1, 1]");
    refused(
        [&](TensorSet& s) {
            s.add(make_tensor<float>("l.q_descale", {1, 2}, std::vector<float>(2, 1)));
        },
        "shape [1, 2]: expected one floating-point number");
    for (const char* x : {"q", "k", "v"})
        for (const float factor : {0.0F, -1.0F, std::numeric_limits<float>::infinity(), std::nanf("")})
            refused(
                [&](TensorSet& s) {
                    s.add(make_tensor<float>(fmt::format("l.{}_descale", x), {1}, std::vector<float>{factor}));
                },
                (fmt::format("l.{}_descale", x) + "\": element 0 is ").c_str());
    refused([&](TensorSet& s) { s.add(make_tensor<float>("l.k_global_scale", {1}, std::vector<float>{1})); },
            "stands without l.k_scale");
    refused(
        [&](TensorSet& s) {
            s.add(scale({1, 1, rows, 2}, 24));
            s.add(make_tensor<float>("l.k_descale", {1}, std::vector<float>{1}));
        },
        "expected one of them");
}

}  // namespace
}  // namespace faultline
