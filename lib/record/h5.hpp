// SPDX-License-Identifier: Apache-2.0
// A thin layer over the HDF5 C API, for the sources of this folder: handles that close themselves, types, attributes,
// and HDF5's error stack turned into sentences.
//
// The C API directly, because none of the C++ wrappers would carry what we need of it: HighFive and h5cpp are not in
// Debian 12, and the wrapper that is (libhdf5-cpp) has neither SWMR nor direct chunk writes nor dimension scales.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#define H5_USE_110_API  // the calls as 1.10 has them, also with a newer HDF5
#include <hdf5.h>

#include <faultline/tensor/dtype.hpp>

namespace faultline::h5 {

/// An identifier and what closes it.
class Handle {
  public:
    Handle() = default;
    Handle(hid_t id, herr_t (*close)(hid_t)) : id_(id), close_(close) {}
    Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
    Handle& operator=(Handle&& other) noexcept {
        std::swap(id_, other.id_);
        std::swap(close_, other.close_);
        return *this;
    }
    ~Handle() { (void)reset(); }
    operator hid_t() const { return id_; }
    [[nodiscard]] bool valid() const { return id_ >= 0; }
    /// Closes now; false when HDF5 reports an error (the last bytes are written on closing).
    [[nodiscard]] bool reset() { return id_ < 0 || close_(std::exchange(id_, -1)) >= 0; }

    /// Forgets the identifier without closing.
    void release() { id_ = -1; }

  private:
    hid_t id_ = -1;
    herr_t (*close_)(hid_t) = nullptr;
};

/// Stops HDF5 from printing its error stack in this thread, and from closing what is left open when the program ends (see
/// RunFile; handles close the rest). Every public function of the folder begins with it.
void silence();
/// What the error stack says went wrong: the system's message ("No space left on device") if there is one, else HDF5's.
[[nodiscard]] std::string reason();

/// WorkError "FILE: cannot write WHAT (reason): expected a writable folder with room for it".
[[noreturn]] void fail_write(const std::string& file, const std::string& what);
/// RequestError "FILE: WHAT cannot be read (reason): expected EXPECTED".
[[noreturn]] void fail_read(const std::string& file, const std::string& what, const std::string& expected);

/// The identifier, or fail_write.
inline hid_t wrote(hid_t id, const std::string& file, const std::string& what) {
    if (id < 0) fail_write(file, what);
    return id;
}

/// File type of a dtype: little-endian; bf16 as uint16, fp8 and bool as uint8, f16 as an IEEE half. Close it.
[[nodiscard]] Handle type_of(Dtype);
/// The `encoding` attribute that tells such a dataset from plain integers; "" where the type says it all.
[[nodiscard]] std::string_view encoding_of(Dtype);
/// Variable-length UTF-8.
[[nodiscard]] Handle string_type();

[[nodiscard]] bool has_attribute(hid_t object, const char* name);
void write_attribute(hid_t object, const std::string& name, const std::string& value, const std::string& file);
void write_attribute(hid_t object, const std::string& name, std::span<const std::string> values,
                     const std::string& file);
/// One number of the given HDF5 memory type.
void write_attribute(hid_t object, const std::string& name, hid_t type, const void* value, const std::string& file);

/// Creation properties of a dataset, without the times that HDF5 would keep in it: the bytes of a file depend on what it
/// holds and on created_utc, not on the second in which a dataset was written.
[[nodiscard]] Handle dataset_properties();

/// Group at that absolute path, and those above it, created where missing, children listed in order of creation.
[[nodiscard]] Handle require_group(hid_t file, const std::string& path, const std::string& file_name);
/// "a/b/c" -> "/a/b" and "c". "" is the root.
[[nodiscard]] std::pair<std::string, std::string> split_path(const std::string& path);
/// A simple dataspace of these extents; a scalar one for none.
[[nodiscard]] Handle space_of(std::span<const std::int64_t> shape);
/// The values as the char pointers that HDF5 wants; RequestError when one holds a NUL.
[[nodiscard]] std::vector<const char*> c_strings(std::span<const std::string> values, const std::string& file,
                                                 const std::string& what);

}  // namespace faultline::h5
