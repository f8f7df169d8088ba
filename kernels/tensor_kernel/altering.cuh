// SPDX-License-Identifier: Apache-2.0
// What a thread of an altered kernel does with the elements that it holds at a site. No calls: wgmma's accumulators are in
// flight around it.
#pragma once

#include <cstdint>

#include <faultline/tensor_kernel/altered_sums.cuh>
#include <faultline/tensor_kernel/hopper.cuh>

namespace faultline::tensor_kernel {

/// Of a thread, for each alteration: its sums, and the streams of the head that it is at, which take longer to name than a
/// tile's elements take to change.
struct AlteredOfThread {
    AlteredSums of[most_altered] = {};
    RandomStream signs[most_altered], roundings[most_altered];
    int head[most_altered] = {-1, -1, -1, -1}, batch[most_altered] = {};

    __device__ __forceinline__ void name(int f, const Alteration& a) {
        if (head[f] == a.head && batch[f] == a.batch) return;
        head[f] = a.head;
        batch[f] = a.batch;
        if (a.sign_of == Alteration::Sign::of_element) signs[f] = head_stream(a, fault_stream::element_signs);
        if (a.hold == Alteration::Hold::stochastic) roundings[f] = head_stream(a, fault_stream::roundings);
    }
};
static_assert(most_altered == 4);

__device__ __forceinline__ bool stands_at(const Alterations& in, AlteredSite site) {
    bool any = false;
#pragma unroll
    for (int f = 0; f < most_altered; ++f) any |= f < in.count && in.at[f].site == site;
    return any;
}

/// Changes v at a site. place(e, i, j) says the row and column of element e in the tile; false where the mask hides it. `tile`:
/// first query << 32 | first key; cols: the tile's; counted: whether it goes into the sums.
///
/// An array that a loop indexes is no registers, and local memory is slow here, where the tiles have taken the first-level cache.
/// So eight turns change the elements 0, 8, 16, … and move each eight on by one, after which the array stands as it stood. In
/// wgmma's layout of a row of scores these are 16 columns apart: they share their random numbers.
template <int count, class Place>
__device__ __forceinline__ void alter(const Alterations& in, AlteredSite site, int head, int batch, std::uint64_t tile,
                                      int cols, float (&v)[count], Place&& place, AlteredOfThread& sums,
                                      bool counted = true) {
    constexpr int turns = count % 8 == 0 ? 8 : 1, at_once = count / turns;
#pragma unroll 1
    for (int f = 0; f < in.count; ++f) {
        if (in.at[f].site != site) continue;
        const HeadAlteration& from = in.at[f].heads[head];
        if (!from.touched) continue;
        Alteration a = from.change;
        a.batch += batch;
        const bool stochastic = a.hold == Alteration::Hold::stochastic && a.magnitude != 0;
        sums.name(f, a);
        SignDraws columns(a.sign_of == Alteration::Sign::of_column ? column_stream(a) : RandomStream());
        SignDraws elements(a.sign_of == Alteration::Sign::of_element ? tile_stream(sums.signs[f], tile, 0)
                                                                     : RandomStream());
        RoundingDraws draws(stochastic ? tile_stream(sums.roundings[f], tile, 0) : RandomStream());
        AlteredSums here{};
        /// Changes element e, x; false: it is not done here, but is to be without `quickly`.
        const auto change = [&](int e, float& value, bool quickly) {
            int i = 0, j = 0;
            if (!place(e, i, j)) return true;
            const double x = value;
            if (!(fabs(x) <= 3.402823466e38)) return true;
            double asked = 0, held = x;
            if (a.magnitude != 0) {
                const auto element = static_cast<std::uint64_t>(i) * cols + j;
                asked = asked_change(
                    a, x, 0.0, [&] { return columns.sign(j); }, [&] { return elements.sign(element); });
                if (!quickly)
                    held = held_change_inlined(a, x + asked, draws.stream, element);
                else if (!held_quickly(a, x + asked, stochastic ? draws.upper_bits(element) : 0, held))
                    return false;
            }
            const double by = held - x;
            add_change(here, 1, x, by, asked);
            value = static_cast<float>(held);
            return true;
        };
#pragma unroll 1
        for (int turn = 0; turn < turns; ++turn) {
            float front[at_once];
            unsigned left = 0;  // by bit
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                front[k] = v[turns * k];
                if (!change(turns * k + turn, front[k], true)) left |= 1u << k;
            }
#pragma unroll 1
            while (left != 0) {
                const int which = __ffs(static_cast<int>(left)) - 1;
                left &= left - 1;
                float one = 0;
#pragma unroll
                for (int k = 0; k < at_once; ++k)
                    if (k == which) one = front[k];
                (void)change(turns * which + turn, one, false);
#pragma unroll
                for (int k = 0; k < at_once; ++k)
                    if (k == which) front[k] = one;
            }
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
#pragma unroll
                for (int e = 0; e + 1 < turns; ++e) v[turns * k + e] = v[turns * k + e + 1];
                v[turns * k + turns - 1] = front[k];
            }
        }
        if (counted) add_sums(sums.of[f], here);
    }
}

/// A warp's sums into `slot` of each alteration.
__device__ __forceinline__ void keep_sums(const Alterations& in, const AlteredOfThread& sums, std::size_t slot) {
#pragma unroll 1
    for (int f = 0; f < in.count; ++f) {
        const double* of = &sums.of[f].count;
        double* to = &in.at[f].sums[slot].count;
#pragma unroll 1
        for (int n = 0; n < 7; ++n) {
            const double sum = warp_total(of[n]);
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
template <>
__device__ __forceinline__ float rounded<__half>(float x) {
    return __half2float(__float2half_rn(x));
}

}  // namespace faultline::tensor_kernel
