// SPDX-License-Identifier: Apache-2.0
// std::bit_cast for host and device: the library's own is a host function to nvcc unless an experimental flag is set.
#pragma once

#include <faultline/base/host_device.hpp>

namespace faultline::detail {

/// The object representation of x read as a To of the same size.
template <class To, class From>
[[nodiscard]] FAULTLINE_HD constexpr To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, x);
}

}  // namespace faultline::detail
