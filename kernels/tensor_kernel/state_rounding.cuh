// SPDX-License-Identifier: Apache-2.0
// Roundings of a streaming state that is held in less than fp32, each as kernels/cpu rounds at the plan's site: once, to nearest
// even, from the exact result where the site's operation is not itself one of fp32.
#pragma once

#include <cstdint>

#include <faultline/tensor_kernel/forward_variant.hpp>
#include <faultline/tensor_kernel/hopper.cuh>

namespace faultline::tensor_kernel {

/// x in the format.
[[nodiscard]] __device__ __forceinline__ float held(float x, StateFormat format) {
    if (format == StateFormat::bf16) return unpack<__nv_bfloat16>(pack<__nv_bfloat16>(x, 0.0f)).x;
    if (format == StateFormat::fp16) return unpack<__half>(pack<__half>(x, 0.0f)).x;
    return x;
}

/// o alpha, rounded once to the format. In fp32 first toward zero, with a last bit of 1 where something was cut off ("round to
/// odd", Boldo and Melquiond 2008: a second rounding to two bits fewer or less then is that of the exact product). The rest of a
/// product that fp32 holds to its last subnormal is told from 0 by rounding it up. alpha >= 0.
[[nodiscard]] __device__ __forceinline__ float held_product(float o, float alpha, StateFormat format) {
    if (format == StateFormat::fp32) return o * alpha;
    const float size = fabsf(o), cut = __fmul_rz(size, alpha);
    const bool inexact = __fmaf_ru(size, alpha, -cut) > 0.0f;
    return held(copysignf(__uint_as_float(__float_as_uint(cut) | (inexact ? 1u : 0u)), o), format);
}

/// The log-sum-exp of a row as Site::lse makes it: the logarithm held in the format, then fma(maximum, scale, logarithm), of
/// binary64 (whose product is exact) before it is held.
[[nodiscard]] __device__ __forceinline__ float held_lse(float maximum, float scale, float logarithm,
                                                        StateFormat format) {
    if (format == StateFormat::fp32) return fmaf(maximum, scale, logarithm);
    const double sum = __fma_rn(static_cast<double>(maximum), static_cast<double>(scale),
                                static_cast<double>(held(logarithm, format)));
    const float cut = __double2float_rz(sum);
    const bool inexact = static_cast<double>(cut) != sum;
    return held(__uint_as_float(__float_as_uint(cut) | (inexact ? 1u : 0u)), format);
}

}  // namespace faultline::tensor_kernel
