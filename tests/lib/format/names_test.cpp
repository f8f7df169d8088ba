// SPDX-License-Identifier: Apache-2.0
#include <faultline/format/names.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace faultline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

TEST(Names, OfFormatsReadBack) {
    EXPECT_EQ(all_formats().size(), 11u);
    for (const NamedFormat& known : all_formats()) {
        EXPECT_EQ(name(known.format), known.name);
        EXPECT_EQ(find_format(known.name), known.format);
        EXPECT_THAT(validate(known.format), IsEmpty()) << known.name;
        const Format other = with_saturation(known.format, !known.format.saturates);
        if (validate(other).empty() && !is_exact(other)) {
            EXPECT_EQ(find_format(name(other)), other) << name(other);
        }
    }
    EXPECT_EQ(name(with_saturation(e4m3, false)), "e4m3-nosat");
    EXPECT_EQ(name(with_saturation(fp16, true)), "fp16-sat");
    EXPECT_EQ(name(Format{.precision = 7, .emin = -30, .emax = 31}), "p7[-30,31]");
    for (const char* unknown : {"", "bf", "bf17", "BF16", "bf16-", "bf16-nosat", "e2m1-nosat", "exact-sat"}) {
        EXPECT_FALSE(find_format(unknown)) << unknown;
    }
}

TEST(Names, OfRoundingsReadBack) {
    EXPECT_EQ(all_roundings().size(), 7u);
    for (const Rounding mode : all_roundings()) EXPECT_EQ(find_rounding(name(mode)), mode);
    EXPECT_EQ(find_rounding("RNE"), Rounding::nearest_even);
    EXPECT_EQ(find_rounding("SR"), Rounding::stochastic);
    EXPECT_FALSE(find_rounding("nearest"));
}

TEST(Validate, SaysWhatIsWrong) {
    Format f = fp16;
    f.precision = 1;
    EXPECT_EQ(validate(f), "precision is 1: expected 2 to 53 significant bits, the hidden bit included");
    f = fp16;
    f.precision = 54;
    EXPECT_THAT(validate(f), StartsWith("precision is 54"));
    f = fp16;
    f.emin = 16;
    EXPECT_EQ(validate(f), "emin is 16: expected at most emax, which is 15");
    f = fp16;
    f.emax = 1024;
    EXPECT_THAT(validate(f), StartsWith("emax is 1024"));
    f = fp16;
    f.emin = -1023;
    EXPECT_THAT(validate(f), StartsWith("emin is -1023"));
    f = {.precision = 53, .emin = -1000, .emax = 1023};
    EXPECT_THAT(validate(f), StartsWith("precision is 53"));
    f = e4m3;
    f.infinities = true;
    EXPECT_THAT(validate(f), AllOf(StartsWith("infinities is true"), HasSubstr("expected false")));
    f = fp16;
    f.infinities = false;
    EXPECT_THAT(validate(f), AllOf(StartsWith("infinities is false"), HasSubstr("expected true")));
    f = with_saturation(e2m1, false);
    EXPECT_THAT(validate(f), StartsWith("saturates is false"));
    f = fp16;
    f.rounds = false;
    EXPECT_THAT(validate(f), StartsWith("precision is 11"));
}

}  // namespace
}  // namespace faultline
