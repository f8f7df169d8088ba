// SPDX-License-Identifier: Apache-2.0
// round<F, R>(x): the rounding for a format and mode known when compiling.
#pragma once

#include <faultline/format/format.hpp>

namespace faultline {

/// Whether every number of f is a float, so that a float can hold the result.
[[nodiscard]] FAULTLINE_HD constexpr bool fits_float(Format f) {
    return is_exact(f) || (f.precision <= 24 && f.emax <= 127 && f.emin - (f.subnormals ? f.precision - 1 : 0) >= -149);
}

/// round(x, F, R, random_bits) on floats, the same bits. `exact` returns x.
template <Format F, Rounding R = Rounding::nearest_even>
[[nodiscard]] FAULTLINE_HD constexpr float round(float x, std::uint64_t random_bits = 0) {
    static_assert(fits_float(F), "a float cannot hold every number of this format");
    if constexpr (is_exact(F)) {
        return x;
    } else {
        return static_cast<float>(round(static_cast<double>(x), F, R, random_bits));
    }
}

}  // namespace faultline
