// SPDX-License-Identifier: Apache-2.0
// The real captures: errors of the observed kernels against the figures that came with them (captures/README.md, computed
// there in float64), and the gradient that no double holds.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "support.hpp"

namespace faultline::test {
namespace {

using nlohmann::json;

/// As many significant digits as the figure has.
std::string rounded(double value, const std::string& like) {
    const std::size_t digits = static_cast<std::size_t>(std::count_if(
        like.begin(), like.begin() + static_cast<std::ptrdiff_t>(std::min(like.find('e'), like.size())), ::isdigit));
    char text[40];
    std::snprintf(text, sizeof text, "%.*e", static_cast<int>(digits) - 1, value);
    return text;
}

struct Figures {
    const char* file;
    const char* layer;
    const char* truth;                          ///< Frobenius norm of dq
    std::map<std::string, std::string> errors;  ///< relative error of dq by kernel
};
void PrintTo(const Figures& c, std::ostream* out) { *out << c.file << " " << c.layer; }

class ObservedErrors : public ::testing::TestWithParam<Figures> {};

json attributed(const std::string& file, const std::string& layer) {
    const Outcome run = run_program({"attribute", file, "--layers", layer, "--outputs", "dq", "--sites", "dq_cast",
                                     "--correction", "none", "--json", "--quiet"});
    EXPECT_EQ(run.status, 0) << run.err;
    return json::parse(run.out)["layers"][0]["outputs"]["dq"];
}

TEST_P(ObservedErrors, AgreeWithTheFiguresOfTheCaptures) {
    if (captures().empty()) GTEST_SKIP() << "the captures are not there (FAULTLINE_CAPTURES)";
    const Figures& figures = GetParam();
    const json dq = attributed(captures() + "/" + figures.file + ".safetensors", figures.layer);
    EXPECT_EQ(rounded(dq["truth_norm"], figures.truth), rounded(std::stod(figures.truth), figures.truth));
    for (const auto& [kernel, error] : figures.errors)
        EXPECT_EQ(rounded(dq["observed"][kernel]["rel_error"], error), rounded(std::stod(error), error)) << kernel;
}

INSTANTIATE_TEST_SUITE_P(
    Captures, ObservedErrors,
    ::testing::Values(
        Figures{"healthy64-3000",
                "layer0",
                "1.57e-3",
                {{"flash", "6.07e-3"}, {"cudnn", "6.07e-3"}, {"efficient", "6.66e-3"}, {"math", "1.68e-3"}}},
        Figures{"healthy128-2000",
                "layer0",
                "1.14e-3",
                {{"flash", "6.47e-3"}, {"cudnn", "5.47e-3"}, {"efficient", "6.31e-3"}, {"math", "1.66e-3"}}},
        Figures{"biased128-600",
                "layer1",
                "1.24e-6",
                {{"flash", "1.54"}, {"cudnn", "1.66"}, {"efficient", "1.62"}, {"math", "1.90e-3"}}},
        Figures{"biased64-1500",
                "layer3",
                "2.80e-7",
                {{"flash", "32.3"}, {"cudnn", "27.6"}, {"efficient", "27.2"}, {"math", "4.2e-3"}}}),
    [](const auto& instance) {
        const std::string file = instance.param.file;
        return file.substr(0, file.find('-'));
    });

// The true dq of this layer is below the smallest double: it is a number with its exponent, and the kernels' nonzero
// gradients are wrong by more than a double can say.
TEST(Underflow, IsReportedWithItsExponent) {
    if (captures().empty()) GTEST_SKIP() << "the captures are not there (FAULTLINE_CAPTURES)";
    const json dq = attributed(captures() + "/biased64-1500.safetensors", "layer2");
    ASSERT_TRUE(dq["truth_norm"].is_string());
    EXPECT_THAT(dq["truth_norm"].get<std::string>(), ::testing::MatchesRegex("[1-9]\\.[0-9]+e-[0-9][0-9][0-9][0-9]"));
    EXPECT_EQ(dq["below_range"], true);
    for (const char* kernel : {"flash", "cudnn", "efficient"})
        EXPECT_THAT(dq["observed"][kernel]["rel_error"].get<std::string>(),
                    ::testing::MatchesRegex("[1-9]\\.[0-9]+e\\+?[0-9][0-9][0-9][0-9]"))
            << kernel;
    // README: math is nonzero too, in elements; in the norm 0 and 1e-40 differ from the truth alike.
    EXPECT_FALSE(dq["observed"]["math"]["rel_error"].is_null());
}

}  // namespace
}  // namespace faultline::test
