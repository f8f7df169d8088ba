// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/text.hpp>

#include <gtest/gtest.h>

namespace faultline {
namespace {

TEST(Text, PlainTextStaysAsItIs) {
    EXPECT_EQ(escaped("layer0.q"), "layer0.q");
    EXPECT_EQ(escaped("Schicht_ä→𝛿"), "Schicht_ä→𝛿");
    EXPECT_EQ(in_quotes("q"), "\"q\"");
}

TEST(Text, ControlCharactersDoNotReachTheTerminal) {
    EXPECT_EQ(escaped("\x1b[2J\r\x07"), "\\x1b[2J\\x0d\\x07");
    EXPECT_EQ(escaped("a\nb\tc"), "a\\nb\\tc");
    EXPECT_EQ(escaped(std::string_view("a\0b", 3)), "a\\x00b");
    EXPECT_EQ(escaped("\x7f"), "\\x7f");
    EXPECT_EQ(escaped("\xc2\x9b"
                      "31m"),
              "\\xc2\\x9b31m");  // U+009B, the one-character CSI
    EXPECT_EQ(escaped("a\xe2\x80\xae"
                      "b"),
              "a\\xe2\\x80\\xaeb");  // U+202E, right-to-left override
    EXPECT_EQ(escaped("\"\\"), "\\\"\\\\");
}

TEST(Text, NoncharactersAreWrittenAsBytes) {
    EXPECT_EQ(escaped("a\xef\xbf\xbe"), "a\\xef\\xbf\\xbe");         // U+FFFE, which XML forbids
    EXPECT_EQ(escaped("\xf0\x9f\xbf\xbf"), "\\xf0\\x9f\\xbf\\xbf");  // U+1FFFF
    EXPECT_EQ(escaped("\xef\xb7\x90"), "\\xef\\xb7\\x90");           // U+FDD0
    EXPECT_EQ(escaped("\xef\xbf\xbd"), "\xef\xbf\xbd");              // U+FFFD is a character
}

// Unicode 15, table 3-7: overlong forms, surrogates, beyond U+10FFFF and cut sequences are no characters.
TEST(Text, IllFormedUtf8IsWrittenAsBytes) {
    EXPECT_EQ(escaped("\xff"), "\\xff");
    EXPECT_EQ(escaped("\xc0\xaf"), "\\xc0\\xaf");
    EXPECT_EQ(escaped("\xe0\x80\xaf"), "\\xe0\\x80\\xaf");
    EXPECT_EQ(escaped("\xed\xa0\x80"), "\\xed\\xa0\\x80");
    EXPECT_EQ(escaped("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
    EXPECT_EQ(escaped("a\xe2\x86"), "a\\xe2\\x86");
}

TEST(Text, LongNamesAreCut) {
    EXPECT_EQ(escaped(std::string(1000, 'x'), 5), "xxxxx…");
    EXPECT_EQ(escaped("äää", 3), "ää…");  // at a character
}

}  // namespace
}  // namespace faultline
