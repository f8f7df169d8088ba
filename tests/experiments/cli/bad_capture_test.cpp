// SPDX-License-Identifier: Apache-2.0
// Captures that the real program refuses, by their tensors and by their bytes: exit status 2, one sentence on standard error
// that names file, field and expectation, nothing on standard output, and no file left behind.
#include <cstring>
#include <functional>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/tensor/safetensors.hpp>

#include "bad_input.hpp"

namespace faultline::test {
namespace {

using ::testing::HasSubstr;

struct Case {
    const char* name;
    std::function<void(TensorSet&)> spoil;
    std::vector<std::string> expected;  ///< parts of the sentence, the file's name always among them
    std::vector<std::string> options = {};
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

void replace(TensorSet& set, const std::string& name, std::vector<std::int64_t> shape, double value = 0.5,
             Dtype dtype = Dtype::f32) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    set.tensors.erase(name);
    if (dtype == Dtype::i32) {
        const std::vector<std::int32_t> values(static_cast<std::size_t>(count), static_cast<std::int32_t>(value));
        set.add(make_tensor<std::int32_t>(name, std::move(shape), values));
        return;
    }
    const std::vector<float> values(static_cast<std::size_t>(count), static_cast<float>(value));
    set.add(make_tensor<float>(name, std::move(shape), values));
}

/// One bf16 element of a tensor.
void poke(TensorSet& set, const std::string& name, std::size_t element, std::uint16_t bits) {
    std::memcpy(set.tensors.at(name).bytes.data() + 2 * element, &bits, 2);
}

class BadCapture : public ::testing::TestWithParam<Case> {};

TEST_P(BadCapture, IsRefusedInOneSentence) {
    const Folder folder;
    TensorSet set;
    add_layer(set, "layer7");  // [1, 2, 24, 16], one key head
    GetParam().spoil(set);
    const std::string file = folder / "run7.safetensors";
    write_safetensors(file, set);
    const std::string sentence = refusal(folder, file, GetParam().options);
    EXPECT_THAT(sentence, HasSubstr("run7.safetensors"));
    for (const std::string& part : GetParam().expected) EXPECT_THAT(sentence, HasSubstr(part));
}

constexpr std::uint16_t bf16_nan = 0x7FC0, bf16_infinity = 0x7F80;
constexpr float infinity = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(
    Tensors, BadCapture,
    ::testing::Values(
        Case{"MissingKey",
             [](TensorSet& s) { s.tensors.erase("layer7.k"); },
             {"tensor \"layer7.k\" is missing", "expected"}},
        Case{"NoLayer",
             [](TensorSet& s) {
                 s.tensors.clear(), replace(s, "weights", {2, 2});
             },
             {"expected LAYER.q"}},
        Case{
            "HeadDim",
            [](TensorSet& s) {
                replace(s, "layer7.k", {1, 1, 24, 8});
            },
            {"tensor \"layer7.k\": shape [1, 1, 24, 8] does not match \"layer7.q\" [1, 2, 24, 16]: expected head_dim to agree"}},
        Case{"Batch",
             [](TensorSet& s) {
                 replace(s, "layer7.k", {3, 1, 24, 16});
             },
             {"\"layer7.k\"", "expected batch to agree"}},
        Case{"Sequence",
             [](TensorSet& s) {
                 replace(s, "layer7.v", {1, 1, 23, 16});
             },
             {"\"layer7.v\"", "seq to agree"}},
        Case{"GradientShape",
             [](TensorSet& s) {
                 replace(s, "layer7.do", {1, 2, 24, 8});
             },
             {"\"layer7.do\"", "expected head_dim to agree"}},
        Case{"GroupedHeads",
             [](TensorSet& s) {
                 replace(s, "layer7.q", {1, 3, 24, 16}), replace(s, "layer7.k", {1, 2, 24, 16});
             },
             {"2 key heads for the 3 query heads", "divides 3"}},
        Case{"Rank",
             [](TensorSet& s) { replace(s, "layer7.q", {384}); },
             {"\"layer7.q\": shape [384]", "expected [batch, heads, seq, head_dim]"}},
        Case{"ZeroHeads",
             [](TensorSet& s) {
                 replace(s, "layer7.q", {1, 0, 24, 16});
             },
             {"\"layer7.q\"", "heads is 0", "expected 1 or more"}},
        Case{"ZeroRows",
             [](TensorSet& s) {
                 replace(s, "layer7.q", {1, 2, 0, 16});
             },
             {"seq is 0"}},
        Case{"IntegerInput",
             [](TensorSet& s) {
                 replace(s, "layer7.q", {1, 2, 24, 16}, 1, Dtype::i32);
             },
             {"dtype int32", "floating-point"}},
        Case{"NaN",
             [](TensorSet& s) { poke(s, "layer7.q", 16 * 24 + 16 * 3 + 5, bf16_nan); },
             {"\"layer7.q\": element [0, 1, 3, 5] is NaN", "expected finite"}},
        Case{"Infinity",
             [](TensorSet& s) { poke(s, "layer7.do", 0, bf16_infinity); },
             {"\"layer7.do\": element [0, 0, 0, 0] is infinite"}},
        Case{"ObservedShape",
             [](TensorSet& s) {
                 replace(s, "layer7.toy.dq", {1, 2, 24, 8});
             },
             {"\"layer7.toy.dq\"", "expected [1, 2, 24, 16]"}},
        Case{"LseShape",
             [](TensorSet& s) {
                 replace(s, "layer7.toy.lse", {1, 2, 23});
             },
             {"\"layer7.toy.lse\"", "expected [1, 2, 24]"}},
        Case{"SingleKey",
             [](TensorSet& s) { s.tensors.clear(), add_layer(s, "layer7", {.n_q = 1, .n_k = 1}); },
             {"\"layer7.k\"", "--allow single-key"}},
        Case{"CausalWithoutKeys",
             [](TensorSet& s) { s.tensors.clear(), add_layer(s, "layer7", {.n_q = 24, .n_k = 8}); },
             {"\"layer7.q\"", "the first 16 rows see no key", "--allow masked-rows"}},
        Case{"MaskedRow",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 24}, -infinity);
             },
             {"\"layer7.mask\": row 0 of head 0", "--allow masked-rows"}},
        Case{"MaskMinimum",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 24}, std::numeric_limits<float>::lowest());
             },
             {"\"layer7.mask\"", "-3.402823e+38", "--allow mask-min"}},
        Case{"MaskHalfMinimum",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 24}, -65504);
             },
             {"\"layer7.mask\"", "--allow mask-min"}},
        Case{"MaskNaN",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 24}, NAN);
             },
             {"\"layer7.mask\": element [0, 0] is NaN"}},
        Case{"MaskInfinity",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 24}, infinity);
             },
             {"\"layer7.mask\": element [0, 0] is infinite"}},
        Case{"MaskShape",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 23});
             },
             {"\"layer7.mask\"", "expected [1, 2 or 1, 24, 24]"}},
        Case{"CausalText",
             [](TensorSet& s) { s.metadata["causal"] = "maybe"; },
             {"metadata \"causal\": \"maybe\"", "expected true or false"}},
        Case{"ScaleText",
             [](TensorSet& s) { s.metadata["scale"] = "-1"; },
             {"metadata \"scale\": \"-1\"", "expected a positive number"}},
        Case{"UnknownLayer",
             [](TensorSet&) {},
             {"no layer is called \"layer8\"", "expected layer7", "did you mean \"layer7\"?"},
             {"--layers", "layer8"}},
        Case{"UnknownHead", [](TensorSet&) {}, {"--heads: 2: expected 0 to 1"}, {"--heads", "2"}}),
    [](const auto& instance) { return std::string(instance.param.name); });

// What is refused by default is taken when asked for.
TEST(Allowed, DegenerateInputsWhenNamed) {
    const Folder folder;
    const std::string file = folder / "run7.safetensors";
    const auto run = [&](const std::function<void(TensorSet&)>& make, const char* allow) {
        TensorSet set;
        make(set);
        write_safetensors(file, set);
        return run_program(
            {"attribute", file, "--json", "--quiet", "--correction", "none", "--sites", "o_cast", "--allow", allow});
    };
    const Outcome single = run([](TensorSet& s) { add_layer(s, "layer7", {.n_q = 1, .n_k = 1}); }, "single-key");
    EXPECT_EQ(single.status, 0) << single.err;
    const Outcome masked = run([](TensorSet& s) { add_layer(s, "layer7", {.n_q = 24, .n_k = 8}); }, "masked-rows");
    EXPECT_EQ(masked.status, 0) << masked.err;
    const auto half_masked = [](TensorSet& s, float value) {
        add_layer(s, "layer7");
        std::vector<float> mask(24 * 24, 0);
        for (std::size_t i = 0; i < mask.size(); ++i)
            if (i % 24 > 11) mask[i] = value;
        s.add(make_tensor<float>("layer7.mask", {24, 24}, mask));
    };
    const Outcome minimum =
        run([&](TensorSet& s) { half_masked(s, std::numeric_limits<float>::lowest()); }, "mask-min");
    const Outcome minus_infinity = run([&](TensorSet& s) { half_masked(s, -infinity); }, "mask-min");
    EXPECT_EQ(minimum.status, 0) << minimum.err;
    EXPECT_EQ(minimum.out, minus_infinity.out);  // finfo.min is read as -infinity
}

std::string safetensors(const std::string& header, std::size_t data, std::uint64_t claimed = 0) {
    const std::uint64_t length = claimed != 0 ? claimed : header.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    return bytes + header + std::string(data, '\0');
}

TEST(BadFile, IsRefusedInOneSentence) {
    const Folder folder;
    const std::string entry = R"({"layer0.q":{"dtype":"BF16","shape":[2,4],"data_offsets":[0,16]}})";
    const std::vector<std::pair<std::string, std::string>> files{
        {"empty.safetensors", ""},
        {"short.safetensors", "abc"},
        {"truncated.safetensors", safetensors(entry, 9)},
        {"header-longer.safetensors", safetensors(entry, 16, 1'000'000)},
        {"header-huge.safetensors", safetensors(entry, 16, ~std::uint64_t{0} >> 1)},
        {"not-json.safetensors", safetensors("{\"layer0.q\":", 16)},
        {"overlapping.safetensors",
         safetensors(
             R"({"a.q":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"a.k":{"dtype":"BF16","shape":[2],"data_offsets":[2,6]}})",
             6)},
        {"out-of-range.safetensors", safetensors(R"({"a.q":{"dtype":"BF16","shape":[2],"data_offsets":[0,400]}})", 4)},
        {"unknown-dtype.safetensors", safetensors(R"({"a.q":{"dtype":"Q7","shape":[2],"data_offsets":[0,4]}})", 4)},
        {"shape-and-length.safetensors",
         safetensors(R"({"a.q":{"dtype":"BF16","shape":[3],"data_offsets":[0,4]}})", 4)},
        {"noise.h5", "not an HDF5 file"},
        {"noise.npy", "not a numpy file"},
        {"noise.bin", "nothing that we know"}};
    for (const auto& [name, bytes] : files) {
        SCOPED_TRACE(name);
        folder.write(name, bytes);
        const std::string sentence = refusal(folder, folder / name);
        EXPECT_THAT(sentence, HasSubstr(name));
        EXPECT_THAT(sentence, HasSubstr("expected"));
    }
    EXPECT_THAT(refusal(folder, folder / "absent.safetensors"), HasSubstr("absent.safetensors: cannot be opened"));
}

}  // namespace
}  // namespace faultline::test
