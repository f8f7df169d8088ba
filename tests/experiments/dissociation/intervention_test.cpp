// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/dissociation/intervention.hpp>

namespace faultline {
namespace {

using ::testing::HasSubstr;

TEST(Intervention, PrintsWhatItReads) {
    for (const char* word : {"none", "project", "project:sides=either:removal=elsewhere:k=5", "qk_norm",
                             "qk_clip:tau=30", "repair:from=500", "guard",
                             "guard:action=lower_rate:monitor=sigma_q:threshold=12:factor=0.2", "guard:scale=unit"}) {
        EXPECT_EQ(to_string(parse_intervention(word)), word);
    }
    const Intervention x = parse_intervention("project:sides=both:k=3");
    EXPECT_EQ(x.kind, Intervention::Kind::project);
    EXPECT_EQ(to_string(x), "project");
    EXPECT_EQ(x.removal, Removal::leading);
}

TEST(Intervention, SaysWhatWasExpected) {
    const auto said = [](const char* word) -> std::string {
        try {
            (void)parse_intervention(word);
        } catch (const RequestError& error) {
            return error.what();
        }
        return "";
    };
    EXPECT_THAT(said(""), HasSubstr("intervention \"\""));
    EXPECT_THAT(said("projekt"), HasSubstr("\"project\""));
    EXPECT_THAT(said("none:k=3"), HasSubstr("takes no options"));
    EXPECT_THAT(said("project:side=both"), HasSubstr("\"sides\""));
    EXPECT_THAT(said("project:sides=all"), HasSubstr("sides=\"all\""));
    EXPECT_THAT(said("project:k=0"), HasSubstr("1 or more"));
    EXPECT_THAT(said("guard:threshold=-1"), HasSubstr("above 0"));
    EXPECT_THAT(said("guard:threshold"), HasSubstr("above 0"));
    EXPECT_THAT(said("guard:action=pray"), HasSubstr("action=\"pray\""));
    EXPECT_THAT(said("guard:threshold=1:threshold=2"), HasSubstr("threshold: is there twice"));
    EXPECT_THAT(said("project:k=999999999999"), HasSubstr("k=999999999999: expected an integer from 1 to 1048576"));
    // What the action does not read, whichever comes first.
    EXPECT_THAT(said("guard:factor=2"), HasSubstr("factor: means nothing with action=qk_norm"));
    EXPECT_THAT(said("guard:scale=unit:action=repair"), HasSubstr("scale: means nothing with action=repair"));
    EXPECT_THAT(said("guard:action=lower_rate:tau=3"), HasSubstr("tau: means nothing with action=lower_rate"));
    // A fraction of rows is never above the default of 100, nor above 1.
    EXPECT_THAT(said("guard:monitor=saturated"), HasSubstr("threshold: 100: saturated is a fraction of the rows"));
    EXPECT_THAT(said("guard:threshold=1:monitor=saturated"), HasSubstr("threshold: 1: saturated"));
    EXPECT_EQ(said("guard:monitor=saturated:threshold=0.999"), "");
    // What changes nothing, or is nothing or without end in fp32.
    EXPECT_THAT(said("guard:action=lower_rate:factor=1"), HasSubstr("factor=1: changes nothing"));
    EXPECT_THAT(said("guard:action=tighter_clip:factor=1.0"), HasSubstr("factor=1: changes nothing"));
    EXPECT_THAT(said("guard:action=lower_rate:factor=1e-300"), HasSubstr("factor=1e-300: expected a number above 0"));
    EXPECT_THAT(said("qk_clip:tau=1e300"), HasSubstr("tau=1e300: expected a number above 0 that fp32 has"));
    EXPECT_THAT(said("guard:threshold=1e39"), HasSubstr("threshold=1e39: expected a number above 0 that fp32 has"));
    for (const char* word : {"guard:tau=3:action=qk_clip", "guard:factor=0.5:action=tighter_clip", "guard:scale=unit"})
        EXPECT_EQ(said(word), "") << word;
}

}  // namespace
}  // namespace faultline
