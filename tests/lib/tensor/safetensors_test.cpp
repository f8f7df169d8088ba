// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/safetensors.hpp>

#include <sys/stat.h>

#include <cstdlib>

#include <fmt/format.h>

#include "paths.hpp"
#include "support.hpp"

namespace faultline {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::request_error;
using ::testing::HasSubstr;

/// A file's bytes: length, header, data.
std::string file_of(const std::string& header, std::size_t data_bytes) {
    std::string out;
    for (int i = 0; i < 8; ++i) out += static_cast<char>(header.size() >> (8 * i) & 0xFF);
    return out + header + std::string(data_bytes, '\1');
}

TensorSet read(const std::string& bytes) {
    return read_safetensors(MemoryInput("t.safetensors", std::as_bytes(std::span(bytes))));
}

std::string refusal(const std::string& bytes) {
    return request_error([&] { (void)read(bytes); });
}

std::string refusal(const std::string& header, std::size_t data_bytes) { return refusal(file_of(header, data_bytes)); }

TEST(Safetensors, ReadsWhatTheHeaderSays) {
    const TensorSet set = read(file_of(
        R"({"__metadata__":{"step":"3"},"b":{"dtype":"U8","shape":[2,1],"data_offsets":[4,6]},)"
        R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"none":{"dtype":"I64","shape":[3,0],"data_offsets":[4,4]}}  )",
        6));
    ASSERT_EQ(set.tensors.size(), 3u);
    EXPECT_EQ(set.at("b").to_double(), (std::vector<double>{1, 1}));
    EXPECT_EQ(set.at("b").shape, (std::vector<std::int64_t>{2, 1}));
    EXPECT_EQ(set.at("a").shape, (std::vector<std::int64_t>{}));
    EXPECT_EQ(set.at("none").size(), 0);
    EXPECT_EQ(set.metadata.at("step"), "3");
}

TEST(Safetensors, RoundTripOfEveryDtype) {
    const Folder folder;
    TensorSet set;
    for (int i = 0; i < dtype_count; ++i) {
        const auto dtype = static_cast<Dtype>(i);
        Tensor tensor{std::string(print_name(dtype)), dtype, {2, 3}, {}};
        for (std::size_t b = 0; b < 6 * width(dtype); ++b) tensor.bytes.push_back(static_cast<std::byte>(b * 37 + 11));
        set.add(tensor);
    }
    set.add({"empty", Dtype::f32, {0, 4}, {}});
    set.add({"ünï\n\"", Dtype::u8, {}, {std::byte{7}}});
    set.metadata = {{"loss", "1.28"}, {"note", "zwei\nZeilen"}};
    write_safetensors(folder / "x.safetensors", set);
    const TensorSet back = read_safetensors(folder / "x.safetensors");
    ASSERT_EQ(back.tensors.size(), set.tensors.size());
    for (const auto& [name, tensor] : set.tensors) {
        EXPECT_EQ(back.at(name).dtype, tensor.dtype);
        EXPECT_EQ(back.at(name).shape, tensor.shape);
        EXPECT_EQ(back.at(name).bytes, tensor.bytes);
    }
    EXPECT_EQ(back.metadata, set.metadata);
    EXPECT_FALSE(fs::exists(folder / "x.safetensors.partial"));
}

TEST(Safetensors, HeaderLength) {
    EXPECT_EQ(refusal(""),
              "t.safetensors: header length: the file has 0 bytes: expected at least 8, a safetensors file");
    EXPECT_EQ(refusal("\5\0\0"),
              "t.safetensors: header length: the file has 1 bytes: expected at least 8, a safetensors file");
    std::string bytes = file_of("{}", 0);
    bytes[0] = 3;
    EXPECT_EQ(refusal(bytes),
              "t.safetensors: header length: 3 bytes: expected at most the 2 bytes that follow it in the file");
    for (int i = 0; i < 8; ++i) bytes[static_cast<std::size_t>(i)] = '\xff';
    EXPECT_EQ(
        refusal(bytes),
        "t.safetensors: header length: 18446744073709551615 bytes: expected at most the 2 bytes that follow it in the file");
}

TEST(Safetensors, HeaderLongerThanTheFormatAllows) {
    const Folder folder;
    const std::string path = folder / "huge.safetensors";
    std::string start = file_of("{}", 0);
    const std::uint64_t length = 100000001;  // one more than safetensors' MAX_HEADER_SIZE
    std::memcpy(start.data(), &length, sizeof length);
    test::write_file(path, start);
    fs::resize_file(path, 8 + length);  // sparse
    EXPECT_EQ(request_error([&] { (void)read_safetensors(path); }),
              path + ": header length: 100000001 bytes: expected at most 100000000");
}

TEST(Safetensors, HeaderIsNotAJsonObject) {
    EXPECT_EQ(refusal("", 0), "t.safetensors: header: is empty: expected a JSON object, \"{\" its first byte");
    EXPECT_EQ(refusal("[]", 0),
              "t.safetensors: header: begins with \"[\": expected a JSON object, \"{\" its first byte");
    EXPECT_EQ(refusal(" {}", 0),
              "t.safetensors: header: begins with \" \": expected a JSON object, \"{\" its first byte");
    EXPECT_EQ(refusal("{\"a\":", 0), "t.safetensors: header: is not JSON (at byte 6): expected a JSON object in UTF-8");
    EXPECT_THAT(refusal("{\"\xff\":1}", 0),
                HasSubstr("header: is not JSON (at byte 3): expected a JSON object in UTF-8"));
    EXPECT_THAT(refusal("{} {}", 0), HasSubstr("header: is not JSON"));
    EXPECT_THAT(refusal(std::string(100000, '{'), 0), HasSubstr("header: is not JSON"));
    EXPECT_EQ(refusal("{\"a\":" + std::string(100000, '['), 0),
              "t.safetensors: header: is nested deeper than any tensor's entry: expected three levels at most");
}

TEST(Safetensors, Entries) {
    const auto entry = [](const std::string& body, std::size_t data = 4) {
        return refusal("{\"q\":" + body + "}", data);
    };
    EXPECT_EQ(entry("3"), "t.safetensors: tensor \"q\": is a JSON number: expected an object");
    EXPECT_EQ(entry(R"({"shape":[1],"data_offsets":[0,4]})"),
              "t.safetensors: tensor \"q\": dtype is missing: expected dtype, shape and data_offsets");
    EXPECT_EQ(entry(R"({"dtype":"F32","data_offsets":[0,4]})"),
              "t.safetensors: tensor \"q\": shape is missing: expected dtype, shape and data_offsets");
    EXPECT_EQ(entry(R"({"dtype":"F32","shape":[1]})"),
              "t.safetensors: tensor \"q\": data_offsets is missing: expected dtype, shape and data_offsets");
    EXPECT_EQ(entry(R"({"dtype":7,"shape":[1],"data_offsets":[0,4]})"),
              "t.safetensors: tensor \"q\": dtype is a JSON number: expected a string");
    EXPECT_EQ(
        entry(R"({"dtype":"F4","shape":[1],"data_offsets":[0,4]})"),
        "t.safetensors: tensor \"q\": dtype \"F4\" is unknown: expected one of F64, F32, F16, BF16, F8_E5M2, F8_E4M3, "
        "I64, I32, I16, I8, U8, U16, U32, U64, BOOL");
    EXPECT_EQ(entry(R"({"dtype":"F32","shape":1,"data_offsets":[0,4]})"),
              "t.safetensors: tensor \"q\": shape is a JSON number: expected an array of at most 64 dimensions");
    for (const char* extent : {"-1", "1.0", "1e0", "\"1\"", "9223372036854775808", "1e300"}) {
        EXPECT_THAT(entry(fmt::format(R"({{"dtype":"F32","shape":[{}],"data_offsets":[0,4]}})", extent)),
                    HasSubstr("expected non-negative integers below 2^63"))
            << extent;
    }
    for (const char* offsets : {"[0]", "[0,4,8]", "[-4,0]", "[0,4.0]", "{}", "[0,18446744073709551616]"}) {
        EXPECT_EQ(entry(fmt::format(R"({{"dtype":"F32","shape":[1],"data_offsets":{}}})", offsets)),
                  "t.safetensors: tensor \"q\": data_offsets is not [begin, end]: expected two non-negative integers")
            << offsets;
    }
}

TEST(Safetensors, OffsetsOutOfRange) {
    const auto entry = [](const char* shape, const char* offsets) {
        return refusal(fmt::format(R"({{"q":{{"dtype":"F32","shape":{},"data_offsets":{}}}}})", shape, offsets), 4);
    };
    EXPECT_EQ(
        entry("[2]", "[0,8]"),
        "t.safetensors: tensor \"q\": data_offsets [0, 8]: expected begin <= end <= 4, the bytes after the header");
    EXPECT_THAT(entry("[1]", "[4,0]"), HasSubstr("data_offsets [4, 0]: expected begin <= end <= 4"));
    EXPECT_THAT(entry("[1]", "[0,18446744073709551615]"), HasSubstr("expected begin <= end <= 4"));
    EXPECT_EQ(entry("[2]", "[0,4]"),
              "t.safetensors: tensor \"q\": data_offsets span 4 bytes: expected 8 for shape [2] of F32");
    EXPECT_EQ(
        entry("[4611686018427387904,4]", "[0,4]"),
        "t.safetensors: tensor \"q\": shape [4611686018427387904, 4] has too many elements: expected fewer than 2^63 bytes");
    // 2^32 * 2^32 = 2^64 would wrap to 0.
    EXPECT_THAT(entry("[4294967296,4294967296]", "[0,0]"), HasSubstr("has too many elements"));
}

TEST(Safetensors, OverlapsHolesAndTails) {
    const auto two = [](const char* a, const char* b, std::size_t data) {
        return refusal(fmt::format(R"({{"a":{{"dtype":"U8","shape":[4],"data_offsets":{}}},)"
                                   R"("b":{{"dtype":"U8","shape":[4],"data_offsets":{}}}}})",
                                   a, b),
                       data);
    };
    EXPECT_EQ(
        two("[0,4]", "[2,6]", 6),
        "t.safetensors: tensor \"b\": data_offsets begin at 2, inside the tensor before it: expected 4, where the "
        "tensor before it ends");
    EXPECT_THAT(two("[0,4]", "[0,4]", 4),
                HasSubstr("tensor \"b\": data_offsets begin at 0, inside the tensor before it"));
    EXPECT_EQ(two("[0,4]", "[5,9]", 9),
              "t.safetensors: tensor \"b\": data_offsets begin at 5, which leaves a hole: expected 4, where the tensor "
              "before it ends");
    EXPECT_THAT(two("[1,5]", "[5,9]", 9),
                HasSubstr("tensor \"a\": data_offsets begin at 1, which leaves a hole: expected 0"));
    EXPECT_EQ(two("[4,8]", "[0,4]", 10), "t.safetensors: data: 2 bytes after the last tensor: expected none");
    EXPECT_THAT(refusal("{}", 3), HasSubstr("data: 3 bytes after the last tensor"));
}

TEST(Safetensors, Duplicates) {
    const std::string entry = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
    EXPECT_EQ(refusal("{\"q\":" + entry + ",\"q\":" + entry + "}", 1),
              "t.safetensors: tensor \"q\": occurs twice: expected every name once");
    EXPECT_EQ(refusal(R"({"q":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
              "t.safetensors: header: key \"dtype\" occurs twice: expected every key once");
    // The same name spelt with an escape is the same name.
    EXPECT_THAT(refusal("{\"q\":" + entry + ",\"\\u0071\":" + entry + "}", 1), HasSubstr("tensor \"q\": occurs twice"));
}

TEST(Safetensors, Metadata) {
    EXPECT_EQ(refusal(R"({"__metadata__":[]})", 0),
              "t.safetensors: __metadata__: is a JSON array: expected an object of strings");
    EXPECT_EQ(refusal(R"({"__metadata__":{"step":3}})", 0),
              "t.safetensors: __metadata__ \"step\": is a JSON number: expected a string");
}

TEST(Safetensors, NamesAreEscapedInMessages) {
    const std::string sentence = refusal("{\"\\u001b[2J\\u009b\":3}", 0);
    EXPECT_EQ(sentence, "t.safetensors: tensor \"\\x1b[2J\\xc2\\x9b\": is a JSON number: expected an object");
}

TEST(Safetensors, EveryTruncationOfAFileIsRefused) {
    const std::string whole = file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
    (void)read(whole);
    for (std::size_t length = 0; length < whole.size(); ++length) {
        EXPECT_THAT(refusal(whole.substr(0, length)), HasSubstr(": expected ")) << length;
    }
}

TEST(Safetensors, FilesThatAreNone) {
    const Folder folder;
    EXPECT_EQ(request_error([&] { (void)read_safetensors(folder / "no.safetensors"); }),
              (folder / "no.safetensors") +
                  ": cannot be opened (No such file or directory): expected a readable regular file");
    EXPECT_EQ(request_error([&] { (void)read_safetensors(folder.path().string()); }),
              folder.path().string() + ": is a folder: expected a readable regular file");
    ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
    EXPECT_EQ(request_error([&] { (void)read_safetensors(folder / "pipe"); }),
              (folder / "pipe") + ": is not a regular file: expected a readable regular file");
    EXPECT_THAT(request_error([&] { (void)read_safetensors("/dev/zero"); }),
                HasSubstr("/dev/zero: is not a regular file"));
}

TEST(Safetensors, WriterRefusesWhatTheFormatCannotHold) {
    const Folder folder;
    const std::string path = folder / "x.safetensors";
    TensorSet set;
    set.add({"__metadata__", Dtype::u8, {0}, {}});
    EXPECT_THAT(request_error([&] { write_safetensors(path, set); }),
                HasSubstr("tensor \"__metadata__\": expected another name"));
    set.tensors.clear();
    set.add({"\xff", Dtype::u8, {0}, {}});
    EXPECT_THAT(request_error([&] { write_safetensors(path, set); }), HasSubstr("expected UTF-8"));
    set.tensors.clear();
    set.add({"q", Dtype::f32, {2}, {std::byte{0}}});
    EXPECT_EQ(request_error([&] { write_safetensors(path, set); }),
              path + ": tensor \"q\": 1 bytes: expected shape [2] of float32");
    EXPECT_TRUE(folder.empty());
}

TEST(Safetensors, RealCaptures) {
    const char* given = std::getenv("FAULTLINE_CAPTURES");
    const fs::path captures = given != nullptr ? fs::path(given) : test::source_dir() / "../shared/captures";
    if (!fs::exists(captures / "healthy64-3000.safetensors")) GTEST_SKIP() << "no captures (set FAULTLINE_CAPTURES)";
    const TensorSet set = read_safetensors((captures / "healthy64-3000.safetensors").string());
    const Tensor& q = set.at("layer0.q");
    EXPECT_EQ(q.dtype, Dtype::bf16);
    EXPECT_EQ(q.shape.size(), 4u);
    EXPECT_EQ(q.shape[2], 256);
    EXPECT_EQ(q.shape[3], 64);
    EXPECT_EQ(set.at("layer0.flash.lse").dtype, Dtype::f32);
    EXPECT_TRUE(set.metadata.contains("loss"));
}

}  // namespace
}  // namespace faultline
