// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/safetensors.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <faultline/base/error.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using nlohmann::json;

constexpr std::uint64_t prefix = 8;                  // the u64 before the header
constexpr std::uint64_t longest_header = 100000000;  // the reference reader's MAX_HEADER_SIZE
constexpr int deepest = 3;                           // file -> tensor -> shape -> numbers
constexpr std::size_t most_dimensions = 64;          // numpy 2's and PyTorch's limit
constexpr const char* metadata_key = "__metadata__";

[[noreturn]] void refuse(const Input& in, const std::string& field, const std::string& found,
                         const std::string& expected) {
    throw RequestError(fmt::format("{}: {}: {}: expected {}", in.name(), field, found, expected));
}

/// The header as JSON. nlohmann's parser keeps the last of two equal keys, where this format has an error; and it would
/// build any depth, where this format has three.
json parse_header(const Input& in, const std::string& text) {
    std::vector<std::set<std::string, std::less<>>> keys;
    const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
        if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
            if (depth >= deepest)
                refuse(in, "header", "is nested deeper than any tensor's entry", "three levels at most");
            keys.emplace_back();
        } else if (event == json::parse_event_t::object_end || event == json::parse_event_t::array_end) {
            keys.pop_back();
        } else if (event == json::parse_event_t::key) {
            const auto& key = parsed.get_ref<const std::string&>();
            if (!keys.back().insert(key).second) {
                if (keys.size() == 1 && key != metadata_key) {
                    refuse(in, fmt::format("tensor {}", in_quotes(key)), "occurs twice", "every name once");
                }
                refuse(in, "header", fmt::format("key {} occurs twice", in_quotes(key)), "every key once");
            }
        }
        return true;
    };
    json header;
    try {
        header = json::parse(text, watch);
    } catch (const json::exception& error) {
        const auto* parse_error = dynamic_cast<const json::parse_error*>(&error);
        refuse(in, "header", fmt::format("is not JSON (at byte {})", parse_error != nullptr ? parse_error->byte : 0),
               "a JSON object in UTF-8");
    }
    if (!header.is_object()) refuse(in, "header", fmt::format("is a JSON {}", header.type_name()), "a JSON object");
    return header;
}

std::string read_header_text(const Input& in) {
    if (in.size() < prefix) {
        refuse(in, "header length", fmt::format("the file has {} bytes", in.size()), "at least 8, a safetensors file");
    }
    std::array<std::byte, prefix> bytes{};
    in.read(0, bytes);
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), prefix);
    if (length > in.size() - prefix) {
        refuse(in, "header length", fmt::format("{} bytes", length),
               fmt::format("at most the {} bytes that follow it in the file", in.size() - prefix));
    }
    if (length > longest_header) {
        refuse(in, "header length", fmt::format("{} bytes", length), fmt::format("at most {}", longest_header));
    }
    std::string text(static_cast<std::size_t>(length), '\0');
    in.read(prefix, std::as_writable_bytes(std::span(text)));
    if (text.empty() || text.front() != '{') {
        refuse(in, "header", text.empty() ? "is empty" : fmt::format("begins with {}", in_quotes(text.substr(0, 1))),
               "a JSON object, \"{\" its first byte");
    }
    return text;
}

const json& member(const Input& in, const std::string& field, const json& entry, const char* key) {
    const auto found = entry.find(key);
    if (found == entry.end()) refuse(in, field, fmt::format("{} is missing", key), "dtype, shape and data_offsets");
    return *found;
}

Dtype parse_dtype(const Input& in, const std::string& field, const json& value) {
    if (!value.is_string()) refuse(in, field, fmt::format("dtype is a JSON {}", value.type_name()), "a string");
    const auto& name = value.get_ref<const std::string&>();
    const auto dtype = dtype_from_safetensors(name);
    if (!dtype)
        refuse(in, field, fmt::format("dtype {} is unknown", in_quotes(name)), "one of " + known_safetensors_names());
    return *dtype;
}

std::vector<std::int64_t> parse_shape(const Input& in, const std::string& field, const json& value) {
    if (!value.is_array() || value.size() > most_dimensions) {
        refuse(in, field,
               value.is_array() ? fmt::format("shape has {} dimensions", value.size())
                                : fmt::format("shape is a JSON {}", value.type_name()),
               fmt::format("an array of at most {} dimensions", most_dimensions));
    }
    std::vector<std::int64_t> shape;
    for (const json& extent : value) {
        constexpr std::uint64_t largest = std::numeric_limits<std::int64_t>::max();
        if (!extent.is_number_unsigned() || extent.get<std::uint64_t>() > largest) {
            refuse(in, field, fmt::format("shape holds {}", escaped(extent.dump(), 40)),
                   "non-negative integers below 2^63");
        }
        shape.push_back(static_cast<std::int64_t>(extent.get<std::uint64_t>()));
    }
    return shape;
}

SafetensorsEntry parse_entry(const Input& in, const std::string& name, const json& entry, std::uint64_t data_start) {
    const std::string field = fmt::format("tensor {}", in_quotes(name));
    if (!entry.is_object()) refuse(in, field, fmt::format("is a JSON {}", entry.type_name()), "an object");
    SafetensorsEntry out;
    out.name = name;
    out.dtype = parse_dtype(in, field, member(in, field, entry, "dtype"));
    out.shape = parse_shape(in, field, member(in, field, entry, "shape"));
    const json& offsets = member(in, field, entry, "data_offsets");
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned()) {
        refuse(in, field, "data_offsets is not [begin, end]", "two non-negative integers");
    }
    const auto begin = offsets[0].get<std::uint64_t>();
    const auto end = offsets[1].get<std::uint64_t>();
    const std::uint64_t available = in.size() - data_start;
    if (begin > end || end > available) {
        refuse(in, field, fmt::format("data_offsets [{}, {}]", begin, end),
               fmt::format("begin <= end <= {}, the bytes after the header", available));
    }
    const auto bytes = byte_count(out.dtype, out.shape);
    if (!bytes) {
        refuse(in, field, fmt::format("shape {} has too many elements", shape_text(out.shape)),
               "fewer than 2^63 bytes");
    }
    if (*bytes != end - begin) {
        refuse(in, field, fmt::format("data_offsets span {} bytes", end - begin),
               fmt::format("{} for shape {} of {}", *bytes, shape_text(out.shape), safetensors_name(out.dtype)));
    }
    out.begin = data_start + begin;
    out.end = data_start + end;
    return out;
}

/// Each tensor begins where the one before ends, the first where the header ends, and the last ends with the file.
void check_coverage(const Input& in, const std::vector<SafetensorsEntry>& entries, std::uint64_t data_start) {
    std::uint64_t at = data_start;
    for (const SafetensorsEntry& entry : entries) {
        if (entry.begin != at) {
            refuse(in, fmt::format("tensor {}", in_quotes(entry.name)),
                   fmt::format("data_offsets begin at {}, {}", entry.begin - data_start,
                               entry.begin < at ? "inside the tensor before it" : "which leaves a hole"),
                   fmt::format("{}, where the tensor before it ends", at - data_start));
        }
        at = entry.end;
    }
    if (at != in.size()) {
        refuse(in, "data", fmt::format("{} bytes after the last tensor", in.size() - at), "none");
    }
}

}  // namespace

SafetensorsLayout read_safetensors_layout(const Input& in) {
    const std::string text = read_header_text(in);
    const std::uint64_t data_start = prefix + text.size();
    const json header = parse_header(in, text);
    SafetensorsLayout layout;
    for (const auto& [name, entry] : header.items()) {
        if (name != metadata_key) {
            layout.entries.push_back(parse_entry(in, name, entry, data_start));
            continue;
        }
        if (!entry.is_object())
            refuse(in, metadata_key, fmt::format("is a JSON {}", entry.type_name()), "an object of strings");
        for (const auto& [key, value] : entry.items()) {
            if (!value.is_string()) {
                refuse(in, fmt::format("{} {}", metadata_key, in_quotes(key)),
                       fmt::format("is a JSON {}", value.type_name()), "a string");
            }
            layout.metadata.emplace(key, value.get_ref<const std::string&>());
        }
    }
    // Name breaks ties, so that empty tensors at the same offset have one order.
    std::sort(layout.entries.begin(), layout.entries.end(), [](const auto& a, const auto& b) {
        return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    check_coverage(in, layout.entries, data_start);
    return layout;
}

Tensor read_safetensors_tensor(const Input& in, const SafetensorsEntry& entry) {
    Tensor tensor{entry.name, entry.dtype, entry.shape, {}};
    tensor.bytes.resize(static_cast<std::size_t>(entry.end - entry.begin));
    in.read(entry.begin, tensor.bytes);
    return tensor;
}

TensorSet read_safetensors(const Input& in) {
    SafetensorsLayout layout = read_safetensors_layout(in);
    TensorSet set{in.name(), {}, std::move(layout.metadata)};
    for (const SafetensorsEntry& entry : layout.entries) set.add(read_safetensors_tensor(in, entry));
    return set;
}

TensorSet read_safetensors(const std::string& path) { return read_safetensors(FileInput(path)); }

void write_safetensors(const std::string& path, const TensorSet& set) {
    json header = json::object();
    if (!set.metadata.empty()) header[metadata_key] = set.metadata;
    std::uint64_t offset = 0;
    for (const auto& [name, tensor] : set.tensors) {
        if (name == metadata_key) {
            throw RequestError(fmt::format("{}: tensor {}: expected another name, this one holds the metadata",
                                           escaped(path, path.size()), in_quotes(name)));
        }
        if (byte_count(tensor.dtype, tensor.shape) != tensor.bytes.size()) {
            throw RequestError(fmt::format("{}: tensor {}: {} bytes: expected shape {} of {}",
                                           escaped(path, path.size()), in_quotes(name), tensor.bytes.size(),
                                           shape_text(tensor.shape), print_name(tensor.dtype)));
        }
        header[name] = {{"dtype", std::string(safetensors_name(tensor.dtype))},
                        {"shape", tensor.shape},
                        {"data_offsets", {offset, offset + tensor.bytes.size()}}};
        offset += tensor.bytes.size();
    }
    std::string text;
    try {
        text = header.dump();
    } catch (const json::exception&) {  // dump() refuses text that is not UTF-8
        throw RequestError(
            fmt::format("{}: a tensor's name or the metadata is not UTF-8: expected UTF-8, as safetensors does",
                        escaped(path, path.size())));
    }
    text.resize((text.size() + 7) / 8 * 8, ' ');  // the format's padding; the data starts 8-byte aligned
    const std::uint64_t length = text.size();

    PartialFile file(path);
    file.write(std::as_bytes(std::span(&length, 1)));
    file.write(std::as_bytes(std::span(text)));
    for (const auto& [name, tensor] : set.tensors) file.write(tensor.bytes);
    file.commit();
}

}  // namespace faultline
