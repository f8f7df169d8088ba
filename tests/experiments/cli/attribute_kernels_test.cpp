// SPDX-License-Identifier: Apache-2.0
// Which kernels and plans `attribute` takes of a capture, and its report.
#include <fstream>
#include <iterator>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/tensor/safetensors.hpp>

#include "support.hpp"

namespace faultline::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// A capture whose kernel is another preset: asked for nothing, that one is attributed; asked for a plan that it is not, both.
TEST(Attribute, AKernelIsAttributedByItsOwnPlan) {
    const Folder folder;
    const std::string file = folder / "kernel.safetensors";
    ASSERT_EQ(run_program({"generate", "large-key-mean", "--plan", "standard-bf16", "--heads", "1", "--seq", "40",
                           "--head-dim", "16", "-o", file, "--quiet"})
                  .status,
              0);
    const std::vector<std::string> few{"--quiet", "--sites", "o_cast", "--correction", "none"};
    std::vector<std::string> request{"attribute", file, "--json"};
    request.insert(request.end(), few.begin(), few.end());
    const Outcome automatic = run_program(request);
    ASSERT_EQ(automatic.status, 0) << automatic.err;
    EXPECT_EQ(json::parse(automatic.out)["plan"], "standard-bf16");
    request = {"attribute", file, "--plan", "fa2"};
    request.insert(request.end(), few.begin(), few.end());
    const Outcome asked = run_program(request);
    ASSERT_EQ(asked.status, 0) << asked.err;
    EXPECT_THAT(asked.out,
                ::testing::AllOf(
                    ::testing::HasSubstr("plan fa2\n"),
                    ::testing::HasSubstr("the kernel standard-bf16 is not fa2, and nearest to standard-bf16, which has "
                                         "100.00% of its elements. The same by standard-bf16:")));
}

// The plan of one kernel is that kernel's, also where it has only part of its elements: no second table by the plan of another.
TEST(Attribute, APlanThatIsNearestToSomeKernelStandsAlone) {
    const Folder folder;
    const auto capture_of = [&](const std::string& preset) {
        const std::string file = folder / (preset + ".safetensors");
        EXPECT_EQ(run_program({"generate", "large-key-mean", "--plan", preset, "--heads", "1", "--seq", "40",
                               "--head-dim", "16", "-o", file, "--quiet"})
                      .status,
                  0);
        return read_safetensors(file);
    };
    TensorSet both = capture_of("standard-bf16");
    const TensorSet fa2 = capture_of("fa2");
    for (const auto& [name, tensor] : fa2.tensors)
        if (const std::size_t at = name.find(".fa2."); at != std::string::npos) {
            Tensor renamed = tensor;
            renamed.name = name.substr(0, at) + ".flash." + name.substr(at + 5);
            both.add(std::move(renamed));
        }
    for (auto& [name, tensor] : both.tensors)  // every fourth element of dq's one bit off
        if (name.find(".standard-bf16.dq") != std::string::npos)
            for (std::size_t i = 0; i < tensor.bytes.size(); i += 8) tensor.bytes[i] ^= std::byte{1};
    write_safetensors(folder / "both.safetensors", both);
    const Outcome run = run_program({"attribute", folder / "both.safetensors", "--quiet", "--sites", "o_cast",
                                     "--correction", "none", "--plan", "standard-bf16"});
    ASSERT_EQ(run.status, 0) << run.err;
    EXPECT_THAT(run.out, ::testing::AllOf(HasSubstr("plan standard-bf16\n"), HasSubstr("flash is nearer to --plan fa"),
                                          ::testing::Not(HasSubstr("The same by"))));
    EXPECT_THAT(run.out, HasSubstr("the plan standard-bf16 is")) << "not the kernel of that name";
}

// Asked for one kernel, the answer is that of a capture that has no other: plan, table and remarks.
TEST(Attribute, KeepsToTheKernelsAskedFor) {
    const Folder folder;
    TensorSet two;
    for (const char* preset : {"math", "standard-bf16"}) {
        const std::string file = folder / fmt::format("{}.safetensors", preset);
        ASSERT_EQ(run_program({"generate", "large-key-mean", "--plan", preset, "--heads", "1", "--seq", "40",
                               "--head-dim", "16", "-o", file, "--quiet"})
                      .status,
                  0);
        for (const auto& [name, tensor] : read_safetensors(file).tensors)
            if (two.find(name) == nullptr) two.add(tensor);
    }
    const std::string file = folder / "two.safetensors";
    write_safetensors(file, two);
    const auto attributed = [&](std::vector<std::string> more) {
        more.insert(more.begin(), {"attribute", file, "--quiet", "--sites", "o_cast", "--correction", "none"});
        return run_program(more);
    };
    const Outcome both = attributed({"--json"}), one = attributed({"--json", "--kernel", "standard-bf16"});
    ASSERT_EQ(one.status, 0) << one.err;
    EXPECT_EQ(json::parse(both.out)["plan"], "math");
    EXPECT_EQ(json::parse(one.out)["plan"], "standard-bf16");
    const auto kernels = [](const Outcome& run) {
        std::vector<std::string> names;
        const json whole = json::parse(run.out);
        for (const auto& [name, seen] : whole["layers"][0]["outputs"]["dq"]["observed"].items()) names.push_back(name);
        return names;
    };
    EXPECT_EQ(kernels(both), (std::vector<std::string>{"math", "standard-bf16"}));
    EXPECT_EQ(kernels(one), (std::vector<std::string>{"standard-bf16"}));
    EXPECT_THAT(attributed({"--plan", "math", "--kernel", "math"}).out, ::testing::Not(HasSubstr("standard-bf16")));
    const Outcome wrong = attributed({"--kernel", "standard-bf61"});
    EXPECT_EQ(wrong.status, 2);
    EXPECT_THAT(wrong.err, ::testing::AllOf(HasSubstr("--kernel: \"standard-bf61\""), HasSubstr("\"standard-bf16\"?")));
}

// Elements are compared after rounding to the file's type, as identify does it: a plan that rounds nothing has the elements of a
// kernel whose only rounding is the last.
TEST(Attribute, EqualElementsAreThoseOfIdentify) {
    const Folder folder;
    const std::string file = folder / "kernel.safetensors";
    ASSERT_EQ(run_program({"generate", "benign", "--plan", "math", "--heads", "1", "--seq", "40", "--head-dim", "16",
                           "-o", file, "--quiet"})
                  .status,
              0);
    const Outcome own =
                      run_program({"attribute", file, "--quiet", "--json", "--plan", "exact", "--correction", "none"}),
                  ranked = run_program({"identify", file, "--quiet", "--json", "--plans", "exact", "--rank-only"});
    ASSERT_EQ(own.status, 0) << own.err;
    ASSERT_EQ(ranked.status, 0) << ranked.err;
    const json kernel = json::parse(ranked.out)["kernels"][0]["ranking"][0]["layers"];
    for (const auto& [layer, outputs] : kernel.items())
        for (const auto& [name, output] : outputs.items()) {
            EXPECT_GT(output["equal"], 0.9) << name;
            EXPECT_EQ(json::parse(own.out)["layers"][0]["outputs"][name]["observed"]["math"]["bit_equal_to_plan"],
                      output["equal"])
                << layer << name;
        }
}

// A mask that the kernel was not given: every kernel is as far off, which no rounding is, and the plan is not said to be
// wrong as they are.
TEST(Attribute, KernelsOfOtherInputsAreRemarked) {
    const Folder folder;
    const std::string file = folder / "kernel.safetensors";
    ASSERT_EQ(run_program({"generate", "benign", "--plan", "fa2", "--heads", "1", "--seq", "40", "--head-dim", "16",
                           "-o", file, "--quiet"})
                  .status,
              0);
    const std::vector<std::string> request{"attribute", file,     "--quiet",      "--plan", "fa2",
                                           "--sites",   "o_cast", "--correction", "none"};
    const Outcome right = run_program(request);
    EXPECT_EQ(right.status, 0) << right.err;
    EXPECT_THAT(right.out, ::testing::Not(::testing::HasSubstr("off the truth of these inputs")));
    std::vector<std::string> unmasked = request;
    unmasked.emplace_back("--no-causal");
    const Outcome wrong = run_program(unmasked);
    EXPECT_EQ(wrong.status, 0) << wrong.err;
    EXPECT_THAT(wrong.out, ::testing::HasSubstr("off the truth of these inputs, and the plan's is not"));
    EXPECT_THAT(wrong.out, ::testing::Not(::testing::HasSubstr(" wrong as fa2 is")));
}

TEST(Attribute, ReportOfSomeHeadsSaysWhich) {
    const Folder folder;
    const std::string file = folder / "two.safetensors", page = folder / "report.html";
    ASSERT_EQ(run_program({"generate", "benign", "--heads", "2", "--seq", "24", "--head-dim", "16", "-o", file}).status,
              0);
    for (const bool some : {false, true}) {
        std::vector<std::string> request{"attribute", file,      "--sites", "o_cast",   "--correction",
                                         "none",      "--force", "--quiet", "--report", page};
        if (some) request.insert(request.end(), {"--heads", "1"});
        ASSERT_EQ(run_program(request).status, 0);
        std::ifstream in(page);
        const std::string text{std::istreambuf_iterator<char>(in), {}};
        EXPECT_THAT(text, ::testing::HasSubstr("2 query heads"));
        EXPECT_EQ(text.find("; here head 1<") != std::string::npos, some);
        EXPECT_EQ(text.find("over all heads;") == std::string::npos, some) << "the legend";
    }
}

TEST(Attribute, WritesAReportWholeAndNeverOverAFile) {
    const Folder folder;
    const std::string file = small_capture(folder), page = folder / "report.html";
    const std::vector<std::string> request{"attribute", file,      "--sites",  "o_cast", "--correction",
                                           "none",      "--quiet", "--report", page};
    ASSERT_EQ(run_program(request).status, 0);
    EXPECT_THAT(folder.files(), ::testing::ElementsAre("capture.safetensors", "report.html"));
    const Outcome again = run_program(request);
    EXPECT_EQ(again.status, 2);
    EXPECT_THAT(again.err, ::testing::HasSubstr("--report"));
    const Outcome over = run_program({"attribute", file, "--report", file, "--force"});
    EXPECT_EQ(over.status, 2);
    EXPECT_THAT(over.err, ::testing::HasSubstr("expected another file"));
}

}  // namespace
}  // namespace faultline::test
