// SPDX-License-Identifier: Apache-2.0
// What the files of both kinds (written whole, or watched while they grow) are made with, on the HDF5 level.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <faultline/record/axes_h5.hpp>
#include <faultline/record/h5.hpp>
#include <faultline/record/manifest.hpp>
#include <faultline/record/storage.hpp>
#include <faultline/tensor/dtype.hpp>

namespace faultline::h5 {

/// An open file and its name for messages. Every function throws WorkError when the disk refuses or a path is taken.
struct Writer {
    std::string name;
    Storage storage;
    Handle file;

    /// A new, empty file at `path` with the manifest at its root. Readers need HDF5 1.10 or later.
    static Writer create(const std::string& path, const std::string& name, const Manifest& manifest,
                         const Storage& storage);

    /// Groups on the way, and an empty dataset.
    [[nodiscard]] Handle create_dataset(const std::string& path, hid_t type, hid_t space, hid_t properties) const;
    [[nodiscard]] Handle write(const std::string& path, Dtype dtype, std::span<const std::byte> bytes,
                               std::span<const std::int64_t> shape) const;
    [[nodiscard]] Handle write_strings(const std::string& path, std::span<const std::string> values,
                                       std::span<const std::int64_t> shape) const;
    /// Coordinates of the dimension that the path's last part names.
    void coordinate(const std::string& path, Dtype dtype, std::span<const std::byte> bytes, const About& about) const;
    void coordinate(const std::string& path, std::span<const std::string> labels, const About& about) const;
    /// An object that is there, to hang an attribute on.
    [[nodiscard]] Handle open(const std::string& object, const std::string& attribute) const;
};

}  // namespace faultline::h5
