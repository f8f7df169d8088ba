// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/record_file.hpp>

#include <cmath>
#include <limits>

#include <gmock/gmock.h>

#include <faultline/base/error.hpp>
#include <faultline/record/h5.hpp>
#include <faultline/record/record_reader.hpp>

#include "full_disk.hpp"
#include "support.hpp"

namespace faultline {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::request_error;
using test::work_error;
using ::testing::HasSubstr;

Manifest manifest() {
    Manifest out =
        make_manifest("attribution", "faultline attribute x.safetensors", "threads = 2\n", 18446744073709551615u);
    out.inputs = {{"x.safetensors", "xxh3-128:0"}, {"ü.npy", "xxh3-128:1"}};
    return out;
}

std::vector<std::string> names(const std::vector<Axis>& axes) {
    std::vector<std::string> out;
    for (const Axis& axis : axes) out.push_back(axis.name);
    return out;
}

TEST(RecordFile, ManifestComesBack) {
    const Folder folder;
    Manifest given = manifest();
    given.config_toml = std::string(200000, '#');  // past the 64 KiB that old files allow an attribute
    RecordFile::create(folder / "x.h5", given).commit();
    const Manifest back = RecordReader(folder / "x.h5").manifest();
    EXPECT_EQ(back.kind, "attribution");
    EXPECT_EQ(back.schema, "faultline.attribution");
    EXPECT_EQ(back.schema_version, 1);
    EXPECT_EQ(back.created_utc, given.created_utc);
    EXPECT_EQ(back.command_line, given.command_line);
    EXPECT_EQ(back.config_toml, given.config_toml);
    EXPECT_EQ(back.git_commit, given.git_commit);
    EXPECT_EQ(back.build, given.build);
    EXPECT_EQ(back.cpu, given.cpu);
    EXPECT_EQ(back.gpu, "none");
    EXPECT_EQ(back.seed, given.seed);
    EXPECT_EQ(back.inputs, given.inputs);
}

// A file that says it is ours is taken at its word, but not of a layout that is not known.
TEST(RecordFile, AnotherSchemaIsRefused) {
    const auto refused = [](auto&& change) {
        const Folder folder;
        Manifest given = manifest();
        change(given);
        RecordFile::create(folder / "x.h5", given).commit();
        try {
            (void)RecordReader(folder / "x.h5").manifest();
        } catch (const RequestError& error) {
            return std::string(error.what());
        }
        return std::string("taken");
    };
    EXPECT_EQ(refused([](Manifest&) {}), "taken");
    EXPECT_THAT(
        refused([](Manifest& m) { m.schema_version = 99; }),
        ::testing::HasSubstr("x.h5: attribute schema_version: \"99\": expected 1 (a newer faultline wrote it)"));
    EXPECT_THAT(refused([](Manifest& m) { m.schema_version = 0; }), ::testing::HasSubstr("\"0\": expected 1"));
    EXPECT_THAT(refused([](Manifest& m) { m.schema = "other.program"; }),
                ::testing::HasSubstr("attribute schema: \"other.program\": expected \"faultline.attribution\""));
}

TEST(RecordFile, ACommandLineOfAnyBytesIsEscaped) {
    const Folder folder;
    Manifest given = manifest();
    given.command_line = "faultline \xff";
    RecordFile::create(folder / "x.h5", given).commit();
    EXPECT_EQ(RecordReader(folder / "x.h5").manifest().command_line, "faultline \\xff");
}

TEST(RecordFile, DatasetsOfEveryDtypeComeBack) {
    const Folder folder;
    RecordFile file = RecordFile::create(folder / "x.h5", manifest());
    for (int i = 0; i < dtype_count; ++i) {
        const auto dtype = static_cast<Dtype>(i);
        std::vector<std::byte> bytes(6 * width(dtype));
        for (std::size_t b = 0; b < bytes.size(); ++b) bytes[b] = static_cast<std::byte>(b * 37 + 11);
        const std::vector<Axis> axes{{"row", 2}, {"col", 3}};
        file.write_bytes("group/" + std::string(print_name(dtype)), dtype, bytes, axes, {"what", "m"});
    }
    file.commit();
    const RecordReader reader(folder / "x.h5");
    EXPECT_EQ(reader.datasets().size(), static_cast<std::size_t>(dtype_count));
    EXPECT_EQ(reader.datasets().front(), "group/float64");  // in the order of writing
    for (int i = 0; i < dtype_count; ++i) {
        const auto dtype = static_cast<Dtype>(i);
        const std::string path = "group/" + std::string(print_name(dtype));
        const Tensor tensor = reader.read(path);
        EXPECT_EQ(tensor.dtype, dtype) << path;
        EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{2, 3}));
        for (std::size_t b = 0; b < tensor.bytes.size(); ++b)
            ASSERT_EQ(tensor.bytes[b], static_cast<std::byte>(b * 37 + 11)) << path;
        EXPECT_EQ(names(reader.axes(path)), (std::vector<std::string>{"row", "col"}));
        EXPECT_EQ(reader.attribute(path, "units"), "m");
        EXPECT_EQ(reader.attribute(path, "long_name"), "what");
    }
    EXPECT_EQ(reader.attribute("group/bfloat16", "encoding"), "bfloat16");
    EXPECT_EQ(reader.attribute("group/float8_e4m3fn", "encoding"), "float8_e4m3fn");
    EXPECT_EQ(reader.attribute("group/float16", "encoding"), std::nullopt);
}

TEST(RecordFile, ScalarsStringsAndEmptyArrays) {
    const Folder folder;
    RecordFile file = RecordFile::create(folder / "x.h5", manifest());
    file.write("scalar", std::vector<double>{2.5}, {});
    file.write("empty", std::vector<float>{}, {{"none", 0}});
    const std::vector<std::string> words{"p_cast", "", "größer"};
    const std::vector<Axis> axes{{"word", 3}};
    file.write_strings("text", words, axes, {"words"});
    file.commit();
    const RecordReader reader(folder / "x.h5");
    EXPECT_EQ(reader.read("scalar").to_double(), (std::vector<double>{2.5}));
    EXPECT_EQ(reader.read("scalar").shape.size(), 0u);
    EXPECT_EQ(reader.read("empty").size(), 0);
    EXPECT_EQ(reader.read_strings("text"), words);
    EXPECT_EQ(reader.attribute("text", "units"), std::nullopt);
    EXPECT_TRUE(reader.contains("text"));
    EXPECT_FALSE(reader.contains("no/where"));
}

TEST(RecordFile, AnAxisHoldsInItsGroupAndBelow) {
    const Folder folder;
    RecordFile file = RecordFile::create(folder / "x.h5", manifest());
    const std::vector<std::string> sites{"p_cast", "o_cast"};
    file.coordinate("layer0/site", sites);
    file.coordinate("layer0/head", std::vector<std::int64_t>{4, 5, 6});
    file.write("layer0/tiles/p_cast/rms", std::vector<double>(6), {{"head", 3}, {"q_tile", 2}});
    file.write("layer0/alone", std::vector<double>(2), {{"site", 2}});
    file.write("layer0/tiles/o_cast/rms", std::vector<double>(6), {{"head", 3}, {"q_tile", 2}});
    // Another layer may have other sizes; a group may hide an axis of above.
    file.write("layer1/alone", std::vector<double>(5), {{"site", 5}});
    file.write("layer0/other/x", std::vector<double>(5), {{"site", 5}});
    EXPECT_EQ(work_error([&] {
                  file.write("layer0/b", std::vector<double>(3), {{"site", 3}});
              }),
              (folder / "x.h5") +
                  ": dataset \"layer0/b\": dimension \"site\" has 3 entries: expected 2, as its group has it");
    EXPECT_THAT(work_error([&] {
                    file.write("c", std::vector<double>(4), {{"row", 2}, {"row", 2}});
                }),
                HasSubstr("dataset \"c\": dimension \"row\": expected different, plain names"));
    file.commit();
    const RecordReader reader(folder / "x.h5");
    EXPECT_EQ(reader.read_strings("layer0/site"), sites);
    EXPECT_EQ(names(reader.axes("layer0/tiles/o_cast/rms")), (std::vector<std::string>{"head", "q_tile"}));
    EXPECT_FALSE(reader.contains("layer0/tiles/p_cast/head"));
    EXPECT_EQ(names(reader.axes("layer0/head")), (std::vector<std::string>{"head"}));
}

TEST(RecordFile, MistakesOfTheCallerAreSentences) {
    const Folder folder;
    RecordFile file = RecordFile::create(folder / "x.h5", manifest());
    file.write("a", std::vector<double>(2), {{"row", 2}});
    EXPECT_EQ(work_error([&] {
                  file.write("a", std::vector<double>(2), {{"row", 2}});
              }),
              (folder / "x.h5") + ": dataset \"a\": is there already: expected to write it once");
    EXPECT_EQ(work_error([&] {
                  file.write("b", std::vector<double>(3), {{"row", 2}});
              }),
              (folder / "x.h5") + ": dataset \"b\": 3 values: expected as many as shape [2] has");
    EXPECT_THAT(work_error([&] { file.write("a/b", std::vector<double>(1), {}); }),
                HasSubstr("cannot write group \"/a\""));
    EXPECT_THAT(work_error([&] { file.attribute("nowhere", "x", 1.0); }), HasSubstr("attribute \"x\" of \"nowhere\""));
    EXPECT_THAT(request_error([&] { file.attribute("a", "x", std::string("a\0b", 3)); }),
                HasSubstr("\"a\\x00b\" holds a NUL"));
}

TEST(RecordFile, AttributesKeepTheirValues) {
    const Folder folder;
    RecordFile file = RecordFile::create(folder / "x.h5", manifest());
    file.attribute("", "nan", std::numeric_limits<double>::quiet_NaN());
    file.attribute("", "tenth", 0.1);
    file.attribute("", "count", std::int64_t{-3});
    file.attribute("", "word", "old");
    file.attribute("", "word", "new");
    file.commit();
    const RecordReader reader(folder / "x.h5");
    EXPECT_EQ(reader.attribute("", "nan"), "nan");
    EXPECT_EQ(reader.attribute("", "tenth"), "0.1");
    EXPECT_EQ(reader.attribute("", "count"), "-3");
    EXPECT_EQ(reader.attribute("", "word"), "new");
    EXPECT_EQ(reader.attribute("", "none"), std::nullopt);
}

// 2^-9966 is about 1e-3000, the size of a saturated row's gradient.
TEST(RecordFile, WideRealsKeepTheirExponent) {
    const Folder folder;
    const std::vector<double> mantissa{0.5, -0.75, 0.5, 0.0};
    const std::vector<std::int64_t> exponent{-9965, 1, 4000, 0};
    const std::vector<Axis> axes{{"row", 4}};
    RecordFile file = RecordFile::create(folder / "x.h5", manifest());
    file.write_wide("norm", mantissa, exponent, axes, {"norm of dQ", "1"});
    file.commit();
    const RecordReader reader(folder / "x.h5");
    EXPECT_EQ(reader.read("norm").to_double(),
              (std::vector<double>{0.0, -1.5, std::numeric_limits<double>::infinity(), 0.0}));
    EXPECT_EQ(reader.read("norm_mantissa").to_double(), mantissa);
    EXPECT_EQ(reader.read("norm_exponent2").to_double(), (std::vector<double>{-9965, 1, 4000, 0}));
    EXPECT_EQ(reader.attribute("norm", "exact"), "norm_mantissa * 2^norm_exponent2");
}

TEST(RecordFile, AppearsOnCommitAndLeavesNothingWithout) {
    const Folder folder;
    {
        RecordFile file = RecordFile::create(folder / "x.h5", manifest());
        file.write("a", std::vector<double>(2), {{"row", 2}});
        EXPECT_FALSE(fs::exists(folder / "x.h5"));
        EXPECT_EQ(work_error([&] { (void)RecordFile::create(folder / "x.h5", manifest()); }),
                  (folder / "x.h5") + ": is being written by another process: expected to be its only writer");
        EXPECT_TRUE(fs::exists(folder / "x.h5.partial"));
    }
    EXPECT_TRUE(folder.empty());
    RecordFile::create(folder / "x.h5", manifest()).commit();
    EXPECT_TRUE(fs::exists(folder / "x.h5"));
    EXPECT_FALSE(fs::exists(folder / "x.h5.partial"));
}

TEST(RecordFile, FullDiskIsOneSentenceAndNoFile) {
    const Folder folder;
    const auto write = [&](std::size_t count, Storage::Compression compression) {
        return test::with_file_limit(64 << 10, [&] {
            RecordFile file = RecordFile::create(folder / "x.h5", manifest(), {compression, 1, 1});
            file.write("a", std::vector<double>(count), {{"row", static_cast<std::int64_t>(count)}});
            for (int i = 0; i < 1000 && count == 0; ++i)
                file.write("small" + std::to_string(i), std::vector<double>(9), {{"r", 9}});
            file.commit();
        });
    };
    const std::string end = " (File too large): expected a writable folder with room for it";
    EXPECT_EQ(write(1 << 20, Storage::Compression::never), (folder / "x.h5") + ": cannot write dataset \"a\"" + end);
    EXPECT_TRUE(folder.empty());
    EXPECT_THAT(write(0, Storage::Compression::never),
                HasSubstr("(File too large): expected"));  // in the metadata, on closing
    EXPECT_TRUE(folder.empty());
}

TEST(RecordFile, UnwritablePlacesAreSentences) {
    const Folder folder;
    EXPECT_THAT(request_error([&] { (void)RecordFile::create(folder / "no/x.h5", manifest()); }),
                HasSubstr("does not exist"));
    EXPECT_THAT(request_error([&] { (void)RecordFile::create("/dev/null", manifest()); }),
                HasSubstr("not a regular file"));
    EXPECT_THAT(work_error([&] { (void)RecordFile::create("/proc/x.h5", manifest()); }),
                HasSubstr("/proc/x.h5: cannot write the file ("));
}

TEST(RecordReader, FilesThatAreNone) {
    const Folder folder;
    EXPECT_THAT(request_error([&] { RecordReader reader(folder / "x.h5"); }),
                HasSubstr("cannot be opened (No such file or directory)"));
    test::write_file(folder / "x.h5", "not HDF5");
    EXPECT_EQ(request_error([&] { RecordReader reader(folder / "x.h5"); }),
              (folder / "x.h5") + ": is not HDF5: expected a file that begins with HDF5's signature");
    RecordFile file = RecordFile::create(folder / "y.h5", manifest());
    file.write("a", std::vector<double>(100000, 1.0), {{"row", 100000}});
    file.commit();
    const std::string whole = test::read_file(folder / "y.h5");
    for (std::size_t length = 0; length < whole.size(); length += 101) {
        test::write_file(folder / "x.h5", whole.substr(0, length));
        EXPECT_THAT(request_error([&] { (void)RecordReader(folder / "x.h5").read("a"); }), HasSubstr(": expected "))
            << length;
    }
}

TEST(RecordReader, MissingAndWrongDatasets) {
    const Folder folder;
    RecordFile file = RecordFile::create(folder / "x.h5", manifest());
    const std::vector<std::string> words{"a"};
    const std::vector<Axis> axes{{"word", 1}};
    file.write_strings("text", words, axes);
    file.write("number", std::vector<double>(1), {});
    file.commit();
    const RecordReader reader(folder / "x.h5");
    EXPECT_THAT(request_error([&] { (void)reader.read("no\n"); }), HasSubstr("dataset \"no\\n\" cannot be read"));
    EXPECT_EQ(request_error([&] { (void)reader.read("text"); }),
              (folder / "x.h5") + ": dataset \"text\": is of a type that a tensor cannot have: expected numbers");
    EXPECT_EQ(request_error([&] { (void)reader.read_strings("number"); }),
              (folder / "x.h5") + ": dataset \"number\": is not text: expected strings");
}

/// Files that others could send: claims of more data than there is, data in other files, links, cycles.
class HostileFile : public ::testing::Test {
  protected:
    HostileFile() : file_(H5Fcreate((folder_ / "x.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose) {}

    void dataset(const std::vector<hsize_t>& shape, hid_t properties) {
        const h5::Handle space(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr), H5Sclose);
        const h5::Handle made(H5Dcreate2(file_, "x", H5T_NATIVE_DOUBLE, space, H5P_DEFAULT, properties, H5P_DEFAULT),
                              H5Dclose);
        ASSERT_TRUE(made.valid());
        ASSERT_TRUE(file_.reset());
    }
    std::string refusal() {
        return request_error([&] { (void)RecordReader(folder_ / "x.h5").read("x"); });
    }

    Folder folder_;
    h5::Handle file_;
};

TEST_F(HostileFile, ClaimsATerabyteAndStoresNothing) {
    dataset({1ull << 37}, H5P_DEFAULT);
    EXPECT_EQ(refusal(),
              (folder_ / "x.h5") +
                  ": dataset \"x\": claims 1099511627776 bytes and stores 0: expected what the file can hold");
}

TEST_F(HostileFile, ShapeOverflows) {
    const h5::Handle properties(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    const hsize_t chunk[] = {1, 1};
    H5Pset_chunk(properties, 2, chunk);
    dataset({1ull << 31, 1ull << 30}, properties);
    EXPECT_THAT(refusal(),
                HasSubstr("shape [2147483648, 1073741824] has too many elements: expected fewer than 2^63 bytes"));
}

TEST_F(HostileFile, KeepsItsDataInAnotherFile) {
    test::write_file(folder_ / "secret", "12345678");
    const h5::Handle properties(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_external(properties, (folder_ / "secret").c_str(), 0, 8);
    dataset({1}, properties);
    EXPECT_EQ(refusal(),
              (folder_ / "x.h5") + ": dataset \"x\": keeps its data in another file: expected it in this one");
}

TEST_F(HostileFile, LinksInCircles) {
    for (const char* name : {"a", "b", "c"})
        ASSERT_GE(H5Lcreate_hard(file_, "/", file_, name, H5P_DEFAULT, H5P_DEFAULT), 0);
    H5Lcreate_soft("/nowhere", file_, "soft", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_external("other.h5", "/", file_, "external", H5P_DEFAULT, H5P_DEFAULT);
    dataset({1}, H5P_DEFAULT);
    EXPECT_EQ(RecordReader(folder_ / "x.h5").datasets().back(), "x");
}

}  // namespace
}  // namespace faultline
