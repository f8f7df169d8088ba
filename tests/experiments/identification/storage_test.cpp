// SPDX-License-Identifier: Apache-2.0
// The formats that a file has its tensors in, and presets that stand in them.
#include <algorithm>
#include <array>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/identification/capture_storage.hpp>
#include <faultline/identification/identify.hpp>
#include <faultline/identification/table.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/plan/storage.hpp>

#include "made_captures.hpp"

namespace faultline::testing {
namespace {

using ::testing::HasSubstr;

// Kernels on fp16 tensors are presets with fp16 for bf16; the preset as it stands has few of their elements.
TEST(Storage, RanksPresetsInTheFormatsOfTheFile) {
    const auto fp16_inputs = [](LayerCapture& layer) {
        for (HeadArray* a : {&layer.q, &layer.k, &layer.v, &layer.dout}) {
            a->dtype = Dtype::f16;
            for (std::size_t i = 0; i < a->values.size(); ++i)
                a->values[i] =
                    round(a->values[i] * (1 + 0x1p-9 * static_cast<double>(i % 4)), fp16, Rounding::nearest_even);
        }
    };
    const RoundingPlan half = stored_as(plan("fa2"), {.fp16 = true}),
                       wide = stored_as(plan("fa3"), StorageFormats::wide(true));
    EXPECT_EQ(half.name, "fa2-fp16");
    EXPECT_EQ(half[Site::p_cast].format, fp16);
    EXPECT_EQ(half[Site::s_accumulate].accumulation, *find_accumulation("hopper-mma-fp16"));
    EXPECT_EQ(wide[Site::dq_cast].format, fp32);
    EXPECT_TRUE(plan("fa3-fp16-fp32-out").same_numerics(wide));
    EXPECT_EQ(stored_as(plan("exact"), StorageFormats::wide(true)), plan("exact"));
    const Capture capture = made_capture({{"half", half}, {"wide", wide}}, {.n = 160, .d = 64, .extras = fp16_inputs});
    IdentifyOptions options;
    options.search = false;
    options.candidates = {plan("fa2")};
    options.presets = {"fa2", "fa3", "math"};
    const Identification found = identify(capture, options);
    ASSERT_EQ(found.kernels.size(), 2u);
    EXPECT_EQ(found.kernels[0].nearest, "fa2-fp16");
    EXPECT_EQ(found.kernels[0].match.all().differing(), 0u);
    EXPECT_EQ(found.kernels[1].nearest, "fa3-fp16-fp32-out");
    EXPECT_EQ(found.kernels[1].match.all().differing(), 0u);
    for (const RankedPlan& ranked : found.kernels[0].ranking)
        if (ranked.plan == "fa2") {
            EXPECT_LT(ranked.match.all().share(), found_share) << "the preset as it stands";
        }
}

// A file may have each output in a type of its own: only the casts of those stand in it, and the name says which.
TEST(Storage, FollowsEachOutput) {
    StorageFormats mixed;
    mixed.outputs[1] = OutputStorage::fp32;
    mixed.outputs[0] = OutputStorage::fp16;
    EXPECT_EQ(suffix(mixed), "-fp16-o-fp32-dq");
    EXPECT_EQ(described(mixed), "its o is float16, its dq is float32");
    const RoundingPlan fa2 = plan("fa2"), stored = stored_as(fa2, mixed);
    EXPECT_EQ(stored.name, "fa2-fp16-o-fp32-dq");
    EXPECT_EQ(stored[Site::o_cast].format, fp16);
    EXPECT_EQ(stored[Site::dq_cast].format, fp32);
    EXPECT_EQ(stored[Site::dk_cast], fa2[Site::dk_cast]);
    EXPECT_EQ(stored[Site::p_cast], fa2[Site::p_cast]);
    EXPECT_EQ(stored[Site::kv_group_reduce], fa2[Site::kv_group_reduce]);
    // ThunderKittens returns its dq in fp32 as it is: nothing there is to be changed, or to be named.
    EXPECT_EQ(stored_as(plan("thunderkittens"), mixed).name, "thunderkittens-fp16-o");
    for (const bool fp16 : {false, true})
        for (int code = 0; code < 256; ++code) {
            StorageFormats storage{fp16, {}};
            for (std::size_t o = 0; o < 4; ++o) storage.outputs[o] = static_cast<OutputStorage>((code >> (2 * o)) & 3);
            const RoundingPlan written = stored_as(fa2, storage);
            EXPECT_EQ(plan(written.name), written) << written.name;
        }
    for (const char* none :
         {"", "-fp32", "-fp32-d", "-fp32-dqq", "-fp32-dq-fp32-o", "-out", "-fp16-", "-fp32-out-fp16"})
        EXPECT_FALSE(find_storage(none)) << none;
}

TEST(Storage, IsReadOfEachOutput) {
    Capture capture = made_capture({{"mine", plan("fa2-fp32-dq")}}, {.n = 64});
    std::array<std::optional<HeadArray>, 4>& outputs = capture.layers[0].observed[0].outputs;
    StorageFormats wanted;
    wanted.outputs[1] = OutputStorage::fp32;
    EXPECT_EQ(storage_of(capture, "mine"), wanted) << "by its values, in binary64";
    outputs[1]->dtype = Dtype::f32;
    outputs[0]->dtype = Dtype::bf16;
    EXPECT_EQ(storage_of(capture, "mine"), wanted);
    // Zeros in a wide type are in every type, and say nothing.
    std::fill(outputs[3]->values.begin(), outputs[3]->values.end(), 0);
    EXPECT_EQ(storage_of(capture, "mine"), wanted);
    Capture wide = made_capture({{"mine", plan("fa2-fp32-out")}}, {.n = 32});
    EXPECT_EQ(storage_of(wide, "mine"), StorageFormats::wide());
    std::vector<double>& zeros = wide.layers[0].observed[0].outputs[3]->values;
    std::fill(zeros.begin(), zeros.end(), 0);
    EXPECT_EQ(storage_of(wide, "mine"), StorageFormats::wide());
    outputs[2]->dtype = Dtype::f16;
    wanted.outputs[2] = OutputStorage::fp16;
    EXPECT_EQ(storage_of(capture, "mine"), wanted);
    EXPECT_THAT(storage_remark(wanted, file_types(capture, "mine", wanted), "mine", plan("fa2")),
                AllOf(HasSubstr("dq of mine is float32 and fa2 rounds it to less"),
                      HasSubstr("dk of mine is float16 and fa2 rounds it to another type of 16 bits")));
    EXPECT_EQ(storage_remark(wanted, file_types(capture, "mine", wanted), "mine", stored_as(plan("fa2"), wanted)), "");

    EXPECT_EQ(mixed_inputs_remark(capture, plan("fa2")), "");
    capture.layers[0].v.dtype = Dtype::f16;
    EXPECT_THAT(mixed_inputs_remark(capture, plan("fa2")),
                HasSubstr("q, k, do are bfloat16 and v float16, and fa2 rounds at v_cast"));
    RoundingPlan own = plan("fa2");
    Rule cast = own[Site::v_cast];
    cast.format = fp16;
    own.set(Site::v_cast, cast);
    EXPECT_EQ(mixed_inputs_remark(capture, own), "");
}

// A type is called what the file calls it, whatever its values are judged to be.
TEST(Storage, TypesAreNamedAsTheFileHasThem) {
    const auto remark = [](Capture& capture, Dtype dtype, const char* against) {
        for (auto& output : capture.layers[0].observed[0].outputs) output->dtype = dtype;
        const StorageFormats storage = storage_of(capture, "mine");
        return storage_remark(storage, file_types(capture, "mine", storage), "mine", plan(against));
    };
    Capture wide = made_capture({{"mine", plan("fa2-fp32-out")}}, {.n = 64});
    EXPECT_EQ(remark(wide, Dtype::f64, "fa2"), "the outputs of mine are float64 and fa2 rounds its outputs to less");
    EXPECT_EQ(remark(wide, Dtype::f32, "fa2"), "the outputs of mine are float32 and fa2 rounds its outputs to less");
    EXPECT_EQ(remark(wide, Dtype::f64, "fa2-fp32-out"), "");
    wide.layers[0].observed[0].outputs[1]->dtype = Dtype::f32;
    const StorageFormats storage = storage_of(wide, "mine");
    EXPECT_EQ(described_in_file(storage, file_types(wide, "mine", storage)),
              "its o is float64, its dq is float32, its dk is float64, its dv is float64");
    Capture one = made_capture({{"mine", plan("fa2-fp32-dq")}}, {.n = 64});
    EXPECT_EQ(remark(one, Dtype::f64, "fa2"), "dq of mine is float64 and fa2 rounds it to less");
    // Values of fp16 in a wider type, which is not called float16.
    Capture half = made_capture({{"mine", plan("fa2-fp16-o")}}, {.n = 64});
    EXPECT_EQ(remark(half, Dtype::f32, "fa2"),
              "o of mine is float32 with the values of float16 and fa2 rounds it to another type of 16 bits");
    const auto fp16_values = [](LayerCapture& layer) {
        for (HeadArray* a : {&layer.q, &layer.k, &layer.v}) {
            a->dtype = Dtype::f64;
            for (double& x : a->values) x = round(x * (1 + 0x1p-9), fp16, Rounding::nearest_even);
        }
    };
    Capture inputs = made_capture({{"mine", plan("fa2-fp16")}}, {.n = 64, .extras = fp16_values});
    EXPECT_EQ(remark(inputs, Dtype::f64, "fa2"),
              "the tensors of mine are float64 with the values of float16 and fa2 rounds to bfloat16");
    // Of fp8 no preset is written: it is compared rounded to that, and nothing is claimed of the plan.
    Capture eight = made_capture({{"mine", plan("fa2")}}, {.n = 64});
    EXPECT_EQ(remark(eight, Dtype::e4m3, "fa2"), "");
    EXPECT_EQ(remark(eight, Dtype::e5m2, "fa2"), "");
}

TEST(Storage, AKernelOfSeveralFormatsIsFound) {
    const Capture capture = made_capture({{"mine", plan("fa2-fp32-dq")}}, {.n = 96});
    IdentifyOptions options;
    options.search = false;
    options.presets = {"fa2", "math"};
    const KernelIdentification found = identify(capture, options).kernels.front();
    EXPECT_EQ(found.nearest, "fa2-fp32-dq");
    EXPECT_EQ(found.match.all().differing(), 0u);
    EXPECT_THAT(table({"", {found}, true}), HasSubstr("its dq is float64: presets are compared so"));
}

}  // namespace
}  // namespace faultline::testing
