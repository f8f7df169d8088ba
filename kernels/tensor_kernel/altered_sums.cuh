// SPDX-License-Identifier: Apache-2.0
// What is recorded of a changed element: AlteredSums of altering.hpp, or Realised of injectors/realised.hpp, which has the same
// members. One function for who changes elements in registers, by a factor, and in memory.
#pragma once

#include <faultline/tensor_kernel/altering.hpp>

namespace faultline::tensor_kernel {

/// count: 1, or 0 where the element is left out, whose x, change and asked change are 0 then.
template <class Sums>
__device__ __forceinline__ void add_change(Sums& to, double count, double x, double change, double asked) {
    to.count += count;
    to.sum += change;
    to.sum_squared = fma(change, change, to.sum_squared);
    to.sum_abs += fabs(change);
    to.asked_sum += asked;
    to.asked_squared = fma(asked, asked, to.asked_squared);
    to.value_squared = fma(x, x, to.value_squared);
}
template <class Sums>
__device__ __forceinline__ void add_sums(Sums& to, const Sums& next) {
    to.count += next.count;
    to.sum += next.sum;
    to.sum_squared += next.sum_squared;
    to.sum_abs += next.sum_abs;
    to.asked_sum += next.asked_sum;
    to.asked_squared += next.asked_squared;
    to.value_squared += next.value_squared;
}

/// Over the warp, the same in each of its threads.
__device__ __forceinline__ double warp_total(double x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

}  // namespace faultline::tensor_kernel
