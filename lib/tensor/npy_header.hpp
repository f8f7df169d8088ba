// SPDX-License-Identifier: Apache-2.0
// The header of a .npy file: a Python dictionary literal, e.g. {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <faultline/tensor/input.hpp>

namespace faultline::detail {

struct NpyHeader {
    std::string descr;  ///< as written, e.g. "<f4"
    bool fortran_order = false;
    std::vector<std::int64_t> shape;
    std::uint64_t data_start = 0;  ///< first byte of the elements
};

/// Magic, version, length and dictionary. RequestError.
[[nodiscard]] NpyHeader read_npy_header(const Input&);

}  // namespace faultline::detail
