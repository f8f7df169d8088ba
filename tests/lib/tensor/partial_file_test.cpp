// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/partial_file.hpp>

#include <faultline/tensor/npy.hpp>
#include <faultline/tensor/safetensors.hpp>

#include "full_disk.hpp"
#include "support.hpp"

namespace faultline {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::request_error;
using test::work_error;
using ::testing::HasSubstr;

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

TEST(PartialFile, AppearsWholeOnCommit) {
    const Folder folder;
    const std::string path = folder / "out";
    test::write_file(path, "old");
    {
        PartialFile file(path);
        file.write(bytes("new "));
        EXPECT_EQ(test::read_file(path), "old");
        file.write(bytes("content"));
        file.commit();
    }
    EXPECT_EQ(test::read_file(path), "new content");
    EXPECT_FALSE(fs::exists(path + ".partial"));
}

TEST(PartialFile, LeavesNothingWithoutCommit) {
    const Folder folder;
    {
        PartialFile file(folder / "out");
        file.write(bytes("half"));
        EXPECT_TRUE(fs::exists(folder / "out.partial"));
    }
    EXPECT_TRUE(folder.empty());
}

// What a signal handler does before the process ends.
TEST(PartialFile, AllThatAreNotCommittedCanBeRemovedAtOnce) {
    const Folder folder;
    PartialFile kept(folder / "kept"), committed(folder / "committed"), one(folder / "one");
    PartialName two(folder / "two");
    test::write_file(two.partial(), "half");
    PartialName moved = std::move(two);
    kept.keep();
    committed.commit();
    remove_partial_files();
    EXPECT_FALSE(fs::exists(folder / "one.partial"));
    EXPECT_FALSE(fs::exists(moved.partial()));
    EXPECT_TRUE(fs::exists(folder / "kept.partial"));
    EXPECT_TRUE(fs::exists(folder / "committed"));
    for (int i = 0; i < 200; ++i) PartialName again(folder / "again");  // names are given back
    test::write_file(folder / "again.partial", "half");
    const PartialName last(folder / "again");
    remove_partial_files();
    EXPECT_FALSE(fs::exists(folder / "again.partial"));
}

TEST(PartialFile, AnAbandonedPartialFileIsOverwritten) {
    const Folder folder;
    test::write_file(folder / "out.partial", "a long rest of a killed run");
    PartialFile file(folder / "out");
    file.write(bytes("x"));
    file.commit();
    EXPECT_EQ(test::read_file(folder / "out"), "x");
}

TEST(PartialFile, RefusesWhatIsNoRegularFile) {
    const Folder folder;
    // As root a rename would replace the device.
    EXPECT_EQ(request_error([] { PartialFile file("/dev/null"); }),
              "/dev/null: exists and is not a regular file: expected the name of a file to write");
    EXPECT_THAT(request_error([&] { PartialFile file(folder.path().string()); }), HasSubstr("is not a regular file"));
    EXPECT_THAT(request_error([] { PartialFile file(""); }), HasSubstr("expected the name of a file to write"));
    EXPECT_EQ(request_error([&] { PartialFile file(folder / "no/out"); }),
              (folder / "no/out") + ": folder \"" + (folder / "no") + "\" does not exist: expected an existing folder");
}

TEST(PartialFile, FollowsALink) {
    const Folder folder;
    test::write_file(folder / "target", "old");
    fs::create_symlink("target", folder / "link");
    PartialFile file(folder / "link");
    file.write(bytes("new"));
    file.commit();
    EXPECT_TRUE(fs::is_symlink(folder / "link"));
    EXPECT_EQ(test::read_file(folder / "target"), "new");
}

TEST(PartialFile, OneWriterAtATime) {
    const Folder folder;
    PartialFile first(folder / "out");
    first.write(bytes("first"));
    EXPECT_EQ(work_error([&] { PartialFile second(folder / "out"); }),
              (folder / "out") + ": is being written by another process: expected to be its only writer");
    first.commit();
    EXPECT_EQ(test::read_file(folder / "out"), "first");
}

TEST(Writers, FullDiskLeavesNothing) {
    const Folder folder;
    const Tensor tensor{"x", Dtype::u8, {100000}, std::vector<std::byte>(100000)};
    TensorSet set;
    set.add(tensor);
    EXPECT_EQ(test::with_file_limit(4096, [&] { write_npy(folder / "x.npy", tensor); }),
              (folder / "x.npy") + ": cannot be written (File too large): expected a writable folder with room for it");
    EXPECT_EQ(test::with_file_limit(4096, [&] { write_safetensors(folder / "x.safetensors", set); }),
              (folder / "x.safetensors") +
                  ": cannot be written (File too large): expected a writable folder with room for it");
    EXPECT_TRUE(folder.empty());
}

}  // namespace
}  // namespace faultline
