// SPDX-License-Identifier: Apache-2.0
// Corrections as they are written, and every sentence for one that is written wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/corrections/correction.hpp>
#include <faultline/plan/presets.hpp>

namespace faultline {
namespace {

using testing::ElementsAre;

std::string error_of(std::string_view text, std::string_view preset = {}) {
    try {
        const Correction correction = parse_correction(text);
        if (!preset.empty()) (void)apply(correction, plan(preset));
    } catch (const RequestError& error) {
        return error.what();
    }
    return "no error";
}

TEST(CorrectionNames, AreRead) {
    const Correction stable = parse_correction("stable_max");
    EXPECT_THAT(stable.steps.at(0).arguments.numbers, ElementsAre(7, 1e-3));
    EXPECT_THAT(parse_correction("stable_max:2").steps.at(0).arguments.numbers, ElementsAre(2, 1e-3));
    EXPECT_THAT(parse_correction("stable_max:1e+1,0").steps.at(0).arguments.numbers, ElementsAre(10, 0));
    EXPECT_THAT(parse_correction("stochastic_rounding:ds_cast,o_cast").steps.at(0).arguments.sites,
                ElementsAre(Site::ds_cast, Site::o_cast));
    const Correction pair = parse_correction("stable_max:1e+1+fp32_backward:layer1,layer3");
    ASSERT_EQ(pair.steps.size(), 2U);
    EXPECT_EQ(pair.name, "stable_max:1e+1+fp32_backward:layer1,layer3");
    EXPECT_EQ(pair.steps[1].info->name, "fp32_backward");
    EXPECT_THAT(pair.layers(), ElementsAre("layer1", "layer3"));
    EXPECT_THAT(parse_correction("unfused").layers(), ElementsAre());
}

TEST(CorrectionNames, WrittenWrong) {
    EXPECT_EQ(
        error_of("zero_sum_unifrom"),
        "correction \"zero_sum_unifrom\": no such name as \"zero_sum_unifrom\": expected a known name (did you mean \"zero_sum_uniform\"?); `faultline corrections` says what each does");
    const std::string far = error_of("make_it_good");
    EXPECT_TRUE(far.starts_with(
        "correction \"make_it_good\": no such name as \"make_it_good\": expected one of stable_max, subtract_then_scale, "))
        << far;
    for (const char* text : {"", "+unfused", "unfused+", "unfused++key_centering"})
        EXPECT_TRUE(error_of(text).starts_with("correction \"" + std::string(text) +
                                               "\": a name is missing: expected one of stable_max, "))
            << error_of(text);
    EXPECT_EQ(error_of("unfused:1"), "correction \"unfused:1\": unfused takes no argument: expected \"unfused\" alone");
    EXPECT_EQ(error_of("stable_max:7,0.1,3"),
              "correction \"stable_max:7,0.1,3\": stable_max has 3 arguments: expected at most 2");
    for (const char* beta : {"1", "x", "", "nan", "inf", "7x", " 7", "-3"})
        EXPECT_EQ(error_of("stable_max:" + std::string(beta)),
                  "correction \"stable_max:" + std::string(beta) + "\": stable_max: beta is \"" + beta +
                      "\": expected a factor above 1 on a positive repeated maximum");
    EXPECT_EQ(
        error_of("stable_max:7,-1"),
        "correction \"stable_max:7,-1\": stable_max: tolerance is \"-1\": expected a distance in logits, 0 or more, at which a score repeats the maximum");
    EXPECT_EQ(
        error_of("stochastic_rounding"),
        "correction \"stochastic_rounding\": stochastic_rounding needs the sites at which it acts: expected e.g. stochastic_rounding:ds_cast");
    EXPECT_EQ(
        error_of("stochastic_rounding:ds_cas"),
        "correction \"stochastic_rounding:ds_cas\": stochastic_rounding: no such site as \"ds_cas\": expected a known name (did you mean \"ds_cast\"?)");
    EXPECT_EQ(
        error_of("fp32_backward:layer1,"),
        "correction \"fp32_backward:layer1,\": fp32_backward: a layer's name is missing: expected e.g. fp32_backward:layer1,layer3");
}

TEST(CorrectionNames, ThatExcludeEachOther) {
    EXPECT_EQ(
        error_of("zero_sum_uniform+zero_sum_weighted"),
        "correction \"zero_sum_uniform+zero_sum_weighted\": zero_sum_uniform and zero_sum_weighted both decide on the zero-sum projection: expected one of them");
    EXPECT_EQ(
        error_of("o_fp32_delta+unfused+fp32_backward"),
        "correction \"o_fp32_delta+unfused+fp32_backward\": o_fp32_delta and fp32_backward both decide on delta: expected one of them");
    EXPECT_EQ(error_of("unfused+unfused"),
              "correction \"unfused+unfused\": unfused stands there twice: expected it once, with all its arguments");
    EXPECT_EQ(error_of("unfused+o_fp32_delta+zero_sum_weighted+two_sum"), "no error");
}

TEST(CorrectionNames, ThatAPlanCannotTake) {
    EXPECT_EQ(
        error_of("stochastic_rounding:ds_cast", "math"),
        "correction \"stochastic_rounding:ds_cast\": plan \"math\" cannot take it: it does not round at ds_cast: expected one of "
        "q_cast, k_cast, scale, softcap, exp_argument, exp, row_sum, sink_exp, sink_sum, p_normalize, p_dropout, lse, o_cast, delta, dp_dropout, ds, ds_softcap, dv_cast, dk_cast, dq_cast, dsink, kv_group_reduce");
    EXPECT_EQ(
        error_of("stochastic_rounding:ds_cast", "exact"),
        "correction \"stochastic_rounding:ds_cast\": plan \"exact\" cannot take it: it does not round at ds_cast: expected a plan that rounds");
    EXPECT_EQ(
        error_of("two_sum", "standard-bf16"),
        "correction \"two_sum\": plan \"standard-bf16\" cannot take it: the row sum divides something else than P V: expected normalize = \"after_pv\"");
    EXPECT_EQ(
        error_of("unfused", "repo-2510.04212"),
        "correction \"unfused\": plan \"repo-2510.04212\" cannot take it: its scores are scaled before the maximum is taken: expected scale_at = \"exponent\"");
}

}  // namespace
}  // namespace faultline
