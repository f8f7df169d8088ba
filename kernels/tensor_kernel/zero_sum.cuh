// SPDX-License-Identifier: Apache-2.0
// The sum of the cast score gradient, 0 in exact arithmetic, as a thread of a backward sees its part go by.
#pragma once

#include <cmath>

#include <faultline/tensor_kernel/fragment.cuh>
#include <faultline/tensor_kernel/widen.cuh>

namespace faultline::tensor_kernel {

/// A thread adds some hundred elements of 16 bits in fp32, off by 2^-24 of its own magnitudes at most for each addition and
/// by as much at random over the threads, far below what their casts leave; threads join in binary64.
struct ZeroSum16 {
    float sum = 0, magnitude = 0;

    template <class T>
    __device__ __forceinline__ void add(const Fragment& ds) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float2 two = widen<T>(ds[i / 4][i % 4]);
            sum += two.x + two.y;
            magnitude += fabsf(two.x) + fabsf(two.y);
        }
    }
    /// Of ds and what a projection adds to it.
    template <class T>
    __device__ __forceinline__ void add(const Fragment& ds, const Fragment& rest) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float2 two = widen<T>(ds[i / 4][i % 4]), more = widen<T>(rest[i / 4][i % 4]);
            const float x = two.x + more.x, y = two.y + more.y;
            sum += x + y;
            magnitude += fabsf(x) + fabsf(y);
        }
    }
    /// The warp's into to[0] and to[1]. All threads of the warp.
    __device__ __forceinline__ void store(double* to) const {
        double a = sum, b = magnitude;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            a += __shfl_xor_sync(~0u, a, step);
            b += __shfl_xor_sync(~0u, b, step);
        }
        if (threadIdx.x % 32 == 0) {
            to[0] = a;
            to[1] = b;
        }
    }
};

}  // namespace faultline::tensor_kernel
