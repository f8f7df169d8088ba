// SPDX-License-Identifier: Apache-2.0
// Numbers as the table prints them, and when an output counts as good.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/attribution/finding.hpp>
#include <faultline/attribution/json.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/table.hpp>

namespace faultline {
namespace {

using ::testing::HasSubstr;

TEST(ErrorText, PercentWhereItReads) {
    EXPECT_EQ(error_text(WideReal(0.0)), "0%");
    EXPECT_EQ(error_text(WideReal(1.541)), "154%");
    EXPECT_EQ(error_text(WideReal(0.0019)), "0.190%");
    EXPECT_EQ(error_text(WideReal(32.26)), "3226%");
    EXPECT_EQ(error_text(WideReal(1.0)), "100%");
    EXPECT_EQ(error_text(WideReal(2.5e-9)), "2.5e-07%");
    EXPECT_EQ(error_text(WideReal(1.0, 10000)), "2.0e+3012%");  // 2^10000 = 1.995e3010
    EXPECT_EQ(error_text(WideReal(1.0, -10000)), "5.0e-3009%");
    EXPECT_EQ(error_text(WideReal(std::numeric_limits<double>::infinity())), "inf");
}

CertifiedMatrix column_of(const std::vector<double>& values) {
    CertifiedMatrix m(static_cast<std::ptrdiff_t>(values.size()), 1);
    m.value = values;
    return m;
}

double level_of(const std::vector<double>& values, const Format& format) {
    const CertifiedMatrix truth = column_of(values);
    return (rounding_error(truth, format) / frobenius_norm(truth)).to_double();
}

// bf16 has 8 significant bits. 1 + 2^-9 lies a quarter of the spacing 2^-7 above 1: stored, it errs by 2^-9.
TEST(Level, IsWhatStoringTheTruthCosts) {
    EXPECT_DOUBLE_EQ(level_of({1 + 0x1p-9}, bf16), 0x1p-9 / (1 + 0x1p-9));
    EXPECT_DOUBLE_EQ(level_of({3, 4 * (1 + 0x1p-9)}, bf16), 4 * 0x1p-9 / std::hypot(3, 4 * (1 + 0x1p-9)));
    EXPECT_EQ(level_of({1, 1.5, -192}, bf16), 0);
    EXPECT_EQ(level_of({0x1p-140, -0x1p-150}, bf16), 1) << "below the range 0 is stored";
    EXPECT_EQ(level_of({0x1p-140}, binary64), 0);
    EXPECT_EQ(level_of({1e5}, fp16), std::numeric_limits<double>::infinity());
    CertifiedMatrix tiny(1, 1);
    tiny.value = {1.5};
    tiny.exponent = {-10000};
    EXPECT_EQ(rounding_error(tiny, bf16), WideReal(1.5, -10000));
}

// Every significand of 16 bits in [1, 2), so that all places of the rounding come equally often: 2^-p sqrt((1/3) / (7/3)).
// The sums over a grid of spacing 2^-16 differ from the integrals by 2^-8 of them in the rounding (256 places in a spacing of
// bf16, the mean of squares of k/256) and by less in the norm.
TEST(Level, OfEvenSignificandsIsTypical) {
    std::vector<double> all;
    for (int m = 0; m < 65536; ++m) all.push_back(1 + m * 0x1p-16);
    constexpr double of_the_grid = 0x1p-8;
    EXPECT_NEAR(level_of(all, bf16) / typical_level(bf16), 1, of_the_grid);
    EXPECT_DOUBLE_EQ(typical_level(bf16), 0x1p-8 / std::sqrt(7.0));
}

TEST(Level, HoldsWhileHalfTheSquareIsTheRounding) {
    const WideReal level(0.0016);
    ErrorMeasure error;
    error.rel_error = WideReal(0.00226);
    EXPECT_TRUE(at_level(error, level));
    error.rel_error = WideReal(0.00227);
    EXPECT_FALSE(at_level(error, level));
    error.rel_error = WideReal(0.0);
    error.nonfinite = 1;
    EXPECT_FALSE(at_level(error, level));
    EXPECT_FALSE(at_level(ErrorMeasure{}, std::nullopt));
}

// The smallest bf16 number is 2^-133; half of it rounds to the even 0, more does not.
TEST(Level, BelowRangeIsWhatRoundsToZero) {
    EXPECT_TRUE(below_range(WideReal(1.0, -134), bf16));
    EXPECT_FALSE(below_range(WideReal(1.25, -134), bf16));
    EXPECT_TRUE(below_range(WideReal(1.0, -6000), bf16));
    EXPECT_FALSE(below_range(WideReal(0.0), bf16));
}

/// One layer, one output, two sites, three corrections, made up.
Attribution made_up() {
    Attribution a;
    a.input = "run7.safetensors";
    a.plan.name = "mine";
    a.plan.set(Site::dq_cast, {bf16});
    LayerAttribution layer;
    layer.name = "layer7";
    layer.heads = layer.kv_heads = 2;
    layer.seq_q = layer.seq_k = 4;
    layer.head_dim = layer.head_dim_v = 8;
    layer.sites = {Site::delta, Site::dq_cast};
    layer.local.resize(2);
    layer.local[0].site = Site::delta;
    layer.local[1].site = Site::dq_cast;
    OutputAttribution dq;
    dq.output = Output::dq;
    dq.truth_norm = WideReal(1.0, -10000);
    const auto error = [](double relative) {
        ErrorMeasure e;
        e.rel_error = WideReal(relative);
        return e;
    };
    dq.plan = error(1.5);
    dq.truth_norm = WideReal(1.25e-6);
    dq.level = WideReal(0.0016);
    dq.observed = {{"flash", error(1.5), 0.95, 0.99}, {"math", error(0.0017), 0.1, 0.2}};
    dq.sites.resize(2);
    dq.sites[0] = {error(1.4), error(0.1), 0.9, 0.87, 0.03, false};
    dq.sites[1] = {error(0.0017), error(1.5), 0.001, 0.0, 0.001, false};
    dq.corrections = {{"better", false, error(0.01), dq.level},
                      {"best", false, error(0.0018), dq.level},
                      {"other", true, error(0.0001), WideReal(0.00009)}};
    dq.best_correction = "best";
    layer.outputs = {dq};
    a.layers = {layer};
    return a;
}

TEST(Table, SaysWhatIsWrongByWhatAndWhatRepairsIt) {
    const std::string text = table(made_up());
    EXPECT_THAT(
        text, HasSubstr("dq: mine is 150% wrong as flash is (95.0% of its elements are the same), by delta (90.0%);"));
    EXPECT_THAT(text, HasSubstr("best 0.180%*, better 1.00%"));
    EXPECT_THAT(text, HasSubstr("changing the function:   other 0.0100%*"));
    EXPECT_THAT(text, HasSubstr("1 other site"));
    EXPECT_EQ(text.find('\x1b'), std::string::npos);
    EXPECT_NE(table(made_up(), {.full = false, .color = true}).find('\x1b'), std::string::npos);
}

/// On one line, words one blank apart.
std::string flat(const std::string& text) {
    std::string line;
    for (const char c : text)
        if (c != ' ' && c != '\n')
            line += c;
        else if (!line.ends_with(' '))
            line += ' ';
    return line;
}

// A kernel further off than the plan: its error is not said to be the plan's sites', and what a factor explains is said.
TEST(Table, AKernelFurtherOffThanThePlanIsNotExplained) {
    Attribution a = made_up();
    OutputAttribution& dq = a.layers[0].outputs[0];
    dq.truth_norm = WideReal(1.0);
    ObservedOutput seen;
    seen.kernel = "yours";
    seen.error.rel_error = WideReal(10.0) * dq.plan.rel_error;
    seen.error.gain = seen.error.rel_error.to_double();
    seen.bit_equal_to_plan = 0.02;
    dq.observed = {seen};
    std::string text = attribution::verdict(a.layers[0], dq, a.plan);
    EXPECT_THAT(text, HasSubstr("; the error of yours, nearest to it, is "));
    EXPECT_THAT(text, HasSubstr("which this plan does not explain (2.0% of its elements are the same)"));
    EXPECT_THAT(text, HasSubstr("too large"));
    dq.observed[0].error = dq.plan;
    text = attribution::verdict(a.layers[0], dq, a.plan);
    EXPECT_THAT(text, ::testing::Not(HasSubstr("does not explain")));
}

// Of a truth of 0 errors are norms, and a site whose repair takes all of it away comes before one that makes it worse.
TEST(Table, ErrorsWhereTheTruthIsZeroAreNorms) {
    Attribution a = made_up();
    OutputAttribution& dq = a.layers[0].outputs[0];
    dq.truth_norm = WideReal(0.0);
    dq.observed.clear();
    const auto error = [](double norm) {
        ErrorMeasure e;
        e.error_norm = WideReal(norm);
        e.rel_error = norm > 0 ? WideReal(INFINITY) : WideReal(0.0);
        return e;
    };
    dq.plan = error(0.25);
    dq.corrections.clear();
    dq.redundant.clear();
    dq.sites[0].repaired = error(0.5);
    dq.sites[0].share = -3;
    dq.sites[0].moved_squared = 5;
    dq.sites[1].repaired = error(0);
    dq.sites[1].share = 1;
    dq.sites[1].moved_squared = 1;
    const std::string text = attribution::verdict(a.layers[0], dq, a.plan);
    EXPECT_THAT(text, HasSubstr("mine is 2.50e-01 off a truth of 0, by dq_cast (all), delta (its repair moves it by "));
    EXPECT_THAT(text, ::testing::Not(HasSubstr("inf")));
}

TEST(Table, NamesSitesThatDoTheSameTogether) {
    Attribution a = made_up();
    OutputAttribution& dq = a.layers[0].outputs[0];
    for (SiteEffect& e : dq.sites) e.share = 0, e.alone_squared = 0.8;
    EXPECT_THAT(flat(table(a)),
                HasSubstr("no site's repair takes 5.0% of its square away, delta does most alone (140%)"));
    EXPECT_TRUE(nlohmann::json::parse(to_json(a))["layers"][0]["outputs"]["dq"]["redundant"].empty());
    dq.redundant = {{{Site::delta, Site::dq_cast}, dq.observed[1].error, 0.75}};
    EXPECT_THAT(
        flat(table(a)),
        HasSubstr("by delta and dq_cast together (75.0%; redundant: repairing one of them alone changes nothing);"));
    const nlohmann::json together = nlohmann::json::parse(to_json(a))["layers"][0]["outputs"]["dq"]["redundant"][0];
    EXPECT_EQ(together["sites"], (nlohmann::json{"delta", "dq_cast"}));
    EXPECT_EQ(together["share"], 0.75);
    EXPECT_EQ(together["repaired"], 0.0017);
}

TEST(Table, GoodOutputsTakeOneLine) {
    Attribution a = made_up();
    OutputAttribution& dq = a.layers[0].outputs[0];
    dq.plan.rel_error = WideReal(0.0017);
    dq.observed[0].error = dq.plan;
    EXPECT_EQ(table(a).find("repaired by"), std::string::npos);
    EXPECT_NE(table(a, {.full = true, .color = false}).find("changing the function"), std::string::npos);
}

// A correction that changes the function is judged by the level of the truth of that function.
TEST(Table, EachTruthHasItsOwnLevel) {
    Attribution a = made_up();
    a.layers[0].outputs[0].corrections[2].level = WideReal(0.00005);
    EXPECT_THAT(table(a), HasSubstr("changing the function:   other 0.0100%\n"));
}

TEST(Table, MarksWhatIsNotFinite) {
    Attribution a = made_up();
    OutputAttribution& dq = a.layers[0].outputs[0];
    for (ErrorMeasure* e : {&dq.sites[0].alone, &dq.sites[0].repaired}) {
        e->rel_error = WideReal(std::numeric_limits<double>::infinity());
        e->nonfinite = 3;
    }
    EXPECT_THAT(table(a), ::testing::ContainsRegex("delta +90.0% +inf! +inf!"));
}

// What cannot be said is not 0.
TEST(Table, UndefinedIsADash) {
    Attribution a = made_up();
    EXPECT_THAT(table(a), ::testing::ContainsRegex("delta +90.0% +140% +10.0% +[+]0.000 +- +0.00"));
    const nlohmann::json dq = nlohmann::json::parse(to_json(a))["layers"][0]["outputs"]["dq"];
    EXPECT_TRUE(dq["plan"]["t"].is_null());
    EXPECT_TRUE(dq["sites"]["delta"]["t"].is_null());
    EXPECT_TRUE(dq["sites"]["delta"]["local"]["t"].is_null());
    EXPECT_TRUE(dq["unexplained"].is_null());
    a.layers[0].outputs[0].unexplained = 0.25;
    EXPECT_EQ(nlohmann::json::parse(to_json(a))["layers"][0]["outputs"]["dq"]["unexplained"], 0.25);
}

TEST(Json, WhatADoubleCannotHoldIsText) {
    Attribution a = made_up();
    a.layers[0].outputs[0].truth_norm = WideReal(1.0, -10000);
    a.layers[0].outputs[0].plan.rel_error = WideReal(std::numeric_limits<double>::infinity());
    const nlohmann::json dq = nlohmann::json::parse(to_json(a))["layers"][0]["outputs"]["dq"];
    EXPECT_EQ(dq["truth_norm"], "5.0123727492064520e-3011");  // 2^-10000 = 5.012372749206452009297…e-3011
    EXPECT_EQ(dq["plan"]["rel_error"], "inf");
    EXPECT_EQ(dq["below_range"], true);
    EXPECT_EQ(dq["sites"]["delta"]["alone"], 1.4);
}

}  // namespace
}  // namespace faultline
