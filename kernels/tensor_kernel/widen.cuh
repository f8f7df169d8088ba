// SPDX-License-Identifier: Apache-2.0
// Two 16-bit numbers of a word as floats: the other way from pack (hopper.cuh).
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace faultline::tensor_kernel {

/// Two neighbours in memory as floats.
template <class T>
__device__ __forceinline__ float2 widen(std::uint32_t x);
template <>
__device__ __forceinline__ float2 widen<__nv_bfloat16>(std::uint32_t x) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u)};
}
template <>
__device__ __forceinline__ float2 widen<__half>(std::uint32_t x) {
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
}

}  // namespace faultline::tensor_kernel
