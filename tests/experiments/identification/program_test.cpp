// SPDX-License-Identifier: Apache-2.0
// faultline identify as a user meets it: the table, the JSON object, the plan's file, and every refusal.
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/identification/table.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/safetensors.hpp>

#include "made_captures.hpp"
#include "support.hpp"

namespace faultline::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::string refusal(const Folder& folder, const std::vector<std::string>& options) {
    return refused("identify", options, &folder);
}

TEST(IdentifyProgram, NamesFlashOnTheShippedCapture) {
    const Outcome run = run_program(
        {"identify", ::faultline::testing::shipped_capture(), "--rank-only", "--kernel", "flash", "--json"});
    ASSERT_EQ(run.status, 0) << run.err;
    const auto object = nlohmann::json::parse(run.out);
    EXPECT_EQ(object["schema"], "faultline.identification/1");
    EXPECT_EQ(object["complete"], true);
    ASSERT_EQ(object["kernels"].size(), 1u);
    const auto& flash = object["kernels"][0];
    EXPECT_EQ(flash["kernel"], "flash");
    EXPECT_EQ(flash["ranking"][0]["plan"], "fa2-unfused-splitkv");
    EXPECT_EQ(flash["ranking"].size(), presets().size());
    EXPECT_GE(flash["ranking"][0]["outputs"]["o"]["equal"].get<double>(), 0.99);
    EXPECT_EQ(flash["ranking"][0]["layers"]["layer1"]["dq"]["total"], 512 * 128);
}

TEST(IdentifyProgram, WritesThePlanThatItFinds) {
    const Folder folder;
    const std::string file = folder / "capture.safetensors", out = folder / "found.toml";
    ASSERT_EQ(run_program({"generate", "benign", "--plan", "fa2", "--seq", "32", "--heads", "1", "-o", file, "--quiet"})
                  .status,
              0);
    const Outcome run = run_program({"identify", file, "--plans", "fa2,math", "-o", out, "--quiet"});
    ASSERT_EQ(run.status, 0) << run.err;
    EXPECT_EQ(run.err, "");
    EXPECT_THAT(run.out, AllOf(HasSubstr("equal elements"), HasSubstr("fa2"), HasSubstr("math")));
    for (const std::string& line : lines(run.out)) EXPECT_LE(line.size(), 110u) << line;
    const RoundingPlan found = read_plan(out);
    EXPECT_EQ(found.name, "identified-fa2");
    EXPECT_THAT(found.source, HasSubstr("faultline identify"));
    EXPECT_EQ(problem_with(found), "");
    EXPECT_THAT(folder.files(), ElementsAre("capture.safetensors", "found.toml"));
    // And the file is a plan like any other.
    const Outcome again = run_program({"identify", file, "--plans", out, "--rank-only", "--json"});
    EXPECT_EQ(again.status, 0) << again.err;
    EXPECT_EQ(nlohmann::json::parse(again.out)["kernels"][0]["ranking"][0]["plan"], "identified-fa2");
    // A plan that has some of the elements and not most is written, and a remark says that it is not the kernel.
    const Outcome other =
        run_program({"identify", file, "--plans", "math", "--rank-only", "-o", folder / "other.toml", "--quiet"});
    EXPECT_EQ(other.status, 1) << "the answer is no";
    EXPECT_THAT(read_plan(folder / "other.toml").description, HasSubstr("not the kernel"));
    EXPECT_THAT(other.err, AllOf(HasSubstr("of the elements of fa2: it is not that kernel"), HasSubstr("other.toml")));
    EXPECT_EQ(lines(other.err).size(), 1u);
}

// What the table prints is in the HDF5 file: every candidate, every change tried with the kind of its rule, what was found.
TEST(IdentifyProgram, WritesAllThatTheTableSays) {
    const Folder folder;
    const std::string file = folder / "capture.safetensors", out = folder / "found.h5";
    ASSERT_EQ(run_program({"generate", "benign", "--plan", "fa2-fp32-dq", "--seq", "32", "--head-dim", "16", "--heads",
                           "2", "-o", file, "--quiet"})
                  .status,
              0);
    const Outcome run = run_program({"identify", file, "--plans", "fa2,math", "-o", out, "--json", "--quiet"});
    ASSERT_EQ(run.status, 0) << run.err;
    const nlohmann::json kernel = nlohmann::json::parse(run.out)["kernels"][0];
    const RecordReader record(out);
    EXPECT_EQ(record.manifest().kind, "identification");
    const std::string group = kernel["kernel"].get<std::string>() + "/";
    const auto texts = [&](const std::string& path) { return record.read_strings(group + path); };
    const auto numbers = [&](const std::string& path) { return record.read(group + path).to_double(); };
    EXPECT_EQ(record.attribute(kernel["kernel"].get<std::string>(), "nearest"),
              kernel["identified"]["nearest"].get<std::string>());
    ASSERT_EQ(texts("candidates/plan").size(), kernel["ranking"].size());
    for (std::size_t i = 0; i < kernel["ranking"].size(); ++i) {
        const nlohmann::json& ranked = kernel["ranking"][i];
        EXPECT_EQ(texts("candidates/plan")[i], ranked["plan"].get<std::string>());
        const double total = numbers("candidates/total")[6 * i + 4];
        EXPECT_EQ(total - numbers("candidates/equal")[6 * i + 4], ranked["differing"].get<double>());
        EXPECT_EQ(total, 4.0 * 2 * 32 * 16);
    }
    const nlohmann::json& trials = kernel["identified"]["trials"];
    ASSERT_EQ(texts("trials/rule").size(), trials.size());
    for (std::size_t i = 0; i < trials.size(); ++i) {
        EXPECT_EQ(texts("trials/rule")[i], trials[i]["rule"].get<std::string>());
        EXPECT_EQ(numbers("trials/won")[i], trials[i]["won"].get<double>());
        EXPECT_EQ(numbers("trials/lost")[i], trials[i]["lost"].get<double>());
    }
    for (const char* rule : {"schedule", "format", "rounding", "accumulation", "exact"})
        EXPECT_THAT(texts("trials/rule"), ::testing::Contains(rule));
    EXPECT_EQ(texts("sites/site").size(), kernel["identified"]["sites"].size());
}

// The toy kernel of the small capture returns deviates that have nothing to do with attention.
TEST(IdentifyProgram, NamesNoPresetWhereNoneIsNearerThanChance) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const Outcome run = run_program({"identify", file, "--layers", "layer0", "--plans", "fa2,math", "--quiet"});
    EXPECT_EQ(run.status, 0);
    EXPECT_THAT(run.out, AllOf(HasSubstr("toy: no preset is this kernel"), Not(HasSubstr("changed"))));
    const Outcome saved = run_program(
        {"identify", file, "--layers", "layer0", "--plans", "fa2,math", "-o", folder / "found.toml", "--quiet"});
    EXPECT_EQ(saved.status, 1);
    EXPECT_THAT(saved.err, HasSubstr("no preset is this kernel"));
    EXPECT_THAT(folder.files(), ElementsAre("capture.safetensors"));
}

TEST(IdentifyProgram, RefusesInASentence) {
    const Folder folder;
    const std::string file = small_capture(folder);
    EXPECT_THAT(refusal(folder, {}), HasSubstr("CAPTURE: is missing"));
    EXPECT_THAT(refusal(folder, {folder / "none.safetensors"}), HasSubstr("none.safetensors"));
    EXPECT_THAT(refusal(folder, {file, "--kernel", "toys"}),
                AllOf(HasSubstr("\"toys\""), HasSubstr("expected toy"), HasSubstr("did you mean")));
    EXPECT_THAT(refusal(folder, {file, "--plans", "fa22"}),
                AllOf(HasSubstr("--plans"), HasSubstr("did you mean \"fa2\"?")));
    EXPECT_THAT(refusal(folder, {file, "--plans", folder / "none.toml"}), HasSubstr("none.toml"));
    EXPECT_THAT(refusal(folder, {file, "--layers", "layer7"}), HasSubstr("layer7"));
    EXPECT_THAT(refusal(folder, {file, "--heads", "9"}), HasSubstr("--heads: 9: expected 0 to"));
    EXPECT_THAT(refusal(folder, {file, "--allow", "anything"}), HasSubstr("--allow"));
    // Before the search, and whether or not there will be a plan to write.
    EXPECT_THAT(refusal(folder, {file, "--layers", "layer0", "-o", folder / "no/plan.toml"}),
                HasSubstr("expected an existing folder"));
    EXPECT_THAT(refusal(folder, {file, "-o", folder / "plan.txt"}), HasSubstr("expected a name that ends in .toml"));
    EXPECT_THAT(refusal(folder, {::faultline::testing::shipped_capture(), "-o", folder / "two.toml"}),
                AllOf(HasSubstr("2 kernels"), HasSubstr("--kernel")));
}

// The reason is what is missing, and not that there were no outputs.
TEST(IdentifyProgram, SaysWhyWhatIsThereCannotBeCompared) {
    const Folder folder;
    ASSERT_EQ(run_program({"generate", "benign", "--plan", "fa2", "--heads", "1", "--seq", "16", "--head-dim", "16",
                           "-o", folder / "made.safetensors", "--quiet"})
                  .status,
              0);
    TensorSet set = read_safetensors(folder / "made.safetensors");
    set.tensors.erase("benign.do");
    set.tensors["benign.other.o"] = set.tensors.at("benign.fa2.o");
    set.tensors.erase("benign.fa2.o");
    const std::string file = folder / "two.safetensors";
    write_safetensors(file, set);
    EXPECT_THAT(
        refusal(folder, {file, "--kernel", "fa2"}),
        HasSubstr("benign.fa2.dq: cannot be compared without benign.do, the gradient at the output: expected that, "
                  "or benign.fa2.o"));
    set.tensors.erase("benign.other.o");
    const std::string gradients = folder / "gradients.safetensors";
    write_safetensors(gradients, set);
    EXPECT_THAT(refusal(folder, {gradients}), HasSubstr("gradients.safetensors: benign.fa2.dq: cannot be compared"));
    for (const char* name : {"dq", "dk", "dv"}) set.tensors.erase(std::string("benign.fa2.") + name);
    set.tensors["benign.fa2.lse"] =
        make_tensor<float>("benign.fa2.lse", {1, 1, 16}, std::vector<float>(16), Dtype::f32);
    const std::string lse = folder / "lse.safetensors";
    write_safetensors(lse, set);
    EXPECT_THAT(refusal(folder, {lse}),
                HasSubstr("benign.fa2.lse: by an lse alone no plan is told: expected benign.fa2.o, or a gradient"));
}

// How near an answer came to being none stands under it.
TEST(IdentifyProgram, SaysHowNearTheBoundAnAnswerIs) {
    const Outcome math = run_program({"identify", ::faultline::testing::shipped_capture(), "--kernel", "math",
                                      "--plans", "math", "--rank-only", "--quiet"});
    EXPECT_EQ(math.status, 0) << math.err;
    EXPECT_THAT(math.out,
                HasSubstr("61.78% of dq is near the bound: with less than 60% it would not be called the kernel"));
}

// A heading names no plan as the answer that others tie with, and changes are told apart to their last word.
TEST(IdentifyProgram, SaysTiesAndWholeChanges) {
    const Folder folder;
    const std::string file = folder / "made.safetensors";
    ASSERT_EQ(run_program({"generate", "benign", "--plan", "fa2", "--heads", "1", "--seq", "16", "--head-dim", "16",
                           "-o", file, "--quiet"})
                  .status,
              0);
    const Outcome tied = run_program({"identify", file, "--quiet", "--plans", "fa2,fa3", "--rank-only"});
    ASSERT_EQ(tied.status, 0) << tied.err;
    EXPECT_THAT(tied.out, HasSubstr("fa2: fa2 or 1 other, not told apart (head size 16"));
    // Two of one name cannot be told apart in the answer.
    EXPECT_THAT(refusal(folder, {file, "--plans", "fa2,fa2"}), HasSubstr("--plans: \"fa2\": is there twice"));
    folder.write("own.toml", "base = \"fa2\"\nname = \"fa2\"\n[schedule]\nds_scale = \"before\"\n");
    EXPECT_THAT(refusal(folder, {file, "--plans", "fa2," + (folder / "own.toml")}),
                HasSubstr("its plan is named \"fa2\" as another is that differs: expected a name of its own"));
    // Two changes of one field whose last words differ, far beyond a line.
    KernelIdentification k;
    k.kernel = k.nearest = "kernel";
    k.ranking.push_back({"kernel", {}, {}});
    const std::string rule =
        "fused,terms=16,fraction_bits=25,min_exponent=-133,alignment=product,input_fraction_bits=10,";
    for (const char* last : {"output=f32", "output=f32_rz"})
        k.trials.push_back({"products", {{"sites.s_accumulate.accumulation", rule, rule + last}}, {}, {1, 0}});
    const std::string text = table(Identification{"made", {k}, true}, false);
    EXPECT_THAT(text, AllOf(HasSubstr("output=f32\n"), HasSubstr("output=f32_rz\n")));
    for (const std::string& line : lines(text)) EXPECT_LE(line.size(), 110u) << line;
}

// Two changes in fa2 with its arguments unfused: seven presets have all elements with the two, fa1 all but some, and which of them
// the search came from decides nothing. The others are named wherever the answer is.
TEST(IdentifyProgram, NamesAChangedPlanByThePresetWithMostElementsAndItsTies) {
    const Folder folder;
    folder.write("wanted.toml",
                 "base = \"fa2\"\nname = \"x\"\n[schedule]\nargument = \"unfused\"\nbwd_argument = \"unfused\"\n"
                 "[sites.p_cast]\nformat = \"fp16\"\n[sites.bwd_p_cast]\nformat = \"fp16\"\n");
    const std::string file = folder / "capture.safetensors", out = folder / "found.toml";
    ASSERT_EQ(run_program({"generate", "benign", "--plan", folder / "wanted.toml", "--seq", "96", "--head-dim", "64",
                           "-o", file, "--quiet"})
                  .status,
              0);
    const Outcome run = run_program({"identify", file, "--json", "-o", out, "--quiet"});
    ASSERT_EQ(run.status, 0) << run.err;
    const auto found = nlohmann::json::parse(run.out)["kernels"][0]["identified"];
    EXPECT_EQ(found["changes"].size(), 2u);
    EXPECT_EQ(found["differing"], 0) << found["nearest"];
    for (const char* other : {"fa2-unfused-splitkv", "thunderkittens"})
        EXPECT_THAT(found["near_ties"], ::testing::Contains(other));
    EXPECT_THAT(run.err, AllOf(HasSubstr("thunderkittens"), HasSubstr("with the same changes are not told from it")));
    EXPECT_THAT(read_plan(out).description, AllOf(HasSubstr("do not tell it from"), HasSubstr("thunderkittens")));
}

TEST(IdentifyProgram, RefusesACaptureWithoutObservedOutputs) {
    const Folder folder;
    TensorSet set;
    add_layer(set, "layer0");
    for (const char* name : {"layer0.toy.o", "layer0.toy.dq"}) set.tensors.erase(name);
    const std::string file = folder / "inputs.safetensors";
    write_safetensors(file, set);
    EXPECT_THAT(refusal(folder, {file}),
                AllOf(HasSubstr("inputs.safetensors"), HasSubstr("no layer has an output of a kernel")));
}

}  // namespace
}  // namespace faultline::test
