// SPDX-License-Identifier: Apache-2.0
// Dimension scales on the HDF5 level; see axes.hpp.
#pragma once

#include <span>
#include <string>

#include <faultline/record/axes.hpp>
#include <faultline/record/h5.hpp>

namespace faultline::h5 {

/// Attaches to dataset `path` (of those dimensions) a scale for each axis: the one of that name and size in its group
/// or nearest above, else a new one without coordinates in its group. WorkError when the group's own scale of that name
/// has another size, or two axes share a name.
void attach_axes(hid_t file, hid_t dataset, const std::string& path, std::span<const Axis> axes,
                 const std::string& file_name);
/// Makes a dataset that holds coordinates the scale called `name`.
void make_scale(hid_t dataset, const std::string& name, const std::string& file_name);
/// Writes units and long_name.
void describe(hid_t object, const About& about, const std::string& file_name);

}  // namespace faultline::h5
