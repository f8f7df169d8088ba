// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/open_file.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/input.hpp>

namespace faultline::h5 {
namespace {

/// A reader beside a writer reads an entry again when its checksum is wrong, since it may have met it half written. HDF5
/// sleeps 1 ns before the second attempt and twice as long before each further one: 20 attempts are a millisecond, which
/// a flush needs less than. Its default of 100 would be longer than anybody lives in a file that is simply damaged.
constexpr unsigned read_attempts = 20;

/// The superblock's file consistency flags (HDF5 File Format Specification 3.0, II.A: signature at 0, 512, 1024, 2048…;
/// byte 8 the version, byte 11 the flags from version 3 on: 1 open for writing, 4 for writing beside readers).
bool says_being_written(const FileInput& in) {
    constexpr std::array<unsigned char, 8> signature{0x89, 'H', 'D', 'F', '\r', '\n', 0x1A, '\n'};
    std::array<unsigned char, 12> start{};
    for (std::uint64_t at = 0; at + start.size() <= in.size(); at = at == 0 ? 512 : 2 * at) {
        in.read(at, std::as_writable_bytes(std::span(start)));
        if (std::equal(signature.begin(), signature.end(), start.begin())) return start[8] >= 3 && (start[11] & 5) != 0;
    }
    return false;
}

Handle open(const std::string& path, bool beside_writer) {
    const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
    if (beside_writer) H5Pset_metadata_read_attempts(access, read_attempts);
    return {H5Fopen(path.c_str(), H5F_ACC_RDONLY | (beside_writer ? H5F_ACC_SWMR_READ : 0u), access), H5Fclose};
}

}  // namespace

Handle open_for_reading(const std::string& path) {
    const FileInput in(path);  // its sentences for a file that is missing or not regular
    if (H5Fis_hdf5(path.c_str()) <= 0)
        throw RequestError(
            fmt::format("{}: is not HDF5: expected a file that begins with HDF5's signature", in.name()));
    const bool being_written = says_being_written(in);
    Handle file = open(path, being_written);
    if (!file.valid() && says_being_written(in) != being_written)
        file = open(path, !being_written);  // changed just now
    if (!file.valid())
        throw RequestError(
            fmt::format("{}: the file cannot be read ({}): expected a whole HDF5 file", in.name(), reason()));
    return file;
}

bool says_being_written(const std::string& path) {
    try {
        return says_being_written(FileInput(path));
    } catch (const RequestError&) {
        return false;
    }
}

}  // namespace faultline::h5
