// SPDX-License-Identifier: Apache-2.0
// Faults that one multiplication makes (scaling.hpp), inside the kernels: the factor of a head and what it did. Nothing here
// branches: nvcc makes wgmma wait for that.
#pragma once

#include <faultline/tensor_kernel/altered_sums.cuh>

namespace faultline::tensor_kernel {

__device__ __forceinline__ bool acts(const HeadAlteration* heads, int head) {
    return heads != nullptr && heads[head].touched;
}
/// 1 where the fault does not act.
__device__ __forceinline__ float factor_of(const HeadAlteration* heads, int head) {
    return acts(heads, head) ? static_cast<float>(1 + heads[head].change.magnitude * heads[head].change.sign) : 1.0f;
}
/// x has become `held` by this factor. counts: whether it goes into the sums; x is finite then.
__device__ __forceinline__ void add_scaled(AlteredSums& to, bool counts, float x, float held, float factor) {
    const double before = counts ? x : 0.0f, by = counts ? static_cast<double>(held) - before : 0.0;
    add_change(to, counts ? 1.0 : 0.0, before, by, (static_cast<double>(factor) - 1) * before);
}
/// A warp's sums to slot `slot` of `to`, if that is not null; zeros where `acted` is false.
__device__ __forceinline__ void store_sums(AlteredSums* to, bool acted, const AlteredSums& sums, std::size_t slot) {
    if (to == nullptr) return;
    const double of[7] = {sums.count,     sums.sum,           sums.sum_squared,  sums.sum_abs,
                          sums.asked_sum, sums.asked_squared, sums.value_squared};
#pragma unroll
    for (int n = 0; n < 7; ++n) {
        const double sum = warp_total(acted ? of[n] : 0.0);
        if (threadIdx.x % 32 == 0) (&to[slot].count)[n] = sum;
    }
}

}  // namespace faultline::tensor_kernel
