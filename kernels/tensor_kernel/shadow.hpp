// SPDX-License-Identifier: Apache-2.0
// Errors of fp32 operations in fp32: what a value is off from the exact result of its operation, by operations whose roundings are
// themselves kept (two-sum, Knuth; the residual of an fma). Conversions to binary64 and back would take eight clocks of a warp each.
// They hold where a product and a sum are two roundings: -ffp-contract=off on the host, -fmad=false on the device, which CMake
// sets for this folder.
//
// What bounds them, u = 2^-24, for values whose sums and products do not overflow. A sum never underflows: two-sum is exact. A
// product's residual is exact where it is a multiple of 2^-149, which it is from products of 2^-102 on; below, it is off by 2^-150
// at most, half a unit of the smallest subnormal. (tests/kernels/tensor_kernel/shadow_test.cpp, against MPFR)
#pragma once

#include <cmath>

#include <faultline/base/host_device.hpp>

namespace faultline::tensor_kernel::shadow {

/// A sum as a float and what its rounding leaves.
struct Pair {
    float sum, rest;
};

/// first - second, exactly.
FAULTLINE_HD inline Pair difference(float first, float second) {
    const float all = first - second, taken = all - first;
    return {all, (first - (all - taken)) + (-second - taken)};
}

/// sum + rest += x, where the rest takes what the sum's rounding leaves. Of n terms with sizes that add up to S the k-th addition to
/// the rest rounds what is at most k u S: n (n + 1) / 2 u^2 S in all, of 32 terms 2^-38.9 S.
FAULTLINE_HD inline void add_exactly(float& sum, float& rest, float x) {
    const float next = sum + x, taken = next - sum;
    rest += (sum - (next - taken)) + (x - taken);
    sum = next;
}

/// x - (score scale - reference), x that difference rounded once (fused) or twice. With M the larger of |score scale| and
/// |reference|: x and the pair's sum are within 5 u M of each other, so that their difference rounds 5 u^2 M; the rests, 2 u M and
/// u M, round 3 u^2 M, and the result, at most 3 u M of error and as much again of the rests, 6 u^2 M: below 2^-44 M, and 2^-150.
FAULTLINE_HD inline float argument_error(float score, float scale, float reference, float x) {
    const float product = score * scale;
    const Pair exact = difference(product, reference);
    return (x - exact.sum) - (exact.rest + std::fma(score, scale, -product));
}

/// ds - p (dp - delta), ds that product of the rounded difference, rounded. With T = |p (dp - delta)|: p times the pair's rest and
/// the residual are u T each, their sum rounds 2 u^2 T, and so does the result: 2^-46 T, and 2^-150 each for the residual and the
/// sum, 2^-149.
FAULTLINE_HD inline float gradient_error(float p, float dp, float delta, float ds) {
    const Pair exact = difference(dp, delta);
    const float product = p * exact.sum;
    return (ds - product) - std::fma(p, exact.rest, std::fma(p, exact.sum, -product));
}

}  // namespace faultline::tensor_kernel::shadow
