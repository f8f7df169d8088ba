// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/capture.hpp>

#include <faultline/record/record_file.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/npy.hpp>
#include <faultline/tensor/safetensors.hpp>

#include "full_disk.hpp"
#include "support.hpp"

namespace faultline {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::request_error;
using ::testing::HasSubstr;

TensorSet example() {
    TensorSet set;
    const std::vector<std::uint16_t> bits{0x3F80, 0xC000, 0, 0x7F80};
    set.add(make_tensor<std::uint16_t>("layer0.q", {1, 1, 2, 2}, bits, Dtype::bf16));
    set.add(make_tensor<std::uint16_t>("layer0.k", {1, 2, 1, 2}, bits, Dtype::bf16));  // axes of other lengths
    set.add(make_tensor<std::uint8_t>("layer0.v", {1, 1, 1, 2}, std::vector<std::uint8_t>{0x38, 0x7E}, Dtype::e4m3));
    set.add(make_tensor<float>("layer0.flash.lse", {1, 1, 2}, std::vector<float>{1.5f, -2}));
    set.add(make_tensor<std::uint16_t>("half", {2}, std::vector<std::uint16_t>{0x3C00, 0x0001}, Dtype::f16));
    set.add(make_tensor<std::int64_t>("nested/step", {}, std::vector<std::int64_t>{3000}));
    set.add({"empty", Dtype::f32, {0, 3}, {}});
    set.metadata = {{"loss", "1.28"}, {"seed", "not the manifest's"}};
    return set;
}

void expect_equal(const TensorSet& a, const TensorSet& b) {
    ASSERT_EQ(a.tensors.size(), b.tensors.size());
    for (const auto& [name, tensor] : a.tensors) {
        EXPECT_EQ(b.at(name).dtype, tensor.dtype) << name;
        EXPECT_EQ(b.at(name).shape, tensor.shape) << name;
        EXPECT_EQ(b.at(name).bytes, tensor.bytes) << name;
    }
    EXPECT_EQ(a.metadata, b.metadata);
}

TEST(Capture, RoundTrip) {
    const Folder folder;
    write_hdf5_capture(folder / "x.h5", example(), make_manifest("capture", "faultline generate", "", 9));
    expect_equal(read_hdf5_capture(folder / "x.h5"), example());
    const RecordReader reader(folder / "x.h5");
    EXPECT_EQ(reader.manifest().kind, "capture");
    EXPECT_EQ(reader.manifest().seed, 9u);
    EXPECT_EQ(reader.axes("layer0.flash.lse")[2].size, 2);
}

TEST(ReadTensors, GoesByWhatThePathIs) {
    const Folder folder;
    const Manifest manifest = make_manifest("capture", "", "", 0);
    write_hdf5_capture(folder / "x.h5", example(), manifest);
    write_hdf5_capture(folder / "no_extension_1", example(), manifest);
    write_safetensors(folder / "x.safetensors", example());
    write_safetensors(folder / "no_extension_2", example());
    for (const char* name : {"x.h5", "no_extension_1", "x.safetensors", "no_extension_2"}) {
        expect_equal(read_tensors(folder / name), example());
    }
    write_npy(folder / "layer0.q.npy", example().at("layer0.q"));
    EXPECT_EQ(read_tensors(folder / "layer0.q.npy").at("layer0.q").dtype, Dtype::bf16);
    fs::rename(folder / "layer0.q.npy", folder / "renamed");
    EXPECT_EQ(read_tensors(folder / "renamed").at("renamed").dtype, Dtype::bf16);
    fs::create_directory(folder / "set");
    write_npy(folder / "set/layer0.q.npy", example().at("layer0.q"));
    EXPECT_EQ(read_tensors(folder / "set").tensors.size(), 1u);
}

TEST(ReadTensors, RefusesTheRest) {
    const Folder folder;
    EXPECT_THAT(request_error([&] { (void)read_tensors(folder / "none"); }), HasSubstr("cannot be opened"));
    test::write_file(folder / "x", "hello");
    EXPECT_EQ(
        request_error([&] { (void)read_tensors(folder / "x"); }),
        (folder / "x") +
            ": is of no format that we read: expected safetensors, .npy, a folder of .npy files, or an HDF5 capture");
    test::write_file(folder / "x.h5", "hello");
    EXPECT_THAT(request_error([&] { (void)read_tensors(folder / "x.h5"); }), HasSubstr("is not HDF5"));
    RecordFile::create(folder / "a.h5", make_manifest("attribution", "", "", 0)).commit();
    EXPECT_EQ(request_error([&] { (void)read_tensors(folder / "a.h5"); }),
              (folder / "a.h5") + ": kind is \"attribution\": expected \"capture\"");
}

TEST(Capture, NamesThatHdf5CannotHold) {
    const Folder folder;
    for (const std::string name : {"", "/q", "q/", "a//b", "./q", "a/./b"}) {
        TensorSet set;
        set.add({name, Dtype::f32, {0}, {}});
        EXPECT_THAT(
            request_error([&] { write_hdf5_capture(folder / "x.h5", set, make_manifest("capture", "", "", 0)); }),
            HasSubstr("expected a name that HDF5 can hold"))
            << name;
    }
    EXPECT_TRUE(folder.empty());
}

TEST(Capture, FullDiskLeavesNothing) {
    const Folder folder;
    TensorSet set;
    set.add(make_tensor<double>("q", {100000}, std::vector<double>(100000, 0.1)));
    EXPECT_THAT(test::with_file_limit(
                    8192, [&] { write_hdf5_capture(folder / "x.h5", set, make_manifest("capture", "", "", 0)); }),
                HasSubstr("(File too large): expected a writable folder with room for it"));
    EXPECT_TRUE(folder.empty());
}

}  // namespace
}  // namespace faultline
