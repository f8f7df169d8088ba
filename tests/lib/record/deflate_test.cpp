// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/deflate.hpp>

#include <chrono>
#include <random>
#include <thread>

#include <faultline/record/record_file.hpp>
#include <faultline/record/record_reader.hpp>

#include "support.hpp"

namespace faultline {
namespace {

using test::Folder;
using Shape = std::vector<std::int64_t>;

std::vector<std::byte> some_bytes(std::size_t count) {
    std::mt19937 generator(1);
    std::vector<std::byte> out(count);
    for (std::byte& b : out) b = static_cast<std::byte>(generator());
    return out;
}

TEST(Shuffle, PutsByteBOfEveryElementTogether) {
    const std::vector<std::uint8_t> in{0x00, 0x01, 0x10, 0x11, 0x20, 0x21};
    std::vector<std::byte> out(6);
    h5::shuffle(std::as_bytes(std::span(in)), 2, out);
    const std::vector<std::uint8_t> expected{0x00, 0x10, 0x20, 0x01, 0x11, 0x21};
    EXPECT_EQ(0, std::memcmp(out.data(), expected.data(), 6));
}

TEST(ChunkShape, CutsTheAppendAxisFirst) {
    EXPECT_EQ(h5::chunk_shape(Shape{10, 4}, 8), (Shape{10, 4}));
    EXPECT_EQ(h5::chunk_shape(Shape{1024, 1024}, 4), (Shape{64, 1024}));
    EXPECT_EQ(h5::chunk_shape(Shape{2, 512, 512}, 4), (Shape{1, 128, 512}));
    EXPECT_EQ(h5::chunk_shape(Shape{65}, 4096), (Shape{33}));  // 64 would fit: two parts, equal but for one
    EXPECT_EQ(h5::chunk_shape(Shape{0, 5}, 4), (Shape{1, 5}));
}

TEST(WorthDeflating, SmoothDataIsAndNoiseIsNot) {
    EXPECT_FALSE(h5::worth_deflating(some_bytes(1 << 20), 4));
    EXPECT_TRUE(h5::worth_deflating(std::vector<std::byte>(1 << 20), 4));
    auto bytes = some_bytes(1 << 20);
    for (std::byte& b : bytes) b &= std::byte{0x7F};  // seven bits of eight: an eighth less, not enough
    EXPECT_FALSE(h5::worth_deflating(bytes, 1));
    for (std::byte& b : bytes) b &= std::byte{0x0F};  // half
    EXPECT_TRUE(h5::worth_deflating(bytes, 1));
}

// HDF5's own filters must give back what our threads made, for every rank, width and ragged edge.
TEST(WriteDeflated, AnyHdf5ReaderUndoesIt) {
    const Folder folder;
    const Shape shapes[] = {{70001}, {300, 301}, {3, 129, 515}, {2, 3, 130, 131}, {1, 1, 1, 90000}, {90000, 1}};
    const Storage always{Storage::Compression::always, 1, 2};
    RecordFile file = RecordFile::create(folder / "x.h5", make_manifest("attribution", "", "", 0), always);
    std::vector<std::pair<std::string, std::vector<std::byte>>> written;
    for (const Dtype dtype : {Dtype::u8, Dtype::bf16, Dtype::f32, Dtype::f64}) {
        for (const Shape& shape : shapes) {
            std::vector<Axis> axes;
            std::string path(print_name(dtype));
            for (const std::int64_t extent : shape) path.append("_").append(std::to_string(extent));
            for (std::size_t d = 0; d < shape.size(); ++d)
                axes.push_back({path + "_axis" + std::to_string(d), shape[d]});
            written.emplace_back(path, some_bytes(static_cast<std::size_t>(*byte_count(dtype, shape))));
            file.write_bytes(path, dtype, written.back().second, axes);
        }
    }
    file.commit();
    const RecordReader reader(folder / "x.h5");
    for (const auto& [path, bytes] : written) EXPECT_TRUE(reader.read(path).bytes == bytes) << path;
}

TEST(WriteDeflated, BytesDoNotDependOnTheThreads) {
    const Folder folder;
    std::vector<float> values(1 << 20);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i / 7);
    const Manifest manifest = make_manifest("attribution", "", "", 0);
    for (const int threads : {1, 2, 8}) {
        if (threads == 8) std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // the time is not in the bytes
        RecordFile file =
            RecordFile::create(folder / std::to_string(threads), manifest, {Storage::Compression::always, 1, threads});
        file.write("x", values, {{"row", 1 << 20}});
        file.commit();
    }
    const std::string one = test::read_file(folder / "1");
    EXPECT_LT(one.size(), values.size() * sizeof(float) / 4);
    EXPECT_TRUE(one == test::read_file(folder / "2"));
    EXPECT_TRUE(one == test::read_file(folder / "8"));
}

}  // namespace
}  // namespace faultline
