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
/// The rest is room for roundings: a unit's cuts make no sum of products larger than that of their magnitudes, and a cast to a
/// format whose smallest normal number is far below this makes a number at most half as large again; three casts and the fp32
/// additions (1 + 2^-15) are below 4 together. A number among the smallest may double in a cast, and stays far from the limit.
[[nodiscard]] constexpr double largest_of_hidden_pairs(Format ds, Format dp_accumulate, Format dp_cast) {
    double largest = FLT_MAX;
    for (const Format& f : {ds, dp_accumulate, dp_cast})
        if (!is_exact(f)) largest = std::min(largest, max_finite(f));
    return largest / 4;
}

/// Whether ds of every pair that is hidden is 0, where q, k, v, dO and delta of the head are finite, as the scale of the gradient is,
/// and no row's reference is NaN or minus infinity. d: of dp's products; dout, v, delta: the largest absolute values of all rows, those that see no key and those that nobody sees too.
[[nodiscard]] FAULTLINE_HD inline bool hidden_pairs_are_zeros(double largest, double d, double dout, double v,
                                                              double delta) {
    return d * dout * v + delta <= largest;
}

}  // namespace faultline::device
