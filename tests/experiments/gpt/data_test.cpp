// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/data.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include <faultline/base/error.hpp>

#include "../../lib/tensor/support.hpp"

namespace faultline::gpt {
namespace {

using test::Folder;
using test::write_file;
using testing::ElementsAre;
using testing::HasSubstr;

template <class Call>
std::string refusal(Call&& call) {
    try {
        call();
    } catch (const RequestError& error) {
        return error.what();
    }
    return "";
}

/// An llm.c shard: header of 256 int32, then ids.
template <class Id>
std::string shard(std::int32_t magic, std::int32_t version, std::int32_t count, const std::vector<Id>& ids) {
    std::vector<std::int32_t> header(256);
    header[0] = magic;
    header[1] = version;
    header[2] = count;
    std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
    bytes.append(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(Id));
    return bytes;
}

TEST(Data, TextIsItsBytesAndEverySixteenthBlockIsHeldOut) {
    std::string text;
    for (int block = 0; block < 17; ++block) text += std::string(65536, static_cast<char>('a' + block));
    const TokenData data = tokens_of_text(text);
    EXPECT_EQ(data.vocabulary, 256);
    ASSERT_EQ(data.validation.size(), 65536U);
    EXPECT_EQ(data.validation.front(), 'a' + 15);
    ASSERT_EQ(data.training.size(), 16U * 65536);
    EXPECT_EQ(data.training[15 * 65536], 'a' + 16);
    const TokenData small = tokens_of_text(std::string(160, '\xff'));
    EXPECT_EQ(small.training.size(), 150U);
    EXPECT_EQ(small.validation.size(), 10U);
    EXPECT_EQ(small.training.front(), 255);
}

TEST(Data, AFolderIsItsFilesInOrder) {
    const Folder folder;
    write_file(folder / "b.txt", std::string(16, 'b'));
    write_file(folder / "a.txt", std::string(16, 'a'));
    write_file(folder / ".hidden", "no");
    const TokenData data = read_tokens(folder.path().string());
    ASSERT_EQ(data.training.size() + data.validation.size(), 32U);
    EXPECT_EQ(data.training.front(), 'a');
    EXPECT_EQ(data.training[16], 'b');
    ASSERT_EQ(data.inputs.size(), 1U);
    const std::string hash = data.inputs[0].hash;
    write_file(folder / "a.txt", std::string(16, 'c'));
    EXPECT_NE(read_tokens(folder.path().string()).inputs[0].hash, hash);
}

TEST(Data, LlmcShards) {
    const Folder folder;
    const std::vector<std::uint16_t> ids{50256, 1, 2, 3};
    write_file(folder / "x_train_000000.bin", shard(20240520, 1, 4, ids));
    write_file(folder / "x_val_000000.bin", shard(20240520, 1, 2, std::vector<std::uint16_t>{7, 8}));
    const TokenData data = read_tokens(folder.path().string());
    EXPECT_THAT(data.training, ElementsAre(50256, 1, 2, 3));
    EXPECT_THAT(data.validation, ElementsAre(7, 8));
    EXPECT_EQ(data.vocabulary, 50257);
    write_file(folder / "wide.bin", shard(20240801, 7, 1, std::vector<std::uint32_t>{128000}));
    EXPECT_THAT(read_tokens(folder / "wide.bin").training, ElementsAre(128000));
}

TEST(Data, AFolderOfShardsHoldsNothingElseAndOneToTrainOn) {
    const Folder folder;
    const std::vector<std::uint16_t> ids{1, 2, 3};
    const auto read = [&](DataFormat format) { return read_tokens(folder.path().string(), format); };
    write_file(folder / "a_val.bin", shard(20240520, 1, 3, ids));
    EXPECT_THAT(refusal([&] { (void)read(DataFormat::automatic); }), HasSubstr("every shard has val in its name"));
    EXPECT_THAT(read_tokens(folder / "a_val.bin").training, ElementsAre(1, 2, 3));  // named itself, it is trained on
    write_file(folder / "a_train.bin", shard(20240520, 1, 3, ids));
    write_file(folder / "readme.txt", std::string(100, 'x'));
    EXPECT_THAT(refusal([&] { (void)read(DataFormat::automatic); }),
                testing::AllOf(HasSubstr("a_train.bin"), HasSubstr("readme.txt"), HasSubstr("\"llmc\"")));
    EXPECT_THAT(read(DataFormat::llmc).training, ElementsAre(1, 2, 3));
    const TokenData text = read(DataFormat::text);
    EXPECT_EQ(text.training.size() + text.validation.size(), 2U * (1024 + 6) + 100);
}

TEST(Data, CorruptShardsAreRefusedInASentence) {
    const Folder folder;
    const std::vector<std::uint16_t> ids{1, 2, 3};
    write_file(folder / "magic.bin", shard(1234, 1, 3, ids));
    EXPECT_THAT(refusal([&] { (void)read_tokens(folder / "magic.bin"); }),
                testing::AllOf(HasSubstr("magic.bin"), HasSubstr("magic of an llm.c shard"), HasSubstr("20240520")));
    EXPECT_THAT(refusal([&] { (void)read_tokens(folder / "magic.bin", DataFormat::llmc); }), HasSubstr("magic 1234"));
    write_file(folder / "version.bin", shard(20240520, 2, 3, ids));
    EXPECT_THAT(refusal([&] { (void)read_tokens(folder / "version.bin"); }), HasSubstr("version 2: expected 1"));
    write_file(folder / "short.bin", shard(20240520, 1, 4, ids));
    EXPECT_THAT(refusal([&] { (void)read_tokens(folder / "short.bin"); }),
                HasSubstr("header says 4 tokens and 6 bytes"));
    write_file(folder / "long.bin", shard(20240520, 1, 2, ids));
    EXPECT_THAT(refusal([&] { (void)read_tokens(folder / "long.bin"); }), HasSubstr("expected 4"));
    write_file(folder / "negative.bin", shard(20240520, 1, -1, ids));
    EXPECT_THAT(refusal([&] { (void)read_tokens(folder / "negative.bin"); }),
                HasSubstr("-1 tokens: expected 0 or more"));
    write_file(folder / "header.bin", shard(20240520, 1, 4, ids).substr(0, 100));
    EXPECT_THAT(refusal([&] { (void)read_tokens(folder / "header.bin"); }), HasSubstr("1024 bytes"));
    EXPECT_THAT(refusal([&] { (void)read_tokens(folder / "none"); }), HasSubstr("none"));
}

TEST(Data, NanogptFolder) {
    const Folder folder;
    const auto bytes = [](const std::vector<std::uint16_t>& ids) {
        return std::string(reinterpret_cast<const char*>(ids.data()), ids.size() * 2);
    };
    write_file(folder / "train.bin", bytes({5, 6, 50256}));
    write_file(folder / "val.bin", bytes({9}));
    for (const std::string& path : {folder.path().string(), folder / "train.bin"}) {
        const TokenData data = read_tokens(path);
        EXPECT_THAT(data.training, ElementsAre(5, 6, 50256));
        EXPECT_THAT(data.validation, ElementsAre(9));
        EXPECT_EQ(data.remark, "");
    }
    write_file(folder / "val.bin", "");
    EXPECT_THAT(refusal([&] { (void)read_tokens(folder.path().string()); }), HasSubstr("val.bin: is empty"));
    std::filesystem::remove(folder / "val.bin");
    write_file(folder / "train.bin", bytes(std::vector<std::uint16_t>(32, 5)));
    const TokenData alone = read_tokens(folder.path().string());
    EXPECT_EQ(alone.validation.size(), 2U);
    EXPECT_THAT(alone.remark, HasSubstr("no val.bin is beside it: its last sixteenth is held out"));
    write_file(folder / "train.bin", "abc");
    EXPECT_THAT(refusal([&] { (void)read_tokens(folder.path().string()); }), HasSubstr("even number of bytes"));
}

TEST(Data, TokensAreCheckedAgainstVocabularyAndContext) {
    TokenData data;
    data.source = "x.bin";
    data.training = {1, 2, 3, 300, 4};
    data.validation = {1, 2, 3, 4, 5};
    EXPECT_THAT(refusal([&] { check_tokens(data, 256, 4); }),
                HasSubstr("training split: token 300 at position 3: expected ids below the vocabulary of 256"));
    EXPECT_THAT(refusal([&] { check_tokens(data, 512, 5); }),
                HasSubstr("5 tokens: expected more than the context of 5"));
    EXPECT_EQ(refusal([&] { check_tokens(data, 512, 4); }), "");
    data.validation = {1};
    EXPECT_THAT(refusal([&] { check_tokens(data, 512, 4); }),
                testing::AllOf(HasSubstr("validation split"), testing::Not(HasSubstr("sixteenth"))));
}

// How much text a context needs: one byte less is refused with that number, and it is enough.
TEST(Data, TooShortATextIsToldHowMuchIsNeeded) {
    const Folder folder;
    for (const std::size_t size : {16u * 129 - 1, 16u * 129}) {
        write_file(folder / "short.txt", std::string(size, 'x'));
        const TokenData data = read_tokens(folder / "short.txt");
        const std::string said = refusal([&] { check_tokens(data, 256, 128); });
        if (size == 16u * 129)
            EXPECT_EQ(said, "");
        else
            EXPECT_THAT(said,
                        HasSubstr("validation split: 128 tokens: expected more than the context of 128, so 2064 tokens "
                                  "or more in all, of which the last sixteenth is held out"));
    }
}

TEST(Data, AMissingDefaultTextNamesThePackage) {
    const Folder folder;
    ::setenv("FAULTLINE_TEXT", folder.path().c_str(), 1);
    EXPECT_THAT(refusal([] { (void)default_tokens(); }), testing::AllOf(HasSubstr("perl-doc"), HasSubstr("--data")));
    write_file(folder / "perlvar.pod", "other");
    EXPECT_THAT(refusal([] { (void)default_tokens(); }), HasSubstr("hash xxh3-128:"));
    ::unsetenv("FAULTLINE_TEXT");
}

TEST(Data, TheDefaultTextIsTheOneThatIsKnown) {
    if (!std::filesystem::exists(default_text_folder() + "/perlvar.pod")) GTEST_SKIP() << "perl-doc is not installed";
    const TokenData data = default_tokens();
    EXPECT_GE(data.training.size() + data.validation.size(), 5'000'000U);
    EXPECT_NO_THROW(check_tokens(data, 256, 1024));
}

TEST(Windows, AreAFunctionOfSeedAndStepWithinTheData) {
    const WindowOrder order(3);
    const auto a = order.offsets(5, 100, 50, 9);
    EXPECT_EQ(a, order.offsets(5, 100, 50, 9));
    EXPECT_NE(a, order.offsets(6, 100, 50, 9));
    EXPECT_NE(a, WindowOrder(4).offsets(5, 100, 50, 9));
    EXPECT_EQ(*std::ranges::min_element(a), 0);  // 41 places, 100 draws: missing one of the ends has odds of 1 in 12
    for (const std::int64_t offset : a) EXPECT_LE(offset, 40);
    const std::vector<std::int32_t> tokens{0, 1, 2, 3, 4, 5};
    const Windows w = windows_at(tokens, std::vector<std::int64_t>{0, 3}, 2);
    EXPECT_THAT(w.tokens, ElementsAre(0, 1, 3, 4));
    EXPECT_THAT(w.targets, ElementsAre(1, 2, 4, 5));
}

TEST(Windows, ReplayOfAFileAndOfRanks) {
    const Folder folder;
    write_file(folder / "one.txt", "3,1\n4 1\n");
    const WindowOrder one = WindowOrder::replay(folder / "one.txt");
    EXPECT_THAT(one.offsets(0, 2, 100, 9), ElementsAre(3, 1));
    EXPECT_THAT(one.offsets(1, 2, 100, 9), ElementsAre(4, 1));
    EXPECT_THAT(refusal([&] { (void)one.offsets(2, 2, 100, 9); }), HasSubstr("it has 2"));
    EXPECT_THAT(refusal([&] { (void)one.offsets(0, 4, 100, 9); }), HasSubstr("expected batch times accumulation, 4"));
    EXPECT_THAT(refusal([&] { (void)one.offsets(0, 2, 12, 9); }), HasSubstr("offset 3: expected at most 2"));
    // As arXiv 2510.04212's code leaves them: comma-separated, a line a step, rank by rank; rank 1 was killed a step early.
    write_file(folder / "generated_indices_rank_0.txt", "10,11\n12,13\n");
    write_file(folder / "generated_indices_rank_1.txt", "20,21\n");
    const WindowOrder ranks = WindowOrder::replay(folder.path().string());
    EXPECT_THAT(ranks.offsets(0, 4, 100, 9), ElementsAre(10, 11, 20, 21));
    EXPECT_THAT(refusal([&] { (void)ranks.offsets(1, 4, 100, 9); }), HasSubstr("step 1"));
    EXPECT_EQ(WindowOrder::line(std::vector<std::int64_t>{10, 11}), "10,11\n");
    write_file(folder / "bad.txt", "1,2\n3,x\n");
    EXPECT_THAT(refusal([&] { (void)WindowOrder::replay(folder / "bad.txt"); }), HasSubstr("line 2: \"x\""));
    write_file(folder / "minus.txt", "-1\n");
    EXPECT_THAT(refusal([&] { (void)WindowOrder::replay(folder / "minus.txt"); }), HasSubstr("line 1"));
    write_file(folder / "empty.txt", "\n");
    EXPECT_THAT(refusal([&] { (void)WindowOrder::replay(folder / "empty.txt"); }), HasSubstr("no step"));
}

}  // namespace
}  // namespace faultline::gpt
