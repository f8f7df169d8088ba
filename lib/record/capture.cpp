// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/capture.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <string_view>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/record/record_file.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/record/rehearsal.hpp>
#include <faultline/tensor/input.hpp>
#include <faultline/tensor/npy.hpp>
#include <faultline/tensor/safetensors.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

constexpr std::string_view metadata_prefix = "metadata.";  // keeps a capture's "seed" apart from the manifest's
constexpr std::array<std::string_view, 13> manifest_names{
    "schema", "schema_version", "kind",   "created_utc", "command_line", "config_toml", "git_commit", "build", "cpu",
    "gpu",    "seed",           "inputs", "input_hashes"};
constexpr std::string_view hdf5_magic("\x89HDF\r\n\x1a\n", 8);
constexpr std::string_view npy_magic = "\x93NUMPY";

enum class Kind { safetensors, npy, hdf5, unknown };

Kind kind_of(const std::string& path) {
    const std::string extension = std::filesystem::path(path).extension().string();
    if (extension == ".safetensors") return Kind::safetensors;
    if (extension == ".npy") return Kind::npy;
    if (extension == ".h5" || extension == ".hdf5") return Kind::hdf5;
    const FileInput in(path);
    std::array<char, 9> start{};
    in.read(0, std::as_writable_bytes(std::span(start))
                   .first(static_cast<std::size_t>(std::min<std::uint64_t>(in.size(), 9))));
    const std::string_view text(start.data(), start.size());
    if (text.starts_with(hdf5_magic)) return Kind::hdf5;
    if (text.starts_with(npy_magic)) return Kind::npy;
    return text[8] == '{' ? Kind::safetensors : Kind::unknown;
}

/// Names for the dimensions, unique by length: HDF5 shares a dimension among the datasets of a group.
class AxisNames {
  public:
    std::vector<Axis> of(const std::vector<std::int64_t>& shape, const TensorSet& set) {
        constexpr std::array<std::string_view, 4> names{"batch", "head", "seq", "head_dim"};
        std::vector<Axis> axes;
        for (std::size_t d = 0; d < shape.size(); ++d) {
            const bool attention = shape.size() == 3 || shape.size() == 4;
            std::string name = attention ? std::string(names[d]) : fmt::format("dim{}", d);
            const auto [known, added] = sizes_.try_emplace(name, shape[d]);
            if (known->second != shape[d]) name += fmt::format("_{}", shape[d]);
            while (set.tensors.contains(name)) name += "_axis";
            axes.push_back({name, shape[d]});
        }
        return axes;
    }

  private:
    std::map<std::string, std::int64_t> sizes_;
};

void check_name(const std::string& file, const std::string& name) {
    const std::string walled = "/" + name + "/";
    const bool plain = !name.empty() && walled.find("//") == std::string::npos &&
                       walled.find("/./") == std::string::npos && name.find('\0') == std::string::npos;
    if (!plain)
        throw RequestError(fmt::format("{}: tensor {}: expected a name that HDF5 can hold", file, in_quotes(name)));
}

}  // namespace

TensorSet read_hdf5_capture(const std::string& path) {
    rehearse_reading(path, Rehearsal::values);
    const RecordReader reader(path);
    const std::string kind = reader.manifest().kind;
    if (!kind.empty() && kind != "capture") {
        throw RequestError(fmt::format("{}: kind is {}: expected \"capture\"", reader.name(), in_quotes(kind)));
    }
    TensorSet set{reader.name(), {}, {}};
    for (const std::string& name : reader.datasets()) set.add(reader.read(name));
    for (const std::string& name : reader.attributes("")) {
        if (std::find(manifest_names.begin(), manifest_names.end(), name) != manifest_names.end()) continue;
        const auto value = reader.attribute("", name);
        const bool prefixed = std::string_view(name).starts_with(metadata_prefix);
        const std::string key = prefixed ? name.substr(metadata_prefix.size()) : name;
        // What changes the function must not be passed over.
        if (!value && (key == "causal" || key == "scale" || key == "softcap" || key == "keep"))
            throw RequestError(fmt::format("{}: attribute \"{}\": is neither text nor one number: expected {}", path,
                                           name, key == "causal" ? "the text true or false" : "one number"));
        if (value) set.metadata[key] = *value;
    }
    return set;
}

void write_hdf5_capture(const std::string& path, const TensorSet& set, Manifest manifest) {
    manifest.kind = "capture";
    manifest.schema = "faultline.capture";
    for (const auto& [name, tensor] : set.tensors) check_name(escaped(path, path.size()), name);
    RecordFile file = RecordFile::create(path, manifest);
    AxisNames names;
    for (const auto& [name, tensor] : set.tensors) {
        file.write_bytes(name, tensor.dtype, tensor.bytes, names.of(tensor.shape, set), {name, "1"});
    }
    for (const auto& [key, value] : set.metadata) file.attribute("", std::string(metadata_prefix) + key, value);
    file.commit();
}

TensorSet read_tensors(const std::string& path) {
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) return read_npy_folder(path);
    switch (kind_of(path)) {
        case Kind::safetensors:
            return read_safetensors(path);
        case Kind::npy:
            return read_npy(path);
        case Kind::hdf5:
            return read_hdf5_capture(path);
        case Kind::unknown:
            break;
    }
    throw RequestError(fmt::format(
        "{}: is of no format that we read: expected safetensors, .npy, a folder of .npy files, or an HDF5 capture",
        escaped(path, path.size())));
}

}  // namespace faultline
