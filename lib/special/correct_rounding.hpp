// SPDX-License-Identifier: Apache-2.0
// The fp32 numbers nearest to 2^x and log2 x, for host and device: what an approximation's error is counted from.
//
// The value comes from binary64 (binary64.hpp: 2^x within 1.25 ulp, ln x within 2 ulp), and is the correctly rounded one where
// both ends of the interval that its error leaves round alike. Where they do not, about one argument in 2^26, the caller has to
// decide with more digits; neither function has an exact tie but 2^x below 2^-149, at whole numbers.
#pragma once

#include <faultline/base/host_device.hpp>
#include <faultline/special/binary64.hpp>

namespace faultline {

/// A function's value: in binary64 with a relative error of at most 2^-50, in fp32 to nearest even, and whether that is certain.
struct RoundedValue {
    double wide;
    float nearest;
    bool certain;
};

namespace detail {

FAULTLINE_HD inline RoundedValue rounded_value(double y) {
    constexpr double error =
        0x1p-50;  // 4 ulp: 1.25 of 2^x; 2 of ln x, 1/2 of log2 e and 1/2 of the product; the bound's own
    const float nearest = static_cast<float>(y);
    const float below = static_cast<float>(y * (1 - error)), above = static_cast<float>(y * (1 + error));
    return {y, nearest, (below == nearest && above == nearest) || y != y};
}

}  // namespace detail

/// 2^x for any float; NaN for NaN.
[[nodiscard]] FAULTLINE_HD inline RoundedValue exp2_rounded(float x) {
    return detail::rounded_value(binary64_functions::exp2(static_cast<double>(x)));
}

/// log2 x for any float: -inf for zeros, NaN below 0 and for NaN.
[[nodiscard]] FAULTLINE_HD inline RoundedValue log2_rounded(float x) {
    constexpr double log2_e = 0x1.71547652b82fep0;
    return detail::rounded_value(binary64_functions::log(static_cast<double>(x)) * log2_e);
}

}  // namespace faultline
