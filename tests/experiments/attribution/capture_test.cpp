// SPDX-License-Identifier: Apache-2.0
// Captures from tensors in memory: what is read as what. What is refused is tested on the program (tests/experiments/cli).
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/attribution/capture.hpp>
#include <faultline/base/error.hpp>

namespace faultline {
namespace {

using ::testing::ElementsAre;

void add(TensorSet& set, const std::string& name, std::vector<std::int64_t> shape, float first = 0) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    std::vector<float> values;
    for (std::int64_t i = 0; i < count; ++i) values.push_back(first + static_cast<float>(i));
    set.add(make_tensor<float>(name, std::move(shape), values));
}

TensorSet layer(const std::string& name, const std::vector<std::int64_t>& q, const std::vector<std::int64_t>& kv) {
    TensorSet set;
    set.source = "test";
    add(set, name + ".q", q);
    add(set, name + ".k", kv, 100);
    add(set, name + ".v", kv, 200);
    add(set, name + ".do", q, 300);
    return set;
}

TEST(Capture, LayersComeInNaturalOrder) {
    TensorSet set;
    for (const char* name : {"layer10", "layer2", "layer1", "block.3.attn", "layer02"}) {
        for (const char* input : {".q", ".k", ".v", ".do"}) add(set, name + std::string(input), {4, 2});
    }
    EXPECT_THAT(layer_names(set), ElementsAre("block.3.attn", "layer1", "layer02", "layer2", "layer10"));
}

TEST(Capture, MissingLeadingDimensionsAreOne) {
    const Capture two = capture_of(layer("l", {4, 2}, {4, 2}));
    EXPECT_EQ(two["l"].q.batch, 1);
    EXPECT_EQ(two["l"].q.heads, 1);
    EXPECT_EQ(two["l"].q.rows, 4);
    EXPECT_EQ(two["l"].q.cols, 2);
    const Capture three = capture_of(layer("l", {6, 4, 2}, {3, 4, 2}));
    EXPECT_EQ(three["l"].heads(), 6);
    EXPECT_EQ(three["l"].kv_heads(), 3);
    EXPECT_EQ(three["l"].k(0, 1)(2, 1), 100 + 1 * 8 + 2 * 2 + 1);  // row-major [head, seq, head_dim]
}

TEST(Capture, KernelsAreFoundByName) {
    TensorSet set = layer("layer1", {1, 2, 4, 2}, {1, 1, 4, 2});
    add(set, "layer1.flash.o", {1, 2, 4, 2});
    add(set, "layer1.flash.dk", {1, 1, 4, 2});
    add(set, "layer1.flash.lse", {1, 2, 4});
    add(set, "layer1.cudnn.dq", {2, 4, 2});
    add(set, "layer1.cudnn.notes", {7});  // not an output: left alone
    const Capture capture = capture_of(set);
    const std::vector<ObservedKernel>& observed = capture["layer1"].observed;
    ASSERT_EQ(observed.size(), 2u);
    EXPECT_EQ(observed[0].name, "cudnn");
    EXPECT_TRUE(observed[0][Output::dq]);
    EXPECT_FALSE(observed[0][Output::o]);
    EXPECT_EQ(observed[1].name, "flash");
    EXPECT_EQ(observed[1].lse->rows, 4);
    EXPECT_EQ(observed[1].lse->cols, 1);
}

// 1/sqrt(head_dim) as a file holds it is a rounding of the number that is meant; anything else is taken as it stands.
TEST(Capture, ScaleOfTheMetadata) {
    TensorSet set = layer("l", {4, 2}, {4, 2});
    EXPECT_FALSE(capture_of(set)["l"].scale);
    set.metadata["scale"] = "0.70710678";  // 1/sqrt(2) to fp32
    EXPECT_FALSE(capture_of(set)["l"].scale);
    set.metadata["scale"] = "0.125";
    EXPECT_EQ(capture_of(set)["l"].scale, 0.125);
    CaptureOptions options;
    options.scale = 2;
    EXPECT_EQ(capture_of(set, options)["l"].scale, 2);
}

TEST(Capture, CausalUnlessTheFileOrAMaskSaysOtherwise) {
    TensorSet set = layer("l", {4, 2}, {4, 2});
    EXPECT_TRUE(capture_of(set)["l"].causal);
    set.metadata["causal"] = "false";
    EXPECT_FALSE(capture_of(set)["l"].causal);
    set.metadata.clear();
    add(set, "l.mask", {4, 4});
    EXPECT_FALSE(capture_of(set)["l"].causal);
    EXPECT_EQ((*capture_of(set)["l"].bias)(0, 0)(1, 2), 6);
    set.metadata["causal"] = "true";
    EXPECT_TRUE(capture_of(set)["l"].causal);
    CaptureOptions options;
    options.causal = false;
    EXPECT_FALSE(capture_of(set, options)["l"].causal);
}

TEST(Capture, BooleanMaskIsTrueWhereAQueryLooks) {
    TensorSet set = layer("l", {2, 2}, {2, 2});
    const std::vector<std::uint8_t> bits{1, 0, 1, 1};
    set.add(make_tensor<std::uint8_t>("l.mask", {2, 2}, bits, Dtype::boolean));
    const Capture capture = capture_of(set);
    EXPECT_EQ((*capture["l"].bias)(0, 0)(0, 0), 0);
    EXPECT_EQ((*capture["l"].bias)(0, 0)(0, 1), -std::numeric_limits<double>::infinity());
    EXPECT_EQ((*capture["l"].bias)(0, 0)(1, 1), 0);
}

// NaN in what a kernel returned is a finding, not a mistake in the capture.
TEST(Capture, ObservedOutputsMayBeAnything) {
    TensorSet set = layer("l", {2, 2}, {2, 2});
    const std::vector<float> values{NAN, INFINITY, 1, 2};
    set.add(make_tensor<float>("l.flash.dq", {2, 2}, values));
    EXPECT_NO_THROW((void)capture_of(set));
}

TEST(Capture, LseHasOneNumberForEachRow) {
    const auto rows_of = [](std::vector<std::int64_t> shape) {
        TensorSet set = layer("l", {1, 2, 4, 2}, {1, 2, 4, 2});
        add(set, "l.flash.lse", std::move(shape));
        return capture_of(set)["l"].observed[0].lse->rows;
    };
    EXPECT_EQ(rows_of({1, 2, 4}), 4);
    EXPECT_EQ(rows_of({1, 2, 4, 1}), 4);
    EXPECT_EQ(rows_of({2, 4}), 4);
    for (const std::vector<std::int64_t>& shape :
         {std::vector<std::int64_t>{1, 2, 4, 2}, {1, 1, 2, 4, 1}, {2, 4, 1}, {8}}) {
        try {
            (void)rows_of(shape);
            ADD_FAILURE() << shape_text(shape);
        } catch (const RequestError& error) {
            EXPECT_THAT(error.what(), ::testing::EndsWith("l.flash.lse\": shape " + shape_text(shape) +
                                                          ": expected [1, 2, 4] (batch, heads, seq of \"l.q\")"));
        }
    }
}

TEST(Capture, OnlyTheLayersAskedForAreChecked) {
    TensorSet set = layer("good", {4, 2}, {4, 2});
    add(set, "bad.q", {4, 2});
    CaptureOptions options;
    EXPECT_THROW((void)capture_of(set, options), RequestError);
    options.layers = {"good"};
    EXPECT_EQ(capture_of(set, options).layers.size(), 1u);
    EXPECT_THROW((void)capture_of(set, options)["bad"], RequestError);
}

}  // namespace
}  // namespace faultline
