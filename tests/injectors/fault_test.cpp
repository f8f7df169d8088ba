// SPDX-License-Identifier: Apache-2.0
// A fault as a word: what is read, what is printed, what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/injectors/attention_injector.hpp>
#include <faultline/injectors/model_injector.hpp>
#include <faultline/plan/presets.hpp>

namespace faultline {
namespace {

using ::testing::HasSubstr;

template <class F>
std::string refusal(F&& f) {
    try {
        f();
    } catch (const RequestError& error) {
        return error.what();
    }
    return "";
}

TEST(Fault, IsReadAsWritten) {
    const Fault f =
        parse_fault("o_cast:operand:-2ulp:layers=1,3:heads=0:from=10:until=20:seed=7:hold=nearest:format=fp16");
    EXPECT_EQ(std::get<Site>(f.site), Site::o_cast);
    EXPECT_EQ(f.law, Law::operand);
    EXPECT_EQ(f.magnitude, -2.0);
    EXPECT_EQ(f.unit, Fault::Unit::ulps);
    EXPECT_EQ(f.layers, (std::vector<int>{1, 3}));
    EXPECT_EQ(f.heads, std::vector<int>{0});
    EXPECT_EQ(f.from, 10);
    EXPECT_EQ(f.until, 20);
    EXPECT_EQ(f.seed, 7U);
    EXPECT_EQ(f.hold, Hold::nearest);
    EXPECT_EQ(f.format, fp16);
    EXPECT_EQ(parse_fault("ffn_output:flip@8:+10%").magnitude, 0.1);
    EXPECT_EQ(parse_fault("ffn_output:flip@8:0.1").period, 8);
    EXPECT_EQ(parse_fault("delta:per-head:0.1").law, Law::per_head);
}

TEST(Fault, PrintsWhatItReads) {
    for (const char* word :
         {"delta:multiplicative:0.1", "o_cast:flip@8:-2ulp:layers=1,3:heads=0:from=10:until=20:seed=7",
          "optimizer_update:per_column:1e-05:column=2:hold=exact:format=bf16", "logits:random_step:0.03:shape=value",
          "ds:multiplicative:0.125:hold=nearest:record=sample"}) {
        EXPECT_EQ(to_string(parse_fault(word)), word);
        EXPECT_EQ(parse_fault(to_string(parse_fault(word))), parse_fault(word));
    }
    for (const LawInfo& law : laws())
        for (const ModelSiteInfo& site : model_sites()) {
            const std::string word =
                std::string(site.name) + ":" + std::string(law.name) + (law.law == Law::flip ? "@3" : "") + ":0.25";
            EXPECT_EQ(to_string(parse_fault(word)), word);
        }
}

TEST(Fault, SaysWhatWasExpected) {
    const auto said = [](const char* word) { return refusal([&] { (void)parse_fault(word); }); };
    EXPECT_THAT(said("delta"), HasSubstr("expected SITE:LAW:MAGNITUDE"));
    EXPECT_THAT(said("detla:fixed:0.1"), HasSubstr("\"delta\""));
    EXPECT_THAT(said("delta:fixd:0.1"), HasSubstr("\"fixed\""));
    EXPECT_THAT(said("delta:flip:0.1"), HasSubstr("flip@K"));
    EXPECT_THAT(said("delta:flip@0:0.1"), HasSubstr("1 or more"));
    EXPECT_THAT(said("delta:fixed@2:0.1"), HasSubstr("only flip has a period"));
    EXPECT_THAT(said("delta:fixed:much"), HasSubstr("expected a number"));
    EXPECT_THAT(said("delta:fixed:nan"), HasSubstr("expected a number"));
    EXPECT_THAT(said("delta:fixed:inf"), HasSubstr("expected a number"));
    EXPECT_THAT(said("delta:fixed:1e999"), HasSubstr("expected a number"));
    EXPECT_THAT(said("delta:random:1e-300"), HasSubstr("magnitude \"1e-300\": changes nothing"));
    EXPECT_THAT(said("delta:random:-1e-40ulp"), HasSubstr("magnitude \"-1e-40ulp\": changes nothing"));
    EXPECT_EQ(said("delta:fixed:0"), "");  // of several magnitudes it is the control
    EXPECT_THAT(said("delta:fixed:0.1:heads=1,0,1"), HasSubstr("heads=1,0,1: 1 is there twice"));
    EXPECT_THAT(said("delta:fixed:0.1:layers=x"), HasSubstr("layers=x"));
    EXPECT_THAT(said("delta:fixed:0.1:from=5:until=5"), HasSubstr("from must be less"));
    EXPECT_THAT(said("delta:fixed:0.1:hold=odd"), HasSubstr("stochastic, nearest or exact"));
    EXPECT_THAT(said("delta:fixed:0.1:record=odd"), HasSubstr("record=odd: expected all or sample"));
    EXPECT_THAT(said("delta:fixed:0.1:format=bf17"), HasSubstr("\"bf16\""));
    EXPECT_THAT(said("delta:fixed:0.1:shape=round"), HasSubstr("constant or value"));
    EXPECT_THAT(said("delta:fixed:0.1:lyers=1"), HasSubstr("\"layers\""));
    EXPECT_THAT(said("scale:fixed:0.1"), HasSubstr("constant of the call"));
    EXPECT_THAT(said("delta:fixed:0.1:from=1:from=2"), HasSubstr("from: is there twice"));
    EXPECT_THAT(said("ffn_output:fixed:0.1:column=99999999999"),
                HasSubstr("column=99999999999: expected 0 to 2147483647"));
    EXPECT_THAT(said("ffn_output:fixed:0.1:column=3:heads=0"), HasSubstr("heads: is beside column=3"));
    EXPECT_THAT(said("layer_norm_statistics:fixed:0.1:heads=0"), HasSubstr("expected column=0 or 1, or none"));
}

// A tile's columns in the kernel are keys, or channels of one head: a column of the model is none of them.
TEST(Fault, ColumnsAreOfSitesOfTheModel) {
    for (const SiteInfo& site : sites()) {
        if (site.name == "scale") continue;
        const std::string word = std::string(site.name) + ":fixed:0.1:column=0";
        EXPECT_THAT(refusal([&] { (void)parse_fault(word); }),
                    HasSubstr("\": column=0: " + std::string(site.name) + " is in the attention kernel"));
        Fault fault = parse_fault(std::string(site.name) + ":fixed:0.1");
        fault.column = 0;
        EXPECT_THAT(refusal([&] { AttentionInjector(fault, plan("fa2"), 1); }), HasSubstr("column: "));
    }
    for (const ModelSiteInfo& site : model_sites())
        EXPECT_EQ(parse_fault(std::string(site.name) + ":fixed:0.1:column=1").column, 1);
}

TEST(Fault, StandsWhereItCan) {
    EXPECT_THAT(refusal([] { AttentionInjector(parse_fault("ffn_output:fixed:0.1"), plan("fa2"), 1); }),
                HasSubstr("expected a kernel site"));
    EXPECT_THAT(refusal([] { AttentionInjector(parse_fault("o_cast:fixed:1ulp"), RoundingPlan{}, 1); }),
                HasSubstr("there is no ulp"));
    double x = 1;
    EXPECT_THAT(refusal([&] { inject(parse_fault("delta:fixed:0.1"), 0, 0, 1, 0, MatrixView<double>(&x, 1, 1)); }),
                HasSubstr("expected a site of the model"));
    EXPECT_THAT(refusal([&] { inject(parse_fault("logits:fixed:1ulp"), 0, 0, 1, 0, MatrixView<double>(&x, 1, 1)); }),
                HasSubstr("is exact"));
}

}  // namespace
}  // namespace faultline
