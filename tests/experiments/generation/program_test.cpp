// SPDX-License-Identifier: Apache-2.0
// faultline generate as a user meets it.
#include <filesystem>
#include <utility>

#include <fmt/format.h>
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
using ::testing::IsEmpty;

std::string refusal(const Folder& folder, const std::vector<std::string>& options) {
    return refused("generate", options, &folder);
}

TEST(GenerateProgram, WritesCapturesThatAttributeAndCheckTake) {
    const Folder folder;
    const std::string file = folder / "made.safetensors";
    const Outcome made = run_program({"generate", "saturated,two-level,padding", "-o", file, "--plan", "fa2", "--seq",
                                      "32", "--head-dim", "16", "--heads", "2", "--kv-heads", "1", "--quiet"});
    ASSERT_EQ(made.status, 0) << made.err;
    EXPECT_THAT(made.err, IsEmpty());
    const Outcome attributed =
        run_program({"attribute", file, "--correction", "none", "--sites", "o_cast", "--quiet", "--json"});
    ASSERT_EQ(attributed.status, 0) << attributed.err;
    const auto object = nlohmann::json::parse(attributed.out);
    ASSERT_EQ(object["layers"].size(), 3u);
    for (const auto& layer : object["layers"])
        EXPECT_EQ(layer["outputs"]["dq"]["observed"]["fa2"]["bit_equal_to_plan"], 1.0) << layer["name"];
    const Outcome same = run_program({"generate", "saturated,two-level,padding", "-o", file, "--seq", "32"});
    EXPECT_EQ(same.status, 2) << "a file was replaced without --force";
}

TEST(GenerateProgram, ListsAndSearches) {
    const Folder folder;
    const Outcome list = run_program({"generate", "--list"});
    ASSERT_EQ(list.status, 0) << list.err;
    EXPECT_THAT(list.out, AllOf(HasSubstr("two-level"), HasSubstr("alibi")));
    for (const std::string& line : lines(list.out)) EXPECT_LE(line.size(), 110u) << line;
    EXPECT_EQ(nlohmann::json::parse(run_program({"generate", "--list", "--json"}).out)["families"].size(), 23u);
    const Outcome found = run_program({"generate", "--maximize", "o_cast", "--evaluations", "200", "--seq", "8",
                                       "--head-dim", "8", "-o", folder / "worst.safetensors", "--quiet"});
    ASSERT_EQ(found.status, 0) << found.err;
    EXPECT_THAT(found.out, AllOf(HasSubstr("site o_cast"), HasSubstr("random inputs in the same ranges")));
    for (const std::string& line : lines(found.out)) EXPECT_LE(line.size(), 110u) << line;
    EXPECT_THAT(folder.files(), ElementsAre("worst.safetensors"));
}

// "all" is all that the plan and the type can have; a family asked for by its name is asked for.
TEST(GenerateProgram, AllLeavesOutWhatCannotBe) {
    const Folder folder;
    const std::vector<std::string> small{"--heads",    "1",  "--seq", "32",
                                         "--head-dim", "32", "-o",    folder / "x.safetensors"};
    for (const auto& [family, options] :
         {std::pair{"sink-logit", std::vector<std::string>{"--plan", "fa1"}}, {"paged", {"--dtype", "mxfp8_e4m3"}}}) {
        std::vector<std::string> request{"generate", "all", "--force"}, named{family};
        for (const auto* words : {&options, &small}) {
            request.insert(request.end(), words->begin(), words->end());
            named.insert(named.end(), words->begin(), words->end());
        }
        std::filesystem::remove(folder / "x.safetensors");
        EXPECT_THAT(refusal(folder, named), HasSubstr(family));
        const Outcome all = run_program(request);
        EXPECT_EQ(all.status, 0) << all.err;
        EXPECT_THAT(all.err, HasSubstr(fmt::format("{} is left out: ", family)));
        EXPECT_FALSE(read_safetensors(folder / "x.safetensors").tensors.empty());
    }
}

TEST(GenerateProgram, RefusesInASentence) {
    const Folder folder;
    const std::string out = folder / "x.safetensors";
    EXPECT_THAT(refusal(folder, {}), HasSubstr("FAMILY: is missing"));
    EXPECT_THAT(refusal(folder, {"saturatd", "-o", out}), HasSubstr("did you mean \"saturated\"?"));
    EXPECT_THAT(refusal(folder, {"benign,", "-o", out}), HasSubstr("FAMILY"));
    EXPECT_THAT(refusal(folder, {"benign"}), HasSubstr("--output: is missing"));
    EXPECT_THAT(refusal(folder, {"benign", "-o", folder / "x.h5"}),
                HasSubstr("expected a name that ends in .safetensors"));
    EXPECT_THAT(refusal(folder, {"benign", "-o", out, "--dtype", "int8"}), HasSubstr("--dtype"));
    EXPECT_THAT(refusal(folder, {"benign", "-o", out, "--heads", "3", "--kv-heads", "2"}),
                HasSubstr("expected a whole number"));
    EXPECT_THAT(refusal(folder, {"benign", "-o", out, "--seq", "64", "--keys", "32"}), HasSubstr("--no-causal"));
    EXPECT_THAT(refusal(folder, {"alibi", "-o", out, "--causal"}), HasSubstr("mask of its own"));
    EXPECT_THAT(refusal(folder, {"benign", "-o", out, "--plan", "fa22"}), HasSubstr("did you mean \"fa2\"?"));
    EXPECT_THAT(refusal(folder, {"--maximize", "o_cats"}), HasSubstr("did you mean \"o_cast\"?"));
    EXPECT_THAT(refusal(folder, {"benign", "--maximize", "o_cast"}), HasSubstr("expected none with --maximize"));
    EXPECT_THAT(refusal(folder, {"--maximize", "o_cast", "--largest", "1e9"}), HasSubstr("--largest"));
    EXPECT_THAT(refusal(folder, {"--maximize", "merge"}), HasSubstr("exact in plan"));
    EXPECT_THAT(refusal(folder, {"saturated,ring,saturated"}), HasSubstr("FAMILY: \"saturated\": is there twice"));
    // The reason, and not that 1 were out of range.
    for (const char* option : {"--largest", "--evaluations"})
        EXPECT_THAT(refusal(folder, {"benign", "-o", out, option, "1"}),
                    HasSubstr(fmt::format("{}: means nothing without --maximize", option)));
    EXPECT_THAT(refusal(folder, {"--list", "--seq", "64"}), HasSubstr("--seq: means nothing with --list"));
    EXPECT_THAT(refusal(folder, {"--list", "benign"}), HasSubstr("means nothing with --list"));
}

}  // namespace
}  // namespace faultline::test
