// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/dtype.hpp>

#include <array>

namespace faultline {
namespace {

struct Row {
    std::size_t width;
    std::string_view print;
    std::string_view safetensors;
};

// In the order of the enumeration.
constexpr std::array<Row, dtype_count> table{{{8, "float64", "F64"},
                                              {4, "float32", "F32"},
                                              {2, "float16", "F16"},
                                              {2, "bfloat16", "BF16"},
                                              {1, "float8_e5m2", "F8_E5M2"},
                                              {1, "float8_e4m3fn", "F8_E4M3"},
                                              {8, "int64", "I64"},
                                              {4, "int32", "I32"},
                                              {2, "int16", "I16"},
                                              {1, "int8", "I8"},
                                              {1, "uint8", "U8"},
                                              {2, "uint16", "U16"},
                                              {4, "uint32", "U32"},
                                              {8, "uint64", "U64"},
                                              {1, "bool", "BOOL"}}};

const Row& row(Dtype dtype) { return table.at(static_cast<std::size_t>(dtype)); }

std::optional<Dtype> find(std::string_view name, std::string_view Row::*column) {
    for (std::size_t i = 0; i < table.size(); ++i) {
        if (table[i].*column == name) return static_cast<Dtype>(i);
    }
    return std::nullopt;
}

}  // namespace

std::size_t width(Dtype dtype) { return row(dtype).width; }
std::string_view print_name(Dtype dtype) { return row(dtype).print; }
std::string_view safetensors_name(Dtype dtype) { return row(dtype).safetensors; }
std::optional<Dtype> dtype_from_safetensors(std::string_view name) {
    if (name == "F8_E8M0") return Dtype::u8;
    return find(name, &Row::safetensors);
}
std::optional<Dtype> dtype_from_print_name(std::string_view name) { return find(name, &Row::print); }

std::string known_safetensors_names() {
    std::string names;
    for (const Row& r : table) {
        if (!names.empty()) names += ", ";
        names += r.safetensors;
    }
    return names;
}

}  // namespace faultline
