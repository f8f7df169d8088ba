// SPDX-License-Identifier: Apache-2.0
// Pairs of a query and a key that the mask hides. Their p is 0, and the emulation forms p (dp - delta) of them as of all others
// (kernels/emulated/backward.hpp): 0 too, unless dp, or dp - delta, is infinite or no number; then it is NaN, and so are the
// query's dq and the key's dk. gradients.cu leaves them out, so it has only heads of which this cannot be.
#pragma once

#include <algorithm>
#include <cfloat>

#include <faultline/base/host_device.hpp>
#include <faultline/format/format.hpp>

namespace faultline::device {

/// A quarter of the largest number that the formats of ds, dp_accumulate and dp_cast, and the float that dp is added up in, have.
/// The rest is room for roundings: of a sum of 128 products, each less than 2^-22 of it, and of a cast to each of the formats,
/// which makes a number at most half as large again: (1 + 2^-15) 1.5^3 is below 4.
[[nodiscard]] constexpr double largest_of_hidden_pairs(Format ds, Format dp_accumulate, Format dp_cast) {
    double largest = FLT_MAX;
    for (const Format& f : {ds, dp_accumulate, dp_cast})
        if (!is_exact(f)) largest = std::min(largest, max_finite(f));
    return largest / 4;
}

/// Whether ds of every pair that is hidden is 0, where q, k, v, dO and delta of the head are finite. d: of dp's products; dout, v,
/// delta: the largest absolute values of all rows, those that see no key and those that nobody sees too.
[[nodiscard]] FAULTLINE_HD inline bool hidden_pairs_are_zeros(double largest, double d, double dout, double v,
                                                              double delta) {
    return d * dout * v + delta <= largest;
}

}  // namespace faultline::device
