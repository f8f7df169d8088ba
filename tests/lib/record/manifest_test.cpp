// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/manifest.hpp>

#include "support.hpp"

namespace faultline {
namespace {

using test::Folder;

// XXH3's own test vector for no bytes (xxhash 0.8, xxhsum --128 of an empty file).
TEST(Manifest, HashOfAnEmptyFile) {
    const Folder folder;
    test::write_file(folder / "empty", "");
    EXPECT_EQ(hash_file(folder / "empty"), "xxh3-128:99aa06d3014798d86001c324468d497f");
}

TEST(Manifest, HashDependsOnEveryByteAndOnNothingElse) {
    const Folder folder;
    std::string bytes(3 << 20, 'x');  // more than a block
    test::write_file(folder / "a", bytes);
    test::write_file(folder / "b", bytes);
    EXPECT_EQ(hash_file(folder / "a"), hash_file(folder / "b"));
    bytes.back() = 'y';
    test::write_file(folder / "b", bytes);
    EXPECT_NE(hash_file(folder / "a"), hash_file(folder / "b"));
    EXPECT_THAT(test::request_error([&] { (void)hash_file(folder / "c"); }), ::testing::HasSubstr("No such file"));
}

TEST(Manifest, InputsOfAFolderAreItsNpyFiles) {
    const Folder folder;
    test::write_file(folder / "q.npy", "1");
    test::write_file(folder / "k.npy", "2");
    test::write_file(folder / "notes.txt", "3");
    const auto inputs = hash_inputs(folder.path().string());
    ASSERT_EQ(inputs.size(), 2u);
    EXPECT_EQ(inputs[0], (InputHash{folder / "k.npy", hash_file(folder / "k.npy")}));
    EXPECT_EQ(inputs[1].path, folder / "q.npy");
    EXPECT_EQ(hash_inputs(folder / "q.npy").front(), inputs[1]);
}

TEST(Manifest, ShellLineSplitsBackIntoItsWords) {
    const char* words[] = {"faultline", "--set", "a=b c", "it's", "", "$HOME;*"};
    EXPECT_EQ(shell_line(6, words), "faultline --set 'a=b c' 'it'\\''s' '' '$HOME;*'");
}

TEST(Manifest, SaysWhatItWasMadeWith) {
    const Manifest manifest = make_manifest("attribution", "faultline attribute x", "a = 1\n", 7);
    EXPECT_EQ(manifest.schema, "faultline.attribution");
    EXPECT_THAT(manifest.created_utc,
                ::testing::MatchesRegex("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"));
    EXPECT_THAT(manifest.git_commit, ::testing::MatchesRegex("[0-9a-f]{40}(-dirty)?|unknown"));
    EXPECT_THAT(manifest.build, ::testing::HasSubstr("-ffp-contract=off"));
    EXPECT_THAT(manifest.build, ::testing::HasSubstr("; "));
    EXPECT_FALSE(manifest.cpu.empty());
    EXPECT_EQ(manifest.gpu, "none");
    EXPECT_EQ(manifest.seed, 7u);
}

}  // namespace
}  // namespace faultline
