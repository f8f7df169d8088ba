// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/h5.hpp>

#include <algorithm>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::h5 {
namespace {

/// Called from the innermost error outwards.
herr_t collect(unsigned, const H5E_error2_t* error, void* out) {
    static_cast<std::vector<std::string>*>(out)->emplace_back(error->desc != nullptr ? error->desc : "");
    return 0;
}

}  // namespace

void silence() {
    // Per thread: Debian's HDF5 is built thread-safe and keeps one error stack, and one printer, for each.
    static const bool no_exit_handler = H5dont_atexit() >= 0;  // must be HDF5's first call
    (void)no_exit_handler;
    thread_local const bool done = H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0;
    (void)done;
}

std::string reason() {
    std::vector<std::string> lines;
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, collect, &lines);
    for (const std::string& line : lines) {
        constexpr std::string_view before = "error message = '";
        const std::size_t at = line.find(before);
        if (at == std::string::npos) continue;
        const std::string message =
            line.substr(at + before.size(), line.find('\'', at + before.size()) - at - before.size());
        const bool lock = line.find("lock") != std::string::npos;
        return lock ? "it is locked by another process: " + message : message;
    }
    return lines.empty() ? "HDF5 gives no reason" : escaped(lines.front());
}

void fail_write(const std::string& file, const std::string& what) {
    throw WorkError(
        fmt::format("{}: cannot write {} ({}): expected a writable folder with room for it", file, what, reason()));
}

void fail_read(const std::string& file, const std::string& what, const std::string& expected) {
    throw RequestError(fmt::format("{}: {} cannot be read ({}): expected {}", file, what, reason(), expected));
}

Handle type_of(Dtype dtype) {
    const auto copy = [](hid_t type) { return Handle(H5Tcopy(type), H5Tclose); };
    switch (dtype) {
        case Dtype::f64:
            return copy(H5T_IEEE_F64LE);
        case Dtype::f32:
            return copy(H5T_IEEE_F32LE);
        case Dtype::f16: {
            // IEEE binary16, as h5py makes it for numpy.float16: the fields first, then the smaller size.
            Handle half = copy(H5T_IEEE_F32LE);
            H5Tset_fields(half, 15, 10, 5, 0, 10);
            H5Tset_size(half, 2);
            H5Tset_ebias(half, 15);
            return half;
        }
        case Dtype::bf16:
        case Dtype::u16:
            return copy(H5T_STD_U16LE);
        case Dtype::e5m2:
        case Dtype::e4m3:
        case Dtype::boolean:
        case Dtype::u8:
            return copy(H5T_STD_U8LE);
        case Dtype::i64:
            return copy(H5T_STD_I64LE);
        case Dtype::i32:
            return copy(H5T_STD_I32LE);
        case Dtype::i16:
            return copy(H5T_STD_I16LE);
        case Dtype::i8:
            return copy(H5T_STD_I8LE);
        case Dtype::u32:
            return copy(H5T_STD_U32LE);
        case Dtype::u64:
            return copy(H5T_STD_U64LE);
    }
    return {};
}

std::string_view encoding_of(Dtype dtype) {
    const bool disguised =
        dtype == Dtype::bf16 || dtype == Dtype::e5m2 || dtype == Dtype::e4m3 || dtype == Dtype::boolean;
    return disguised ? print_name(dtype) : std::string_view();
}

Handle string_type() {
    Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
    H5Tset_size(type, H5T_VARIABLE);
    H5Tset_cset(type, H5T_CSET_UTF8);
    return type;
}

bool has_attribute(hid_t object, const char* name) { return H5Aexists(object, name) > 0; }

void write_attribute(hid_t object, const std::string& name, hid_t type, const void* value, const std::string& file) {
    const std::string what = fmt::format("attribute {}", in_quotes(name));
    const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
    if (has_attribute(object, name.c_str())) H5Adelete(object, name.c_str());
    const Handle attribute(wrote(H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT), file, what),
                           H5Aclose);
    if (H5Awrite(attribute, type, value) < 0) fail_write(file, what);
}

void write_attribute(hid_t object, const std::string& name, const std::string& value, const std::string& file) {
    const auto pointers = c_strings(std::span(&value, 1), file, fmt::format("attribute {}", in_quotes(name)));
    write_attribute(object, name, string_type(), pointers.data(), file);
}

void write_attribute(hid_t object, const std::string& name, std::span<const std::string> values,
                     const std::string& file) {
    const std::string what = fmt::format("attribute {}", in_quotes(name));
    const auto pointers = c_strings(values, file, what);
    const std::int64_t count = static_cast<std::int64_t>(values.size());
    const Handle space = space_of(std::span(&count, 1));
    const Handle type = string_type();
    const Handle attribute(wrote(H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT), file, what),
                           H5Aclose);
    if (!values.empty() && H5Awrite(attribute, type, pointers.data()) < 0) fail_write(file, what);
}

Handle dataset_properties() {
    Handle properties(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_obj_track_times(properties, false);
    return properties;
}

Handle require_group(hid_t file, const std::string& path, const std::string& file_name) {
    const Handle properties(H5Pcreate(H5P_GROUP_CREATE), H5Pclose);
    H5Pset_obj_track_times(properties, false);
    H5Pset_link_creation_order(properties, H5P_CRT_ORDER_TRACKED | H5P_CRT_ORDER_INDEXED);
    Handle group(wrote(H5Gopen2(file, "/", H5P_DEFAULT), file_name, "/"), H5Gclose);
    for (std::size_t from = 0; from < path.size();) {
        const std::size_t to = std::min(path.find('/', from), path.size());
        const std::string name = path.substr(from, to - from);
        from = to + 1;
        if (name.empty()) continue;
        const bool there = H5Lexists(group, name.c_str(), H5P_DEFAULT) > 0;
        group = Handle(wrote(there ? H5Gopen2(group, name.c_str(), H5P_DEFAULT)
                                   : H5Gcreate2(group, name.c_str(), H5P_DEFAULT, properties, H5P_DEFAULT),
                             file_name, fmt::format("group {}", in_quotes(path))),
                       H5Gclose);
    }
    return group;
}

std::pair<std::string, std::string> split_path(const std::string& path) {
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos) return {"", path};
    const std::string group = path.substr(0, slash);
    return {group.empty() || group.front() == '/' ? group : "/" + group, path.substr(slash + 1)};
}

Handle space_of(std::span<const std::int64_t> shape) {
    if (shape.empty()) return {H5Screate(H5S_SCALAR), H5Sclose};
    const std::vector<hsize_t> extents(shape.begin(), shape.end());
    return {H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr), H5Sclose};
}

std::vector<const char*> c_strings(std::span<const std::string> values, const std::string& file,
                                   const std::string& what) {
    std::vector<const char*> pointers;
    for (const std::string& value : values) {
        if (value.find('\0') != std::string::npos) {
            throw RequestError(
                fmt::format("{}: {}: {} holds a NUL: expected text without one", file, what, in_quotes(value)));
        }
        pointers.push_back(value.c_str());
    }
    return pointers;
}

}  // namespace faultline::h5
