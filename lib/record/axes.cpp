// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/axes_h5.hpp>

#include <set>

#include <fmt/format.h>
#include <hdf5_hl.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::h5 {
namespace {

/// The scale called `name` in that very group, or nothing.
Handle scale_in(hid_t file, const std::string& group, const std::string& name) {
    const std::string path = group + "/" + name;
    if (H5Lexists(file, path.c_str(), H5P_DEFAULT) <= 0) return {};
    Handle object(H5Oopen(file, path.c_str(), H5P_DEFAULT), H5Oclose);
    if (!object.valid() || H5Iget_type(object) != H5I_DATASET || H5DSis_scale(object) <= 0) return {};
    return object;
}

std::int64_t length_of(hid_t dataset) {
    const Handle space(H5Dget_space(dataset), H5Sclose);
    return H5Sget_simple_extent_npoints(space);
}

/// A dimension that has a length and no coordinates: netCDF-4 marks it by this name, and xarray then shows none.
Handle create_plain_scale(hid_t file, const std::string& group, const Axis& axis, const std::string& file_name) {
    const std::string path = group + "/" + axis.name;
    const Handle space = space_of(std::span(&axis.size, 1));
    // netCDF-4 uses a big-endian float for it; storage is allocated on first write, so none is.
    Handle scale(
        wrote(H5Dcreate2(file, path.c_str(), H5T_IEEE_F32BE, space, H5P_DEFAULT, dataset_properties(), H5P_DEFAULT),
              file_name, fmt::format("dimension {}", in_quotes(path))),
        H5Dclose);
    make_scale(scale, fmt::format("This is a netCDF dimension but not a netCDF variable.{:10d}", axis.size), file_name);
    return scale;
}

Handle scale_for(hid_t file, const std::string& path, const Axis& axis, const std::string& file_name) {
    const std::string own_group = split_path(path).first;
    if (Handle own = scale_in(file, own_group, axis.name); own.valid()) {
        if (length_of(own) == axis.size) return own;
        throw WorkError(fmt::format("{}: dataset {}: dimension {} has {} entries: expected {}, as its group has it",
                                    file_name, in_quotes(path), in_quotes(axis.name), axis.size, length_of(own)));
    }
    for (std::string group = own_group; !group.empty();) {
        group = split_path(group).first;
        if (Handle above = scale_in(file, group, axis.name); above.valid() && length_of(above) == axis.size)
            return above;
    }
    return create_plain_scale(file, own_group, axis, file_name);
}

}  // namespace

void attach_axes(hid_t file, hid_t dataset, const std::string& path, std::span<const Axis> axes,
                 const std::string& file_name) {
    std::set<std::string> names;
    for (unsigned i = 0; i < axes.size(); ++i) {
        if (axes[i].name.empty() || axes[i].name.find('/') != std::string::npos || !names.insert(axes[i].name).second) {
            throw WorkError(fmt::format("{}: dataset {}: dimension {}: expected different, plain names", file_name,
                                        in_quotes(path), in_quotes(axes[i].name)));
        }
        const Handle scale = scale_for(file, path, axes[i], file_name);
        if (H5DSattach_scale(dataset, scale, i) < 0)
            fail_write(file_name, fmt::format("dimensions of {}", in_quotes(path)));
    }
}

void make_scale(hid_t dataset, const std::string& name, const std::string& file_name) {
    if (H5DSset_scale(dataset, name.c_str()) < 0) fail_write(file_name, fmt::format("dimension {}", in_quotes(name)));
}

void describe(hid_t object, const About& about, const std::string& file_name) {
    if (!about.units.empty()) write_attribute(object, "units", about.units, file_name);
    if (!about.long_name.empty()) write_attribute(object, "long_name", about.long_name, file_name);
}

}  // namespace faultline::h5
