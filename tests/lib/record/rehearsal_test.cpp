// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/rehearsal.hpp>

#include <chrono>
#include <random>

#include <faultline/record/record_file.hpp>
#include <faultline/record/record_reader.hpp>

#include "support.hpp"

namespace faultline {
namespace {

using test::Folder;
using test::request_error;
using ::testing::HasSubstr;

/// A record with groups of many members (which HDF5 stores densely), coordinates, and compressed and plain data.
std::string whole_record(const Folder& folder) {
    RecordFile file = RecordFile::create(folder / "whole.h5", make_manifest("attribution", "faultline", "", 1));
    const std::vector<std::string> sites{"p_cast", "o_cast", "scale"};
    file.coordinate("layer0/site", sites);
    for (int i = 0; i < 24; ++i)
        file.write("layer0/tiles/t" + std::to_string(i), std::vector<double>(3, i), {{"site", 3}}, {"what", "1"});
    file.write("layer0/big", std::vector<double>(20000, 1.0), {{"row", 20000}}, {"what", "1"});
    file.commit();
    return test::read_file(folder / "whole.h5");
}

TEST(Rehearsal, LetsWholeFilesPass) {
    const Folder folder;
    (void)whole_record(folder);
    for (const Rehearsal what : {Rehearsal::structure, Rehearsal::values})
        EXPECT_NO_THROW(rehearse_reading(folder / "whole.h5", what));
    EXPECT_THAT(request_error([&] { rehearse_reading(folder / "none.h5", Rehearsal::structure); }),
                HasSubstr("none.h5"));
}

/// HDF5 1.10 dies of about one in fifteen of these where nothing comes before it.
TEST(Rehearsal, DamagedFilesNeitherCrashNorHang) {
    const Folder folder;
    const std::string whole = whole_record(folder), path = folder / "damaged.h5";
    std::mt19937 random(1);
    int refused = 0;
    for (int i = 0; i < 80; ++i) {
        std::string bytes = whole;
        for (int n = 0; n < 30; ++n)
            bytes[random() % (i % 2 == 0 ? std::min<std::size_t>(bytes.size(), 6000) : bytes.size())] =
                static_cast<char>(random());
        test::write_file(path, bytes);
        try {
            rehearse_reading(path, Rehearsal::values);
            const RecordReader reader(path);
            for (const std::string& dataset : reader.datasets()) (void)reader.axes(dataset);
        } catch (const RequestError&) {
            ++refused;
        }
    }
    EXPECT_GT(refused, 40);
}

/// HDF5's default for a file that is being written is to try again for years; one that is not must not be tried so.
TEST(Rehearsal, DamagedSuperblockIsRefusedAtOnce) {
    const Folder folder;
    std::string bytes = whole_record(folder);
    constexpr std::size_t flags = 11, checksum = 44;  // in a superblock of version 3 with 8-byte offsets
    ASSERT_EQ(bytes[8], 3);
    for (const char being_written : {char{0}, char{5}}) {
        bytes[checksum] = static_cast<char>(~bytes[checksum]);
        bytes[flags] = being_written;
        test::write_file(folder / "damaged.h5", bytes);
        const auto begin = std::chrono::steady_clock::now();
        EXPECT_THAT(request_error([&] { (void)RecordReader(folder / "damaged.h5"); }),
                    HasSubstr("damaged.h5: the file cannot be read ("));
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    }
}

}  // namespace
}  // namespace faultline
