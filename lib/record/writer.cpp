// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/writer.hpp>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/record/deflate.hpp>
#include <faultline/record/root.hpp>
#include <faultline/tensor/tensor.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::h5 {
namespace {

constexpr std::size_t compressed_from = 64 << 10;  // bytes; below, chunking costs more than it saves

std::string dataset(const std::string& path) { return fmt::format("dataset {}", in_quotes(path)); }

void expect_count(const Writer& out, const std::string& path, Dtype dtype, std::size_t bytes,
                  std::span<const std::int64_t> shape) {
    if (byte_count(dtype, shape) == bytes) return;
    throw WorkError(fmt::format("{}: {}: {} values: expected as many as shape {} has", out.name, dataset(path),
                                bytes / width(dtype), shape_text(shape)));
}

}  // namespace

Writer Writer::create(const std::string& path, const std::string& name, const Manifest& manifest,
                      const Storage& storage) {
    Writer out{name, storage, create_file(path, name)};
    write_manifest(out.file, manifest, name);
    return out;
}

Handle Writer::create_dataset(const std::string& path, hid_t type, hid_t space, hid_t properties) const {
    const auto [group, leaf] = split_path(path);
    const Handle parent = require_group(file, group, name);
    if (leaf.empty() || H5Lexists(parent, leaf.c_str(), H5P_DEFAULT) > 0) {
        throw WorkError(fmt::format("{}: {}: is there already: expected to write it once", name, dataset(path)));
    }
    return {
        wrote(H5Dcreate2(parent, leaf.c_str(), type, space, H5P_DEFAULT, properties, H5P_DEFAULT), name, dataset(path)),
        H5Dclose};
}

Handle Writer::write(const std::string& path, Dtype dtype, std::span<const std::byte> bytes,
                     std::span<const std::int64_t> shape) const {
    expect_count(*this, path, dtype, bytes.size(), shape);
    const Handle type = type_of(dtype);
    const Handle properties = dataset_properties();
    const bool deflated = storage.compression != Storage::Compression::never && !shape.empty() &&
                          bytes.size() >= compressed_from &&
                          (storage.compression == Storage::Compression::always || worth_deflating(bytes, width(dtype)));
    const auto chunk = chunk_shape(shape, width(dtype));
    if (deflated) {
        const std::vector<hsize_t> extents(chunk.begin(), chunk.end());
        H5Pset_chunk(properties, static_cast<int>(extents.size()), extents.data());
        H5Pset_shuffle(properties);
        H5Pset_deflate(properties, static_cast<unsigned>(storage.level));
    }
    Handle out = create_dataset(path, type, space_of(shape), properties);
    if (deflated) {
        write_deflated(out, bytes, shape, chunk, width(dtype), storage.level, storage.threads, name, dataset(path));
    } else if (!bytes.empty() && H5Dwrite(out, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()) < 0) {
        fail_write(name, dataset(path));
    }
    if (!encoding_of(dtype).empty()) write_attribute(out, "encoding", std::string(encoding_of(dtype)), name);
    return out;
}

Handle Writer::write_strings(const std::string& path, std::span<const std::string> values,
                             std::span<const std::int64_t> shape) const {
    expect_count(*this, path, Dtype::u8, values.size(), shape);
    const Handle type = string_type();
    const auto pointers = c_strings(values, name, dataset(path));
    Handle out = create_dataset(path, type, space_of(shape), dataset_properties());
    if (!values.empty() && H5Dwrite(out, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, pointers.data()) < 0)
        fail_write(name, dataset(path));
    return out;
}

void Writer::coordinate(const std::string& path, Dtype dtype, std::span<const std::byte> bytes,
                        const About& about) const {
    const auto count = static_cast<std::int64_t>(bytes.size() / width(dtype));
    const Handle values = write(path, dtype, bytes, std::span(&count, 1));
    make_scale(values, split_path(path).second, name);
    describe(values, about, name);
}

void Writer::coordinate(const std::string& path, std::span<const std::string> labels, const About& about) const {
    const auto count = static_cast<std::int64_t>(labels.size());
    const Handle values = write_strings(path, labels, std::span(&count, 1));
    make_scale(values, split_path(path).second, name);
    describe(values, {about.long_name, ""}, name);  // text has no units
}

Handle Writer::open(const std::string& object, const std::string& attribute) const {
    return {wrote(H5Oopen(file, object.empty() ? "/" : object.c_str(), H5P_DEFAULT), name,
                  fmt::format("attribute {} of {}", in_quotes(attribute), in_quotes(object))),
            H5Oclose};
}

}  // namespace faultline::h5
