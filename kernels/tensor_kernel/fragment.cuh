// SPDX-License-Identifier: Apache-2.0
// An accumulator of 64 x 64, cast, as the left operand of the next product.
#pragma once

#include <faultline/tensor_kernel/hopper.cuh>
#include <faultline/tensor_kernel/wgmma.cuh>

namespace faultline::tensor_kernel {

/// 64 x 64 of a warpgroup's accumulator, cast: left operand of the next product for each 16 columns.
using Fragment = std::uint32_t[4][4];
template <class T>
__device__ __forceinline__ void cast(const float (&x)[32], Fragment& to) {
#pragma unroll
    for (int i = 0; i < 16; ++i) to[i / 4][i % 4] = pack<T>(x[2 * i], x[2 * i + 1]);
}
__device__ __forceinline__ void keep(Fragment& x) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

}  // namespace faultline::tensor_kernel
