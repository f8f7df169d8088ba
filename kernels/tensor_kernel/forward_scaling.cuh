// SPDX-License-Identifier: Apache-2.0
// What multiplies p, once it is cast, and the row sums inside the forward, in a recorder's place (scaling.hpp). Between the issue of
// a wgmma and the wait for it there is no branch, so the kernel runs as the one without faults does.
#pragma once

#include <faultline/tensor_kernel/altering.cuh>
#include <faultline/tensor_kernel/factor.cuh>
#include <faultline/tensor_kernel/forward_common.cuh>

namespace faultline::tensor_kernel {

struct ForwardScalings {
    const HeadAlteration *p_cast, *row_sum;  ///< [heads]; null: 1
    AlteredSums *p_sums, *row_sums;          ///< [head, query tile, warp], of the first sequence
};

/// recorded: adds up what it does, of a call with one sequence.
template <class T, bool recorded>
struct ForwardScaler {
    static constexpr bool records = false, alters = true, alters_state = true, scales = true;
    static constexpr bool begins_the_next = recorded;
    using Arguments = ForwardScalings;
    struct Memory {};
    struct Place {
        float p, sum;  ///< factors of the query tile's head
        bool sum_acts;
    };
    static constexpr int kept_scores = 1;
    const Arguments& in;
    int warp;
    AlteredSums of_p{}, of_sum{};  ///< of a query tile, where it is recorded

    __device__ __forceinline__ ForwardScaler(const Arguments& arguments, Memory&, int consuming_warp)
        : in(arguments), warp(consuming_warp) {}

    __device__ __forceinline__ Place begin(int head) {
        if constexpr (recorded) of_p = of_sum = {};
        return {factor_of(in.p_cast, head), factor_of(in.row_sum, head), acts(in.row_sum, head)};
    }

    /// p of keys [128 key_tile, …) of rows `row` and `row` + 8, in the wgmma's accumulator layout.
    template <class Call, int count>
    __device__ __forceinline__ void probabilities(const Place& to, const Call& call, const TilePlace&, int, int row,
                                                  int key_tile, float (&p)[count]) {
        constexpr int keys = 2 * count;
        int limit[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            limit[r] = row + 8 * r < call.n_q ? call.visible(row + 8 * r) - key_tile * keys - threadIdx.x % 4 * 2 : 0;
#pragma unroll
        for (int i = 0; i < count; i += 2) {
            const float2 x = unpack<T>(pack<T>(p[i], p[i + 1]));
            p[i] = x.x * to.p;
            p[i + 1] = x.y * to.p;
            if constexpr (recorded) {
                const float2 held = unpack<T>(pack<T>(p[i], p[i + 1]));
                const int column = i / 4 * 8, seen = limit[i / 2 % 2];
                add_scaled(of_p, column < seen, x.x, held.x, to.p);
                add_scaled(of_p, column + 1 < seen, x.y, held.y, to.p);
            }
        }
    }

    /// The state of rows `row` and `row` + 8, which four threads have alike; the first counts.
    struct Rows {
        static constexpr bool alters = true;
        ForwardScaler& self;
        float factor;
        bool acts;
        int row, n_q;

        __device__ __forceinline__ void row_max(float (&)[2]) const {}
        /// Where nothing acts on it, the plain kernel's sum, which is of fp32.
        __device__ __forceinline__ float continued(double sum, float alpha, float term) const {
            const float plain = fmaf(static_cast<float>(sum), alpha, term);
            return acts ? static_cast<float>(sum * alpha + term) : plain;
        }
        /// The quad's first lane of a sum takes the whole change.
        __device__ __forceinline__ void row_sum(const float (&joined)[2], double (&lane)[2]) const {
            const bool first = threadIdx.x % 4 == 0;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const bool counts = first && fabsf(joined[r]) <= 3.402823466e38f;
                const float changed = joined[r] * factor;
                lane[r] += counts ? static_cast<double>(changed) - static_cast<double>(joined[r]) : 0.0;
                if constexpr (recorded)
                    add_scaled(self.of_sum, counts && row + 8 * r < n_q, joined[r], changed, factor);
            }
        }
    };
    template <class Call>
    __device__ __forceinline__ Rows rows(const Place& to, const Call& call, const TilePlace&, int, int row, int) {
        return {*this, to.sum, to.sum_acts, row, call.n_q};
    }

    /// When all of a query tile has been multiplied.
    __device__ __forceinline__ void keep(const TilePlace& at, int q_tiles) const {
        if constexpr (recorded) {
            const std::size_t slot = (static_cast<std::size_t>(at.head) * q_tiles + at.q_tile) * 8 + warp;
            // Where a fault does not act now, nothing was counted of it.
            store_sums(in.p_sums, acts(in.p_cast, at.head), of_p, slot);
            store_sums(in.row_sums, acts(in.row_sum, at.head), of_sum, slot);
        }
    }
};

}  // namespace faultline::tensor_kernel
