// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/npy.hpp>

#include <cmath>

#include <fmt/format.h>

#include "support.hpp"

namespace faultline {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::request_error;
using test::write_file;
using ::testing::HasSubstr;

std::string file_of(const std::string& header, const std::string& data, int major = 1) {
    std::string out = "\x93NUMPY";
    out += static_cast<char>(major);
    out += '\0';
    for (int i = 0; i < (major == 1 ? 2 : 4); ++i) out += static_cast<char>(header.size() >> (8 * i) & 0xFF);
    return out + header + data;
}

std::string header_of(const std::string& descr, const std::string& shape, const std::string& fortran = "False") {
    return fmt::format("{{'descr': '{}', 'fortran_order': {}, 'shape': {}, }}\n", descr, fortran, shape);
}

Tensor read(const std::string& bytes, const std::string& name = "q.npy") {
    return read_npy_tensor(MemoryInput(name, std::as_bytes(std::span(bytes))), name);
}

std::string refusal(const std::string& bytes, const std::string& name = "q.npy") {
    return request_error([&] { (void)read(bytes, name); });
}

template <class T>
std::string bytes_of(std::initializer_list<T> values) {
    std::string out;
    for (const T value : values) out.append(reinterpret_cast<const char*>(&value), sizeof value);
    return out;
}

TEST(Npy, EveryVersionAndSpelling) {
    const std::string data = bytes_of<float>({1, 2, 3, 4, 5, 6});
    for (const int major : {1, 2, 3}) {
        const Tensor tensor = read(file_of(header_of("<f4", "(2, 3)"), data, major), "layer0.q.npy");
        EXPECT_EQ(tensor.name, "layer0.q");
        EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{2, 3}));
        EXPECT_EQ(tensor.to_double(), (std::vector<double>{1, 2, 3, 4, 5, 6}));
    }
    EXPECT_EQ(read(file_of("{\"shape\":(6L,),'descr':'<f4','fortran_order':False}", data)).shape,
              (std::vector<std::int64_t>{6}));
    EXPECT_EQ(read(file_of(header_of("<f4", "()"), bytes_of<float>({7}))).to_double(), (std::vector<double>{7}));
    EXPECT_EQ(read(file_of(header_of("<f4", "(0, 3)"), "")).size(), 0);
}

TEST(Npy, BigEndianIsSwapped) {
    const std::string data("\x3f\x80\x00\x00\xc0\x00\x00\x00", 8);  // 1, -2
    EXPECT_EQ(read(file_of(header_of(">f4", "(2,)"), data)).to_double(), (std::vector<double>{1, -2}));
    EXPECT_EQ(read(file_of(header_of(">i8", "(1,)"), std::string("\0\0\0\0\0\0\1\2", 8))).to_double(),
              (std::vector<double>{258}));
}

// a[i, j, k] = 100 i + 10 j + k of shape (2, 3, 2), first index fastest.
TEST(Npy, FortranOrderIsTransposed) {
    std::string data;
    std::vector<double> expected;
    for (int k = 0; k < 2; ++k) {
        for (int j = 0; j < 3; ++j) {
            for (int i = 0; i < 2; ++i) data += static_cast<char>(100 * i + 10 * j + k);
        }
    }
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 3; ++j) {
            for (int k = 0; k < 2; ++k) expected.push_back(100 * i + 10 * j + k);
        }
    }
    EXPECT_EQ(read(file_of(header_of("|u1", "(2, 3, 2)", "True"), data)).to_double(), expected);
    EXPECT_EQ(read(file_of(header_of("|u1", "(2, 0, 2)", "True"), "")).size(), 0);
    EXPECT_EQ(read(file_of(header_of("|u1", "()", "True"), "\5")).to_double(), (std::vector<double>{5}));
}

TEST(Npy, FormatsThatNumpyLacks) {
    const std::string bf16 = bytes_of<std::uint16_t>({0x3F80, 0xC000});  // 1, -2
    for (const char* descr : {"<V2", "|V2", "bfloat16"}) {
        const Tensor tensor = read(file_of(header_of(descr, "(2,)"), bf16));
        EXPECT_EQ(tensor.dtype, Dtype::bf16) << descr;
        EXPECT_EQ(tensor.to_double(), (std::vector<double>{1, -2}));
    }
    const Tensor named = read(file_of(header_of("<u2", "(2,)"), bf16), "layer0.q.bf16.npy");
    EXPECT_EQ(named.dtype, Dtype::bf16);
    EXPECT_EQ(named.name, "layer0.q");
    EXPECT_EQ(read(file_of(header_of("<u2", "(2,)"), bf16)).dtype, Dtype::u16);
    EXPECT_EQ(read(file_of(header_of("<f1", "(1,)"), "\x3c")).to_double(), (std::vector<double>{1}));  // e5m2
    EXPECT_EQ(read(file_of(header_of("|V1", "(1,)"), "\x38"), "q.e4m3.npy").to_double(), (std::vector<double>{1}));
    EXPECT_EQ(read(file_of(header_of("|u1", "(1,)"), "\x38"), "q.e4m3.npy").dtype, Dtype::e4m3);
    EXPECT_EQ(read(file_of(header_of("|u1", "(1,)"), "\x3c"), "q.e5m2.npy").to_double(), (std::vector<double>{1}));
    EXPECT_EQ(
        refusal(file_of(header_of("<V1", "(1,)"), "x")),
        "q.npy: descr: '<V1' is one raw byte of an unknown fp8 format: expected a file called NAME.e4m3.npy or NAME.e5m2.npy");
    EXPECT_EQ(
        refusal(file_of(header_of("<f4", "(1,)"), "1234"), "q.bf16.npy"),
        "q.bf16.npy: descr: '<f4' does not fit the file's name: expected '|V2' or '<u2' in a file called NAME.bf16.npy");
}

TEST(Npy, BadStarts) {
    EXPECT_EQ(refusal("\x93NUMPY"), "q.npy: magic: the file has 6 bytes: expected a .npy file, at least 10");
    EXPECT_EQ(refusal("PK\3\4 some zip"), "q.npy: magic: is not that of a .npy file: expected \"\\x93NUMPY\"");
    EXPECT_EQ(refusal(file_of("{}", "", 4)), "q.npy: version: 4.0: expected 1.0, 2.0 or 3.0");
    EXPECT_EQ(refusal(file_of("{}", "", 0)), "q.npy: version: 0.0: expected 1.0, 2.0 or 3.0");
    std::string longer = file_of("{}", "");
    longer[8] = 3;
    EXPECT_EQ(refusal(longer),
              "q.npy: header length: 3 bytes: expected at most the 2 bytes that follow it in the file");
    EXPECT_EQ(refusal(file_of(std::string(65537, ' '), "", 2)),
              "q.npy: header length: 65537 bytes: expected at most 65536");
    EXPECT_EQ(refusal(file_of("", "", 2).substr(0, 10)),
              "q.npy: header length: the file ends in it: expected a .npy file");
}

TEST(Npy, BadDictionaries) {
    const auto dictionary = [](const std::string& text) { return refusal(file_of(text, "")); };
    EXPECT_EQ(dictionary(""), "q.npy: header: is not numpy's dictionary (at byte 0 of it): expected \"{\"");
    EXPECT_EQ(dictionary("{'descr': <f4}"),
              "q.npy: header: is not numpy's dictionary (at byte 10 of it): expected a string");
    EXPECT_THAT(dictionary("{'descr': '<f4"), HasSubstr("expected a closing quote"));
    EXPECT_THAT(dictionary("{'descr': '<f4' 'shape': ()}"), HasSubstr("expected \"}\""));
    EXPECT_EQ(dictionary("{'descr': '<f4', 'fortran_order': False}"),
              "q.npy: header: shape is missing: expected descr, fortran_order and shape");
    EXPECT_EQ(dictionary("{'descr': '<f4', 'descr': '<f4'}"),
              "q.npy: header: key \"descr\" occurs twice: expected every key once");
    EXPECT_EQ(dictionary("{'colour': 'red'}"),
              "q.npy: header: key \"colour\": expected descr, fortran_order and shape");
    EXPECT_THAT(dictionary("{'fortran_order': 0}"), HasSubstr("expected True or False"));
    EXPECT_THAT(dictionary("{'shape': (-1,)}"), HasSubstr("expected a non-negative integer"));
    EXPECT_THAT(dictionary("{'shape': 3}"), HasSubstr("expected \"(\""));
    EXPECT_EQ(dictionary("{'shape': (9223372036854775808,)}"),
              "q.npy: shape: holds a number of 2^63 or more: expected non-negative integers below 2^63");
    EXPECT_THAT(dictionary(header_of("<f4", "()") + "x"), HasSubstr("expected nothing after the dictionary"));
    std::string many = "(";
    for (int i = 0; i < 65; ++i) many += "1, ";
    EXPECT_EQ(dictionary(header_of("<f4", many + ")")), "q.npy: shape: has more than 64 dimensions: expected fewer");
}

TEST(Npy, BadTypes) {
    const auto descr = [](const std::string& text) { return refusal(file_of(header_of(text, "(1,)"), "12345678")); };
    EXPECT_EQ(descr("|O"),
              "q.npy: descr: '|O' holds Python objects, which are never unpickled: expected a numeric type");
    for (const char* text :
         {"", "f4", "<c8", "<f16", "|S4", "<U4", "<M8[ns]", "<f3", "float64", "float32", "|V3", "<"}) {
        EXPECT_EQ(descr(text), fmt::format("q.npy: descr: '{}' is not a type that a tensor may have: expected a float, "
                                           "integer or bool type, or bfloat16",
                                           text));
    }
    EXPECT_EQ(refusal(file_of("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", "1234")),
              "q.npy: descr: is a structured type: expected one plain numeric type, such as '<f4'");
    EXPECT_THAT(descr("\x1b[31m"), HasSubstr("'\\x1b[31m'"));
}

TEST(Npy, SizesThatDisagree) {
    EXPECT_EQ(refusal(file_of(header_of("<f4", "(2,)"), "1234567")),
              "q.npy: data: 7 bytes: expected 8 for shape [2] of float32");
    EXPECT_EQ(refusal(file_of(header_of("<f4", "(2,)"), "123456789")),
              "q.npy: data: 9 bytes: expected 8 for shape [2] of float32");
    EXPECT_EQ(refusal(file_of(header_of("<f4", "(4294967296, 4294967296)"), "")),
              "q.npy: shape: [4294967296, 4294967296] has too many elements: expected fewer than 2^63 bytes");
    // A claim of 4 EiB takes no memory.
    EXPECT_THAT(refusal(file_of(header_of("|u1", "(4611686018427387904,)"), "1")),
                HasSubstr("data: 1 bytes: expected 4611686018427387904"));
}

TEST(Npy, RoundTripOfEveryDtype) {
    const Folder folder;
    for (int i = 0; i < dtype_count; ++i) {
        const auto dtype = static_cast<Dtype>(i);
        const char* suffix = dtype == Dtype::e5m2 ? ".e5m2" : dtype == Dtype::e4m3 ? ".e4m3" : "";
        for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{}, {3}, {2, 0}, {1, 2, 3}}) {
            const auto bytes = static_cast<std::size_t>(*byte_count(dtype, shape));
            Tensor tensor{"x", dtype, shape, std::vector<std::byte>(bytes)};
            for (std::size_t b = 0; b < bytes; ++b) tensor.bytes[b] = static_cast<std::byte>(b * 73 + 5);
            const std::string path = folder / (std::string("x") + suffix + ".npy");
            write_npy(path, tensor);
            const TensorSet back = read_npy(path);
            EXPECT_EQ(back.at("x").dtype, dtype) << print_name(dtype);
            EXPECT_EQ(back.at("x").shape, shape);
            EXPECT_EQ(back.at("x").bytes, tensor.bytes);
            // numpy aligns the data for memory mapping.
            EXPECT_EQ((fs::file_size(path) - bytes) % 64, 0u);
        }
    }
    write_npy(folder / "y.bf16.npy", {"y", Dtype::bf16, {1}, {std::byte{0x80}, std::byte{0x3F}}});
    EXPECT_THAT(test::read_file(folder / "y.bf16.npy"), HasSubstr("'descr': '<u2'"));
    EXPECT_EQ(read_npy(folder / "y.bf16.npy").at("y").to_double(), (std::vector<double>{1}));
}

TEST(Npy, WriterRefusesANameThatSaysOtherwise) {
    const Folder folder;
    EXPECT_EQ(request_error([&] {
                  write_npy(folder / "q.npy", {"q", Dtype::e4m3, {0}, {}});
              }),
              (folder / "q.npy") + ": tensor \"q\" is float8_e4m3fn: expected a file called NAME.e4m3.npy");
    EXPECT_EQ(request_error([&] {
                  write_npy(folder / "q.bf16.npy", {"q", Dtype::f32, {0}, {}});
              }),
              (folder / "q.bf16.npy") + ": tensor \"q\" is float32: expected a file's name without .bf16");
    EXPECT_TRUE(folder.empty());
}

TEST(NpyFolder, IsASetByFileName) {
    const Folder folder;
    EXPECT_EQ(request_error([&] { (void)read_npy_folder(folder.path().string()); }),
              folder.path().string() + ": holds no .npy file: expected layer0.q.npy and so on");
    write_npy(folder / "layer0.q.npy", make_tensor<float>("layer0.q", {1}, std::vector<float>{1}));
    write_npy(folder / "layer0.k.npy", make_tensor<float>("layer0.k", {2}, std::vector<float>{1, 2}));
    write_file(folder / "notes.txt", "not a tensor");
    const TensorSet set = read_npy_folder(folder.path().string());
    EXPECT_EQ(set.tensors.size(), 2u);
    EXPECT_EQ(set.at("layer0.k").shape, (std::vector<std::int64_t>{2}));
    write_npy(folder / "layer0.q.bf16.npy",
              make_tensor<std::uint16_t>("q", {1}, std::vector<std::uint16_t>{0}, Dtype::bf16));
    EXPECT_EQ(request_error([&] { (void)read_npy_folder(folder.path().string()); }),
              folder.path().string() + ": tensor \"layer0.q\" occurs twice: expected every name once");
    fs::remove(folder / "layer0.q.bf16.npy");
    write_file(folder / "\x1b[2J.npy", "junk");
    EXPECT_EQ(request_error([&] { (void)read_npy_folder(folder.path().string()); }),
              folder.path().string() + "/\\x1b[2J.npy: magic: the file has 4 bytes: expected a .npy file, at least 10");
    EXPECT_THAT(request_error([&] { (void)read_npy_folder(folder / "nowhere"); }),
                HasSubstr("expected a readable folder"));
}

}  // namespace
}  // namespace faultline
