// SPDX-License-Identifier: Apache-2.0
// Named dimensions: HDF5 dimension scales (H5DS, HDF5 Dimension Scale Specification 1.0) laid out as netCDF-4 does
// (NetCDF-4 format, "Dimensions"), which is what xarray reads. A name holds in its group and in those below.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace faultline {

/// One dimension of a dataset: what it is called and how long it is.
struct Axis {
    std::string name;
    std::int64_t size = 0;
};

/// What a dataset's numbers mean. `units` as UDUNITS writes them, "1" for a pure number.
struct About {
    std::string long_name;
    std::string units = "1";
};

}  // namespace faultline
