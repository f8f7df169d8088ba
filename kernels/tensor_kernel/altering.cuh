// SPDX-License-Identifier: Apache-2.0
// What a thread of an altered kernel does with the elements that it holds at a site. No calls: wgmma's accumulators are in
// flight around it.
#pragma once

#include <cstdint>

#include <faultline/tensor_kernel/altering.hpp>
#include <faultline/tensor_kernel/hopper.cuh>

namespace faultline::tensor_kernel {

/// The sums of a thread, one for each alteration.
struct AlteredOfThread {
    AlteredSums of[most_altered] = {};
};

__device__ __forceinline__ bool stands_at(const Alterations& in, AlteredSite site) {
    bool any = false;
#pragma unroll
    for (int f = 0; f < most_altered; ++f) any |= f < in.count && in.at[f].site == site;
    return any;
}

/// Changes v at a site. place(k, e, i, j) says which element of v comes k-th, and its row and column in the tile; false where
/// the mask hides it. `tile`: first query << 32 | first key; cols: the tile's.
template <int count, class Place>
__device__ __forceinline__ void alter(const Alterations& in, AlteredSite site, int head, int batch, std::uint64_t tile,
                                      int cols, float (&v)[count], Place&& place, AlteredOfThread& sums) {
    float apart[count];  // indexed in a loop: v stays in registers
#pragma unroll
    for (int e = 0; e < count; ++e) apart[e] = v[e];
#pragma unroll 1
    for (int f = 0; f < in.count; ++f) {
        if (in.at[f].site != site) continue;
        const HeadAlteration& from = in.at[f].heads[head];
        if (!from.touched) continue;
        Alteration a = from.change;
        a.batch += batch;
        const bool stochastic = a.hold == Alteration::Hold::stochastic && a.magnitude != 0;
        SignDraws columns(a.sign_of == Alteration::Sign::of_column ? column_stream(a) : RandomStream());
        SignDraws elements(a.sign_of == Alteration::Sign::of_element
                               ? tile_stream(a, fault_stream::element_signs, tile, 0)
                               : RandomStream());
        RoundingDraws draws(stochastic ? tile_stream(a, fault_stream::roundings, tile, 0) : RandomStream());
        AlteredSums& to = sums.of[f];
#pragma unroll 1
        for (int k = 0; k < count; ++k) {
            int e = k, i = 0, j = 0;
            if (!place(k, e, i, j)) continue;
            const double x = apart[e];
            if (!(fabs(x) <= 3.402823466e38)) continue;
            double asked = 0, held = x;
            if (a.magnitude != 0) {
                const auto element = static_cast<std::uint64_t>(i) * cols + j;
                asked = asked_change(
                    a, x, 0.0, [&] { return columns.sign(j); }, [&] { return elements.sign(element); });
                held = held_change_inlined(a, x + asked, stochastic ? draws.bits(element) : 0);
            }
            const double change = held - x;
            to.count += 1;
            to.sum += change;
            to.sum_squared += change * change;
            to.sum_abs += fabs(change);
            to.asked_sum += asked;
            to.asked_squared += asked * asked;
            to.value_squared += x * x;
            apart[e] = static_cast<float>(held);
        }
    }
#pragma unroll
    for (int e = 0; e < count; ++e) v[e] = apart[e];
}

/// A warp's sums into `slot` of each alteration.
__device__ __forceinline__ void keep_sums(const Alterations& in, const AlteredOfThread& sums, std::size_t slot) {
#pragma unroll 1
    for (int f = 0; f < in.count; ++f) {
        const double* of = &sums.of[f].count;
        double* to = &in.at[f].sums[slot].count;
#pragma unroll 1
        for (int n = 0; n < 7; ++n) {
            double sum = of[n];
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (threadIdx.x % 32 == 0) to[n] = sum;
        }
    }
}

template <class T>
__device__ __forceinline__ float rounded(float x);
template <>
__device__ __forceinline__ float rounded<__nv_bfloat16>(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}

}  // namespace faultline::tensor_kernel
