// SPDX-License-Identifier: Apache-2.0
// Verdicts on the real kernels of the captures, each by its own plan.
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/attribution/group_run.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/verdict/report.hpp>

#include "made_checks.hpp"

namespace faultline {
namespace {

using namespace test;

TEST(Check, OnTheHealthyCapturesEveryKernelIsWithinItsRounding) {
    const std::filesystem::path file = testing::captures_folder() / "healthy64-3000.safetensors";
    if (!std::filesystem::exists(file)) GTEST_SKIP() << file << " is not here (FAULTLINE_CAPTURES names its folder)";
    const Capture capture = read_capture(file.string());
    const std::vector<std::pair<std::string, std::string>> kernels{
        {"flash", "fa2-unfused-splitkv"}, {"cudnn", "cudnn-like"}, {"efficient", "efficient"}, {"math", "math"}};
    for (const auto& [kernel, name] : kernels) {
        CheckOptions options = quick();
        options.kernel = kernel;
        options.heads = {0, 1};
        const Check found = check(capture, plan(name), options);
        EXPECT_EQ(found.verdict(), Verdict::within_rounding) << table(found, true);
    }
}

// Two layers that collapsed, most of whose rows are saturated: no kernel of PyTorch's is wrong by its own plan there.
TEST(Check, OnCollapsedLayersNoKernelIsWrongByItsPlan) {
    struct Row {
        const char *file, *layer, *kernel;
    };
    for (const Row& row : {Row{"biased64-1500", "layer3", "math"}, Row{"biased128-600", "layer1", "efficient"}}) {
        const std::filesystem::path file = testing::captures_folder() / fmt::format("{}.safetensors", row.file);
        if (!std::filesystem::exists(file))
            GTEST_SKIP() << file << " is not here (FAULTLINE_CAPTURES names its folder)";
        Capture capture = read_capture(file.string());
        std::erase_if(capture.layers, [&](const LayerCapture& l) { return l.name != row.layer; });
        CheckOptions options = quick();
        options.kernel = row.kernel;
        options.outputs = {Output::dq};
        options.heads = {1};
        const Check found = check(capture, plan(row.kernel), options);
        EXPECT_NE(found.verdict(), Verdict::wrong) << table(found, true);
    }
}

}  // namespace
}  // namespace faultline
