// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/record_reader.hpp>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <set>

#include <fmt/format.h>
#include <hdf5_hl.h>

#include <faultline/base/error.hpp>
#include <faultline/record/h5.hpp>
#include <faultline/record/open_file.hpp>
#include <faultline/record/row_checksums.hpp>
#include <faultline/tensor/input.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

// Deflate cannot shrink by more (zlib, "Maximum Compression Factor"): a claim beyond it is false.
constexpr std::uint64_t most_expansion = 1032;
constexpr std::uint64_t unwritten_allowance = 1 << 20;  // bytes of fill values, for datasets made and not yet written

constexpr std::size_t longest_text = 1 << 28;  // bytes of fixed-size strings that are taken for text

using h5::Handle;

/// Strings of a dataset or attribute, given how to read it into memory.
template <class Read>
std::vector<std::string> strings(hid_t type, hid_t space, Read&& read) {
    const auto count = static_cast<std::size_t>(H5Sget_simple_extent_npoints(space));
    std::vector<std::string> out(count);
    if (count == 0) return out;
    if (H5Tis_variable_str(type) > 0) {
        const Handle memory = h5::string_type();
        H5Tset_cset(memory, H5Tget_cset(type));
        std::vector<char*> pointers(count, nullptr);
        if (read(memory, pointers.data()) < 0) return {};
        for (std::size_t i = 0; i < count; ++i) out[i] = pointers[i] != nullptr ? pointers[i] : "";
        H5Dvlen_reclaim(memory, space, H5P_DEFAULT, pointers.data());
        return out;
    }
    const std::size_t size = H5Tget_size(type);
    if (size > longest_text / count) return {};
    std::vector<char> buffer(count * size);
    if (read(type, buffer.data()) < 0) return {};
    for (std::size_t i = 0; i < count; ++i) {
        const std::string_view text(buffer.data() + i * size, size);
        out[i] = text.substr(0, std::min(text.find('\0'), size));
    }
    return out;
}

/// Dtype by HDF5 type; nothing for what a tensor cannot be.
std::optional<Dtype> dtype_of_type(hid_t type, const std::string& encoding) {
    const std::size_t size = H5Tget_size(type);
    if (H5Tget_class(type) == H5T_FLOAT) {
        if (size == 8) return Dtype::f64;
        if (size == 4) return Dtype::f32;
        return size == 2 && H5Tget_ebias(type) == 15 ? std::optional(Dtype::f16) : std::nullopt;
    }
    if (H5Tget_class(type) == H5T_ENUM && size == 1) return Dtype::boolean;  // how h5py stores numpy.bool
    if (H5Tget_class(type) != H5T_INTEGER) return std::nullopt;
    if (!encoding.empty()) {
        const auto encoded = dtype_from_print_name(encoding);
        return encoded && width(*encoded) == size ? encoded : std::nullopt;
    }
    const bool is_signed = H5Tget_sign(type) != H5T_SGN_NONE;
    switch (size) {
        case 1:
            return is_signed ? Dtype::i8 : Dtype::u8;
        case 2:
            return is_signed ? Dtype::i16 : Dtype::u16;
        case 4:
            return is_signed ? Dtype::i32 : Dtype::u32;
        case 8:
            return is_signed ? Dtype::i64 : Dtype::u64;
        default:
            return std::nullopt;
    }
}

struct Link {
    std::string name;
    std::int64_t order;  ///< of creation
    haddr_t address;
};

/// Hard links of a group, in order of creation; by name in files of others, which do not keep it. Sorted here: for any
/// order but its own, HDF5 1.10 makes a table of the links, and where the file is damaged it frees what it never filled.
std::optional<std::vector<Link>> links_of(hid_t group) {
    const Handle properties(H5Gget_create_plist(group), H5Pclose);
    unsigned kept = 0;
    const bool created = H5Pget_link_creation_order(properties, &kept) >= 0 && (kept & H5P_CRT_ORDER_INDEXED) != 0;
    std::vector<Link> links;
    const auto add = [](hid_t, const char* name, const H5L_info_t* info, void* to) -> herr_t {
        if (info->type == H5L_TYPE_HARD)
            static_cast<std::vector<Link>*>(to)->push_back({name, info->corder, info->u.address});
        return 0;
    };
    if (H5Literate(group, created ? H5_INDEX_CRT_ORDER : H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, add, &links) < 0)
        return std::nullopt;
    std::sort(links.begin(), links.end(), [created](const Link& a, const Link& b) {
        return created && a.order != b.order ? a.order < b.order : a.name < b.name;
    });
    return links;
}

/// Paths of the datasets of a group and below, to `out`; false where the group cannot be read.
bool walk(hid_t group, const std::string& prefix, int depth, std::set<haddr_t>& seen, std::vector<std::string>& out) {
    constexpr int deepest = 64;  // of nested groups, far beyond any file of ours; bounds the recursion
    const auto links = links_of(group);
    if (!links) return false;
    for (const Link& link : *links) {
        const Handle object(H5Oopen(group, link.name.c_str(), H5P_DEFAULT), H5Oclose);
        const std::string path = prefix + link.name;
        if (H5Iget_type(object) == H5I_GROUP) {  // hard links can form cycles
            const bool fresh = depth < deepest && seen.insert(link.address).second;
            if (fresh && !walk(object, path + "/", depth + 1, seen, out)) return false;
        } else if (H5Iget_type(object) == H5I_DATASET) {
            char scale[64] = "";
            const bool is_scale = H5DSis_scale(object) > 0 && H5DSget_scale_name(object, scale, sizeof scale) >= 0;
            if (!is_scale || !std::string_view(scale).starts_with("This is a netCDF dimension but not"))
                out.push_back(path);
        }
    }
    return true;
}

}  // namespace

struct RecordReader::State {
    std::string name;
    std::uint64_t file_size = 0;
    Handle file;
    std::map<haddr_t, std::string> scale_names;
    std::optional<h5::RowChecksums> checksums;  // read once they are needed; without series where the file has none

    /// To ask of its shape, wherever its data are.
    Handle open_unread(const std::string& path) const {
        Handle dataset(H5Dopen2(file, path.c_str(), H5P_DEFAULT), H5Dclose);
        if (!dataset.valid()) h5::fail_read(name, fmt::format("dataset {}", in_quotes(path)), "it in the file");
        return dataset;
    }

    Handle open(const std::string& path) const {
        Handle dataset = open_unread(path);
        const Handle properties(H5Dget_create_plist(dataset), H5Pclose);
        if (H5Pget_layout(properties) == H5D_VIRTUAL || H5Pget_external_count(properties) > 0) {
            throw RequestError(fmt::format("{}: dataset {}: keeps its data in another file: expected it in this one",
                                           name, in_quotes(path)));
        }
        return dataset;
    }

    /// Refuses an array that the bytes stored for it cannot fill, before memory is taken for it.
    void check_claim(hid_t dataset, const std::string& path, std::uint64_t bytes) const {
        const std::uint64_t stored = std::min<std::uint64_t>(H5Dget_storage_size(dataset), file_size);
        if (bytes / most_expansion <= stored && (stored > 0 || bytes <= unwritten_allowance)) return;
        throw RequestError(fmt::format("{}: dataset {}: claims {} bytes and stores {}: expected what the file can hold",
                                       name, in_quotes(path), bytes, stored));
    }

    /// Last part of an object's path. HDF5 searches the whole file for the name of what it reached by a reference, so each
    /// is asked for once.
    std::string scale_name(hid_t scale) {
        H5O_info_t info;
        if (H5Oget_info2(scale, &info, H5O_INFO_BASIC) < 0) return "";
        const auto [known, added] = scale_names.try_emplace(info.addr);
        if (!added) return known->second;
        std::string full(256, '\0');
        const ssize_t length = H5Iget_name(scale, full.data(), full.size());
        full.resize(static_cast<std::size_t>(std::clamp<ssize_t>(length, 0, 255)));
        return known->second = h5::split_path(full).second;
    }

    std::vector<std::int64_t> shape(hid_t dataset) const {
        const Handle space(H5Dget_space(dataset), H5Sclose);
        std::vector<hsize_t> extents(static_cast<std::size_t>(std::max(H5Sget_simple_extent_ndims(space), 0)));
        H5Sget_simple_extent_dims(space, extents.data(), nullptr);
        return {extents.begin(), extents.end()};
    }
};

RecordReader::RecordReader(const std::string& path) : state_(std::make_unique<State>()) {
    h5::silence();
    const FileInput in(path);  // its sentences for a file that is missing or not regular
    state_->name = in.name();
    state_->file_size = in.size();
    state_->file = h5::open_for_reading(path);
}

RecordReader::RecordReader(RecordReader&&) noexcept = default;
RecordReader& RecordReader::operator=(RecordReader&&) noexcept = default;
RecordReader::~RecordReader() = default;

const std::string& RecordReader::name() const { return state_->name; }

std::vector<std::string> RecordReader::datasets() const {
    h5::silence();
    std::vector<std::string> out;
    std::set<haddr_t> seen;
    const Handle root(H5Gopen2(state_->file, "/", H5P_DEFAULT), H5Gclose);
    if (!walk(root, "", 0, seen, out)) h5::fail_read(state_->name, "the list of datasets", "a whole HDF5 file");
    return out;
}

bool RecordReader::contains(const std::string& path) const {
    h5::silence();
    for (std::size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1)) {
        if (H5Lexists(state_->file, path.substr(0, slash).c_str(), H5P_DEFAULT) <= 0) return false;
    }
    return H5Lexists(state_->file, path.c_str(), H5P_DEFAULT) > 0;
}

Tensor RecordReader::read(const std::string& path) const {
    h5::silence();
    const Handle dataset = state_->open(path);
    const Handle type(H5Dget_type(dataset), H5Tclose);
    const auto dtype = dtype_of_type(type, attribute(path, "encoding").value_or(""));
    if (!dtype)
        throw RequestError(fmt::format("{}: dataset {}: is of a type that a tensor cannot have: expected numbers",
                                       state_->name, in_quotes(path)));
    Tensor tensor{path, *dtype, state_->shape(dataset), {}};
    const auto bytes = byte_count(*dtype, tensor.shape);
    if (!bytes)
        throw RequestError(fmt::format("{}: dataset {}: shape {} has too many elements: expected fewer than 2^63 bytes",
                                       state_->name, in_quotes(path), shape_text(tensor.shape)));
    state_->check_claim(dataset, path, *bytes);
    tensor.bytes.resize(static_cast<std::size_t>(*bytes));
    const Handle memory = H5Tget_class(type) == H5T_ENUM ? Handle(H5Tcopy(type), H5Tclose) : h5::type_of(*dtype);
    if (*bytes > 0 && H5Dread(dataset, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, tensor.bytes.data()) < 0) {
        h5::fail_read(state_->name, fmt::format("dataset {}", in_quotes(path)), "a whole HDF5 file");
    }
    if (!tensor.shape.empty() && tensor.shape[0] > 0)
        expect_intact(path, 0, tensor.bytes, tensor.bytes.size() / static_cast<std::size_t>(tensor.shape[0]));
    return tensor;
}

void RecordReader::expect_intact(const std::string& path, std::int64_t first, std::span<const std::byte> rows,
                                 std::size_t row_bytes) const {
    if (!path.starts_with("steps/") || path == h5::checksum_path) return;
    if (!state_->checksums) {
        h5::RowChecksums known;
        if (contains(h5::checksum_path) && contains("steps/step")) {
            // The number of steps first: where the file grows, the rows of all that have a number are there.
            const std::vector<std::int64_t> steps = state_->shape(state_->open("steps/step"));
            const Tensor sums = read(h5::checksum_path);
            known.series = texts(h5::checksum_path, h5::checksum_series);
            if (sums.dtype != Dtype::u32 || sums.shape.size() != 2 || steps.size() != 1 || known.series.empty() ||
                sums.shape[1] != static_cast<std::int64_t>(known.series.size()))
                throw RequestError(fmt::format("{}: dataset {}: is {} {}: expected uint32 over (step, {} series)",
                                               state_->name, in_quotes(h5::checksum_path), print_name(sums.dtype),
                                               shape_text(sums.shape), known.series.size()));
            known.steps = std::min(steps[0], sums.shape[0]);
            known.values.resize(sums.bytes.size() / sizeof(std::uint32_t));
            std::memcpy(known.values.data(), sums.bytes.data(), sums.bytes.size());
        }
        state_->checksums = std::move(known);
    }
    state_->checksums->expect(path, first, rows, row_bytes, state_->name);
}

std::vector<std::string> RecordReader::read_strings(const std::string& path) const {
    h5::silence();
    const Handle dataset = state_->open(path);
    const Handle type(H5Dget_type(dataset), H5Tclose);
    if (H5Tget_class(type) != H5T_STRING) {
        throw RequestError(fmt::format("{}: dataset {}: is not text: expected strings", state_->name, in_quotes(path)));
    }
    const auto shape = state_->shape(dataset);
    state_->check_claim(dataset, path, byte_count(Dtype::u8, shape).value_or(~0ull) * H5Tget_size(type));
    const Handle space(H5Dget_space(dataset), H5Sclose);
    return strings(type, space,
                   [&](hid_t memory, void* to) { return H5Dread(dataset, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, to); });
}

std::vector<Axis> RecordReader::axes(const std::string& path) const {
    h5::silence();
    const Handle dataset = state_->open_unread(path);
    std::vector<Axis> out;
    for (const std::int64_t extent : state_->shape(dataset)) out.push_back({"", extent});
    if (H5DSis_scale(dataset) > 0 && out.size() == 1) {  // coordinates are their own dimension
        out[0].name = h5::split_path(path).second;
        return out;
    }
    struct Found {
        State* state;
        std::string name;
    };
    for (unsigned i = 0; i < out.size(); ++i) {
        Found found{state_.get(), ""};
        H5DSiterate_scales(
            dataset, i, nullptr,
            [](hid_t, unsigned, hid_t scale, void* to) -> herr_t {
                auto& into = *static_cast<Found*>(to);
                into.name = into.state->scale_name(scale);
                return 1;
            },
            &found);
        out[i].name = found.name;
    }
    return out;
}

std::vector<std::string> RecordReader::attributes(const std::string& object) const {
    h5::silence();
    const Handle from(H5Oopen(state_->file, object.empty() ? "/" : object.c_str(), H5P_DEFAULT), H5Oclose);
    std::vector<std::string> out;
    H5Aiterate2(
        from, H5_INDEX_NAME, H5_ITER_NATIVE, nullptr,
        [](hid_t, const char* name, const H5A_info_t*, void* to) -> herr_t {
            static_cast<std::vector<std::string>*>(to)->emplace_back(name);
            return 0;
        },
        &out);
    std::sort(out.begin(), out.end());
    return out;
}

std::optional<std::string> RecordReader::attribute(const std::string& object, const std::string& name) const {
    h5::silence();
    const Handle from(H5Oopen(state_->file, object.empty() ? "/" : object.c_str(), H5P_DEFAULT), H5Oclose);
    if (!from.valid() || !h5::has_attribute(from, name.c_str())) return std::nullopt;
    const Handle attribute(H5Aopen(from, name.c_str(), H5P_DEFAULT), H5Aclose);
    const Handle type(H5Aget_type(attribute), H5Tclose), space(H5Aget_space(attribute), H5Sclose);
    if (H5Sget_simple_extent_npoints(space) != 1) return std::nullopt;
    if (H5Tget_class(type) == H5T_STRING) {
        const auto text = strings(type, space, [&](hid_t memory, void* to) { return H5Aread(attribute, memory, to); });
        return text.empty() ? std::nullopt : std::optional(text.front());
    }
    if (H5Tget_class(type) == H5T_FLOAT) {
        double value = 0;
        return H5Aread(attribute, H5T_NATIVE_DOUBLE, &value) < 0 ? std::nullopt
                                                                 : std::optional(fmt::format("{}", value));
    }
    if (H5Tget_class(type) != H5T_INTEGER) return std::nullopt;
    if (H5Tget_sign(type) == H5T_SGN_NONE) {
        std::uint64_t value = 0;
        return H5Aread(attribute, H5T_NATIVE_UINT64, &value) < 0 ? std::nullopt
                                                                 : std::optional(fmt::format("{}", value));
    }
    std::int64_t value = 0;
    return H5Aread(attribute, H5T_NATIVE_INT64, &value) < 0 ? std::nullopt : std::optional(fmt::format("{}", value));
}

std::vector<std::string> RecordReader::texts(const std::string& object, const std::string& name) const {
    h5::silence();
    const Handle from(H5Oopen(state_->file, object.empty() ? "/" : object.c_str(), H5P_DEFAULT), H5Oclose);
    if (!from.valid() || !h5::has_attribute(from, name.c_str())) return {};
    const Handle attribute(H5Aopen(from, name.c_str(), H5P_DEFAULT), H5Aclose);
    const Handle type(H5Aget_type(attribute), H5Tclose), space(H5Aget_space(attribute), H5Sclose);
    constexpr hssize_t most = 1 << 20;  // far beyond any list of inputs; a damaged file may claim anything
    if (H5Tget_class(type) != H5T_STRING || H5Sget_simple_extent_npoints(space) > most) return {};
    return strings(type, space, [&](hid_t memory, void* to) { return H5Aread(attribute, memory, to); });
}

Manifest RecordReader::manifest() const {
    const auto text = [&](const char* name) { return attribute("", name).value_or(""); };
    Manifest out;
    out.kind = text("kind");
    out.schema = text("schema");
    const std::string version = text("schema_version"), seed = text("seed");
    const auto refuse = [&](const char* field, const std::string& found, const std::string& expected) {
        throw RequestError(fmt::format("{}: attribute {}: {}: expected {}", state_->name, field,
                                       found.empty() ? "is missing" : in_quotes(found), expected));
    };
    // HDF5 of others has no kind, or is a capture without more.
    const bool of_others = out.schema.empty() && (out.kind.empty() || out.kind == "capture");
    if (!of_others && (!out.kind.empty() || out.schema.starts_with("faultline."))) {
        if (out.schema != "faultline." + out.kind) refuse("schema", out.schema, in_quotes("faultline." + out.kind));
        const auto [end, error] = std::from_chars(version.data(), version.data() + version.size(), out.schema_version);
        const bool whole = error == std::errc() && end == version.data() + version.size();
        if (!whole || out.schema_version < 1 || out.schema_version > newest_schema_version)
            refuse("schema_version", version,
                   fmt::format("{}{}", newest_schema_version,
                               whole && out.schema_version > 1 ? " (a newer faultline wrote it)" : ""));
    }
    std::from_chars(seed.data(), seed.data() + seed.size(), out.seed);
    out.created_utc = text("created_utc");
    out.command_line = text("command_line");
    out.config_toml = text("config_toml");
    out.git_commit = text("git_commit");
    out.build = text("build");
    out.cpu = text("cpu");
    out.gpu = text("gpu");
    const std::string ranks = text("ranks");
    std::from_chars(ranks.data(), ranks.data() + ranks.size(), out.ranks);
    out.reductions = text("reductions");
    const auto paths = texts("", "inputs"), hashes = texts("", "input_hashes");
    for (std::size_t i = 0; i < std::min(paths.size(), hashes.size()); ++i) out.inputs.push_back({paths[i], hashes[i]});
    return out;
}

}  // namespace faultline
