// SPDX-License-Identifier: Apache-2.0
// faultline bisect as a user meets it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "support.hpp"

namespace faultline::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string refusal(const std::vector<std::string>& options) { return refused("bisect", options); }

TEST(BisectProgram, PrintsATableAnObjectAndAFile) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const std::vector<std::string> request{"bisect",  file,          "--until",           "layer0.o.rel_error < 1e-3",
                                           "--quiet", "--reproduce", "layer0.o.rel_error"};
    const Outcome text = run_program(request);
    ASSERT_EQ(text.status, 0) << text.err;
    EXPECT_THAT(text.out, AllOf(HasSubstr("until layer0.o.rel_error < 1e-3"), HasSubstr("o_cast")));
    for (const std::string& line : lines(text.out)) EXPECT_LE(line.size(), 110u) << line;
    std::vector<std::string> with_file = request;
    with_file.insert(with_file.end(), {"--json", "-o", folder / "sets.h5"});
    const Outcome json = run_program(with_file);
    ASSERT_EQ(json.status, 0) << json.err;
    const auto object = nlohmann::json::parse(json.out);
    EXPECT_EQ(object["schema"], "faultline.bisection/1");
    ASSERT_EQ(object["answers"].size(), 2u);
    for (const auto& answer : object["answers"]) {
        EXPECT_EQ(answer["met"], true);
        EXPECT_THAT(answer["sets"].dump(), HasSubstr("o_cast"));
    }
    EXPECT_THAT(folder.files(), ElementsAre("capture.safetensors", "sets.h5"));
    const Outcome inspected = run_program({"inspect", folder / "sets.h5"});
    EXPECT_EQ(inspected.status, 0) << inspected.err;
    EXPECT_THAT(inspected.out, AllOf(HasSubstr("in_set"), HasSubstr("value")));
}

TEST(BisectProgram, ATargetThatNothingMeetsIsExitOneWithASentence) {
    const Folder folder;
    const Outcome run = run_program({"bisect", small_capture(folder), "--until", "layer0.dq.rel_error < 1e-40",
                                     "--runs", "10", "--size", "1", "--quiet", "--heads", "0"});
    EXPECT_EQ(run.status, 1);
    EXPECT_THAT(run.err, AllOf(StartsWith("faultline bisect: not even every site exact meets it"), HasSubstr("1e-40")));
    EXPECT_EQ(lines(run.err).size(), 1u);
}

TEST(BisectProgram, RefusesInASentence) {
    const Folder folder;
    const std::string file = small_capture(folder);
    EXPECT_THAT(refusal({}), HasSubstr("--until"));
    EXPECT_THAT(refusal({file}), HasSubstr("--until: is missing"));
    EXPECT_THAT(refusal({folder / "none.safetensors", "--until", "dq.rel_error < 1"}), HasSubstr("none.safetensors"));
    EXPECT_THAT(refusal({file, "--until", "layer0.dq.rel_error"}), HasSubstr("expected LAYER.OUTPUT.MEASURE"));
    EXPECT_THAT(refusal({file, "--until", "layer9.dq.rel_error < 1"}),
                AllOf(HasSubstr("--until"), HasSubstr("layer9")));
    EXPECT_THAT(refusal({file, "--until", "layer0.dq.rel_error < 1", "--plan", "fa22"}),
                HasSubstr("did you mean \"fa2\"?"));
    EXPECT_THAT(refusal({file, "--reproduce", "layer0.dq.rel_error", "--within", "-1"}), HasSubstr("--within"));
    EXPECT_THAT(refusal({file, "--until", "layer0.dq.rel_error < 1e-3", "--until", "layer0.dq.rel_error > 1e-2"}),
                HasSubstr("--until: \"layer0.dq.rel_error > 1e-2\": cannot be met together with"));
    EXPECT_THAT(refusal({file, "--until", "layer0.dq.rel_error < 1", "--within", "0.2"}),
                HasSubstr("--within: means nothing without --reproduce"));
    EXPECT_THAT(refusal({file, "--reproduce", "layer0.dq.rel_error > 1e-3", "--within", "0.2"}),
                HasSubstr("--within: means nothing where no --reproduce is a measure alone"));
    EXPECT_THAT(refusal({file, "--until", "layer0.dq.rel_error < 1", "--heads", "7"}), HasSubstr("7: expected 0 to 1"));
    EXPECT_THAT(refusal({file, "--until", "layer0.dq.rel_error < 1", "--allow", "all"}), HasSubstr("--allow"));
}

}  // namespace
}  // namespace faultline::test
