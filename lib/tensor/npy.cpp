// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/npy.hpp>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/npy_header.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

namespace fs = std::filesystem;

/// A suffix before ".npy" that names a format numpy lacks.
struct Suffix {
    std::string_view text;
    Dtype dtype;
    std::string_view raw, integer;  // type codes that may carry it
};
constexpr std::array<Suffix, 3> suffixes{
    {{".bf16", Dtype::bf16, "V2", "u2"}, {".e5m2", Dtype::e5m2, "V1", "u1"}, {".e4m3", Dtype::e4m3, "V1", "u1"}}};

constexpr std::array<std::pair<std::string_view, Dtype>, 13> codes{{{"f8", Dtype::f64},
                                                                    {"f4", Dtype::f32},
                                                                    {"f2", Dtype::f16},
                                                                    {"f1", Dtype::e5m2},
                                                                    {"V2", Dtype::bf16},
                                                                    {"i8", Dtype::i64},
                                                                    {"i4", Dtype::i32},
                                                                    {"i2", Dtype::i16},
                                                                    {"i1", Dtype::i8},
                                                                    {"u1", Dtype::u8},
                                                                    {"u2", Dtype::u16},
                                                                    {"u4", Dtype::u32},
                                                                    {"u8", Dtype::u64}}};

std::string_view without(std::string_view text, std::string_view ending) {
    return text.ends_with(ending) ? text.substr(0, text.size() - ending.size()) : text;
}

const Suffix* suffix_of(std::string_view stem) {
    const auto found =
        std::find_if(suffixes.begin(), suffixes.end(), [&](const Suffix& s) { return stem.ends_with(s.text); });
    return found == suffixes.end() ? nullptr : &*found;
}

/// Dtype of the elements, by the rule at the top of the header; the first character of `descr` is the byte order.
Dtype dtype_of_descr(const Input& in, const std::string& descr, const Suffix* suffix) {
    const auto refuse = [&](const std::string& found, const std::string& expected) -> RequestError {
        return RequestError(
            fmt::format("{}: descr: '{}' {}: expected {}", in.name(), escaped(descr, 40), found, expected));
    };
    if (descr == "|O" || descr == "O")
        throw refuse("holds Python objects, which are never unpickled", "a numeric type");
    const bool ordered = !descr.empty() && std::string_view("<>|=").find(descr.front()) != std::string_view::npos;
    const std::string_view code = std::string_view(descr).substr(ordered ? 1 : 0);
    std::optional<Dtype> dtype;
    if (!ordered) {
        dtype = dtype_from_print_name(code);
        if (dtype && *dtype != Dtype::bf16 && *dtype != Dtype::e5m2 && *dtype != Dtype::e4m3) dtype.reset();
    } else if (code == "b1") {
        dtype = Dtype::boolean;
    } else {
        const auto found = std::find_if(codes.begin(), codes.end(), [&](const auto& c) { return c.first == code; });
        if (found != codes.end()) dtype = found->second;
    }
    if (suffix != nullptr) {
        if (dtype == suffix->dtype || (ordered && (code == suffix->raw || code == suffix->integer)))
            return suffix->dtype;
        throw refuse("does not fit the file's name", fmt::format("'|{}' or '<{}' in a file called NAME{}.npy",
                                                                 suffix->raw, suffix->integer, suffix->text));
    }
    if (code == "V1")
        throw refuse("is one raw byte of an unknown fp8 format", "a file called NAME.e4m3.npy or NAME.e5m2.npy");
    if (!dtype) throw refuse("is not a type that a tensor may have", "a float, integer or bool type, or bfloat16");
    return *dtype;
}

void swap_bytes(std::vector<std::byte>& bytes, std::size_t element_width) {
    for (std::size_t i = 0; i + element_width <= bytes.size(); i += element_width) {
        std::reverse(bytes.begin() + static_cast<std::ptrdiff_t>(i),
                     bytes.begin() + static_cast<std::ptrdiff_t>(i + element_width));
    }
}

/// Elements in Fortran order (first index fastest) rearranged to C order.
std::vector<std::byte> to_c_order(const std::vector<std::byte>& bytes, const std::vector<std::int64_t>& shape,
                                  std::size_t element_width) {
    std::vector<std::byte> out(bytes.size());
    std::vector<std::int64_t> index(shape.size(), 0), stride(shape.size(), 1);
    for (std::size_t d = 1; d < shape.size(); ++d) stride[d] = stride[d - 1] * shape[d - 1];
    std::int64_t from = 0;
    for (std::size_t to = 0; to < bytes.size(); to += element_width) {
        std::copy_n(bytes.begin() + from * static_cast<std::ptrdiff_t>(element_width), element_width,
                    out.begin() + static_cast<std::ptrdiff_t>(to));
        for (std::size_t d = shape.size(); d-- > 0;) {  // odometer, last index fastest
            from += stride[d];
            if (++index[d] < shape[d]) break;
            from -= stride[d] * shape[d];
            index[d] = 0;
        }
    }
    return out;
}

std::string descr_for(const std::string& path, const Tensor& tensor) {
    const std::string_view stem = without(path, ".npy");
    const Suffix* suffix = suffix_of(stem);
    const bool fp8 = tensor.dtype == Dtype::e5m2 || tensor.dtype == Dtype::e4m3;
    if ((suffix != nullptr && suffix->dtype != tensor.dtype) || (fp8 && suffix == nullptr)) {
        throw RequestError(
            fmt::format("{}: tensor {} is {}: expected {}", escaped(path, path.size()), in_quotes(tensor.name),
                        print_name(tensor.dtype),
                        fp8 ? fmt::format("a file called NAME{}.npy", tensor.dtype == Dtype::e5m2 ? ".e5m2" : ".e4m3")
                            : fmt::format("a file's name without {}", suffix->text)));
    }
    if (suffix != nullptr) return fmt::format("{}{}", width(tensor.dtype) == 1 ? '|' : '<', suffix->integer);
    if (tensor.dtype == Dtype::boolean) return "|b1";
    const auto found =
        std::find_if(codes.begin(), codes.end(), [&](const auto& c) { return c.second == tensor.dtype; });
    return fmt::format("{}{}", width(tensor.dtype) == 1 ? '|' : '<', found->first);
}

}  // namespace

Tensor read_npy_tensor(const Input& in, const std::string& file_name) {
    const detail::NpyHeader header = detail::read_npy_header(in);
    const std::string_view stem = without(file_name, ".npy");
    const Suffix* suffix = suffix_of(stem);
    Tensor tensor{std::string(suffix != nullptr ? without(stem, suffix->text) : stem),
                  dtype_of_descr(in, header.descr, suffix),
                  header.shape,
                  {}};
    const auto bytes = byte_count(tensor.dtype, tensor.shape);
    if (!bytes) {
        throw RequestError(fmt::format("{}: shape: {} has too many elements: expected fewer than 2^63 bytes", in.name(),
                                       shape_text(tensor.shape)));
    }
    if (*bytes != in.size() - header.data_start) {
        throw RequestError(fmt::format("{}: data: {} bytes: expected {} for shape {} of {}", in.name(),
                                       in.size() - header.data_start, *bytes, shape_text(tensor.shape),
                                       print_name(tensor.dtype)));
    }
    tensor.bytes.resize(static_cast<std::size_t>(*bytes));
    in.read(header.data_start, tensor.bytes);
    if (header.descr.front() == '>') swap_bytes(tensor.bytes, width(tensor.dtype));
    if (header.fortran_order) tensor.bytes = to_c_order(tensor.bytes, tensor.shape, width(tensor.dtype));
    return tensor;
}

TensorSet read_npy(const std::string& path) {
    const FileInput in(path);
    TensorSet set{in.name(), {}, {}};
    set.add(read_npy_tensor(in, fs::path(path).filename().string()));
    return set;
}

TensorSet read_npy_folder(const std::string& path) {
    TensorSet set{escaped(path, path.size()), {}, {}};
    std::error_code error;
    std::vector<fs::path> files;
    for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
        if (entry->path().extension() == ".npy") files.push_back(entry->path());
    }
    if (error) {
        throw RequestError(
            fmt::format("{}: cannot be listed ({}): expected a readable folder", set.source, error.message()));
    }
    if (files.empty())
        throw RequestError(fmt::format("{}: holds no .npy file: expected layer0.q.npy and so on", set.source));
    std::sort(files.begin(), files.end());  // a folder's own order differs from machine to machine
    for (const fs::path& file : files) set.add(read_npy_tensor(FileInput(file.string()), file.filename().string()));
    return set;
}

void write_npy(const std::string& path, const Tensor& tensor) {
    if (byte_count(tensor.dtype, tensor.shape) != tensor.bytes.size()) {
        throw RequestError(fmt::format("{}: tensor {}: {} bytes: expected shape {} of {}", escaped(path, path.size()),
                                       in_quotes(tensor.name), tensor.bytes.size(), shape_text(tensor.shape),
                                       print_name(tensor.dtype)));
    }
    std::string shape;
    for (const std::int64_t extent : tensor.shape) shape += fmt::format("{}, ", extent);
    if (tensor.shape.size() > 1) shape.resize(shape.size() - 2);  // "(3, )" keeps its comma: "(3)" is no tuple
    std::string text =
        fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", descr_for(path, tensor), shape);
    constexpr std::size_t fixed = 10, alignment = 64;  // numpy.lib.format's ARRAY_ALIGN; the last byte is a newline
    text.append((alignment - (fixed + text.size() + 1) % alignment) % alignment, ' ');
    text += '\n';

    std::string start = "\x93NUMPY";
    start += {'\x01', '\x00', static_cast<char>(text.size() & 0xFF), static_cast<char>(text.size() >> 8)};
    PartialFile file(path);
    file.write(std::as_bytes(std::span(start)));
    file.write(std::as_bytes(std::span(text)));
    file.write(tensor.bytes);
    file.commit();
}

}  // namespace faultline
