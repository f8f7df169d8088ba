// SPDX-License-Identifier: Apache-2.0
// faultline check as a user and a CI system meet it.
#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/tensor/safetensors.hpp>

#include "support.hpp"

namespace faultline::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string refusal(const Folder& folder, const std::vector<std::string>& options) {
    return refused("check", options, &folder);
}

std::string content(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

// The toy kernel of the small capture returns deviates that have nothing to do with attention.
TEST(CheckProgram, AWrongKernelIsExitOneWithEveryReport) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const Outcome text = run_program({"check", file, "--quiet", "--junit", folder / "check.xml"});
    EXPECT_EQ(text.status, 1) << text.err;
    EXPECT_THAT(text.out, AllOf(HasSubstr("verdict: wrong"), HasSubstr("kernel toy")));
    EXPECT_THAT(content(folder / "check.xml"),
                AllOf(StartsWith("<?xml version=\"1.0\""), HasSubstr("<testsuite name=\"layer0\""),
                      HasSubstr("<failure type=\"wrong\""), HasSubstr("name=\"dq against fa2\"")));
    const Outcome json =
        run_program({"check", file, "--quiet", "--json", "-o", folder / "check.h5", "--kernel", "toy"});
    EXPECT_EQ(json.status, 1);
    const auto object = nlohmann::json::parse(json.out);
    EXPECT_EQ(object["schema"], "faultline.check/1");
    EXPECT_EQ(object["verdict"], "wrong");
    EXPECT_EQ(object["layers"][0]["outputs"].size(), 2u);
    EXPECT_THAT(folder.files(), ElementsAre("capture.safetensors", "check.h5", "check.xml"));
    const Outcome inspected = run_program({"inspect", folder / "check.h5"});
    EXPECT_EQ(inspected.status, 0) << inspected.err;
}

TEST(CheckProgram, PrintsTheWholeConfigurationInForce) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const Outcome printed = run_program({"check", file, "--print-config"});
    EXPECT_THAT(printed.out,
                AllOf(HasSubstr("alpha = 0.001"), HasSubstr("slack = 1.5"), HasSubstr("kernel = \"auto\"")));
    std::ofstream(folder / "check.toml") << printed.out;
    const std::vector<std::string> read{"check", "--config", folder / "check.toml", "--quiet"};
    EXPECT_EQ(run_program(read).out, run_program({"check", file, "--quiet"}).out) << "read back it makes the same run";
}

// A gradient without the gradient at the output cannot be judged, whatever it holds: that is said everywhere, and an exit 0 is
// not for it. The second layer has nothing else.
TEST(CheckProgram, AnOutputThatCannotBeJudgedIsNotPassedOver) {
    const Folder folder;
    const std::string file = folder / "capture.safetensors";
    ASSERT_EQ(run_program({"generate", "benign", "--plan", "fa2", "--seq", "16", "--head-dim", "16", "--heads", "1",
                           "-o", folder / "made.safetensors", "--quiet"})
                  .status,
              0);
    TensorSet set = read_safetensors(folder / "made.safetensors");
    set.tensors.erase("benign.do");
    for (const char* name : {"q", "k", "v", "fa2.dq"})
        set.tensors[std::string("other.") + name] = set.tensors.at(std::string("benign.") + name);
    write_safetensors(file, set);
    const Outcome text = run_program(
        {"check", file, "--plan", "fa2", "--quiet", "--junit", folder / "check.xml", "-o", folder / "check.h5"});
    EXPECT_EQ(text.status, 0) << text.err;
    EXPECT_THAT(text.out,
                AllOf(HasSubstr("within its rounding, of what could be judged"), HasSubstr("other: not judged"),
                      HasSubstr("dq, dk, dv not judged: there is no benign.do, the gradient at the output")));
    EXPECT_THAT(text.err, AllOf(HasSubstr("dq, dk, dv not judged"), HasSubstr("other: dq not judged")));
    EXPECT_THAT(content(folder / "check.xml"), AllOf(HasSubstr("failures=\"0\" errors=\"0\" skipped=\"4\""),
                                                     HasSubstr("<skipped message=\"dq, dk, dv not")));
    const auto object = nlohmann::json::parse(run_program({"check", file, "--plan", "fa2", "--quiet", "--json"}).out);
    EXPECT_EQ(object["all_judged"], false);
    EXPECT_EQ(object["layers"][0]["unjudged"], nlohmann::json({"dq", "dk", "dv"}));
    EXPECT_EQ(object["layers"][1]["verdict"], "not_judged");
    for (const char* outputs : {"o,dq", "dv"})
        EXPECT_THAT(refusal(folder, {file, "--plan", "fa2", "--layers", "benign", "--outputs", outputs}),
                    HasSubstr("benign.do: is not there: expected the gradient at the output, without which d"));
}

// On saturated rows ds is what two sums of the same products leave of each other: 0 in the plan, and with another order of
// delta's sum far more than dq. No dq is told there, and that is said; o and dv are judged as ever.
TEST(CheckProgram, SaysWhereItCannotTell) {
    const Folder folder;
    const std::string file = folder / "capture.safetensors";
    ASSERT_EQ(run_program({"generate", "saturated", "--plan", "fa2", "--seq", "64", "--head-dim", "32", "--heads", "1",
                           "-o", file, "--quiet"})
                  .status,
              0);
    const auto object = nlohmann::json::parse(run_program({"check", file, "--plan", "fa2", "--quiet", "--json"}).out);
    for (const auto& [output, blind] : {std::pair("o", false), {"dq", true}, {"dv", false}})
        EXPECT_EQ(object["layers"][0]["outputs"][output]["blind"], blind) << output;
    EXPECT_THAT(run_program({"check", file, "--plan", "fa2", "--quiet"}).out,
                HasSubstr("so that only a fault larger still is found, and an output of zeros would not be"));
}

TEST(CheckProgram, RefusesInASentence) {
    const Folder folder;
    const std::string file = small_capture(folder);
    EXPECT_THAT(refusal(folder, {}), HasSubstr("CAPTURE: is missing"));
    EXPECT_THAT(refusal(folder, {file, "--kernel", "tay"}),
                AllOf(HasSubstr("\"tay\""), HasSubstr("did you mean \"toy\"?")));
    EXPECT_THAT(refusal(folder, {file, "--plan", "fa22"}), HasSubstr("did you mean \"fa2\"?"));
    EXPECT_THAT(refusal(folder, {file, "--alpha", "0"}), HasSubstr("--alpha"));
    EXPECT_THAT(refusal(folder, {file, "--slack", "0.5"}), HasSubstr("--slack"));
    EXPECT_THAT(refusal(folder, {file, "--runs", "2"}), HasSubstr("--runs"));
    EXPECT_THAT(refusal(folder, {file, "--outputs", "dp"}), HasSubstr("--outputs"));
    // What is asked for by name is judged in every layer of the kernel, or nothing is.
    EXPECT_THAT(refusal(folder, {file, "--outputs", "dk"}), HasSubstr("layer0.toy.dk: is not there: expected it"));
    EXPECT_THAT(refusal(folder, {file, "--outputs", "o,lse"}), HasSubstr("layer0.toy.lse: is not there: expected it"));
    EXPECT_THAT(refusal(folder, {file, "--junit", folder / "no/check.xml"}), HasSubstr("no/check.xml"));
    EXPECT_THAT(refusal(folder, {file, "--junit", "-"}),
                HasSubstr("--junit: -: standard output takes the table or --json"));
    EXPECT_THAT(refusal(folder, {file, "-o", "-"}),
                HasSubstr("--output: -: standard output takes the table or --json"));
    TensorSet set;
    add_layer(set, "layer0");
    for (const char* name : {"layer0.toy.o", "layer0.toy.dq"}) set.tensors.erase(name);
    const Folder other;
    write_safetensors(other / "inputs.safetensors", set);
    EXPECT_THAT(refusal(other, {other / "inputs.safetensors"}), HasSubstr("no layer has an output of a kernel"));
}

}  // namespace
}  // namespace faultline::test
