// SPDX-License-Identifier: Apache-2.0
// What multiplies p, once it is cast, row maxima, row sums and the output inside the forward, in a recorder's place (scaling.hpp). Between the issue of
// a wgmma and the wait for it there is no branch, so the kernel runs as the one without faults does.
#pragma once

#include <faultline/tensor_kernel/altering.cuh>
#include <faultline/tensor_kernel/factor.cuh>
#include <faultline/tensor_kernel/forward_common.cuh>

namespace faultline::tensor_kernel {

struct ForwardScalings {
    struct At {
        const HeadAlteration* heads;  ///< [heads]; null: 1
        AlteredSums* sums;            ///< [head, query tile, warp], of the first sequence
    };
    At p_cast, row_sum, row_max, pv_accumulate;
};

/// recorded: adds up what it does, of a call with one sequence. whole_state: row maxima and the output too, whose factors would
/// take their multiplications where they are 1.
template <class T, bool recorded, bool whole_state>
struct ForwardScaler {
    static constexpr bool records = false, alters = true, alters_state = true, scales = true;
    static constexpr bool begins_the_next = recorded;
    using Arguments = ForwardScalings;
    struct Memory {};
    struct Place {
        float p, sum, maximum, output;  ///< factors of the query tile's head
        bool sum_acts;
    };
    static constexpr int kept_scores = 1;
    const Arguments& in;
    int warp;
    AlteredSums of_p{}, of_sum{}, of_maximum{}, of_output{};  ///< of a query tile, where it is recorded

    __device__ __forceinline__ ForwardScaler(const Arguments& arguments, Memory&, int consuming_warp)
        : in(arguments), warp(consuming_warp) {}

    __device__ __forceinline__ Place begin(int head) {
        if constexpr (recorded) of_p = of_sum = of_maximum = {};
        return {factor_of(in.p_cast.heads, head), factor_of(in.row_sum.heads, head), factor_of(in.row_max.heads, head),
                factor_of(in.pv_accumulate.heads, head), acts(in.row_sum.heads, head)};
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
        float factor, of_maximum;
        bool acts;
        int row, n_q;

        /// Minus infinity, of a row that has seen no key, stays.
        __device__ __forceinline__ void row_max(float (&maximum)[2]) const {
            if constexpr (whole_state) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float changed = maximum[r] * of_maximum;
                    if constexpr (recorded)
                        add_scaled(self.of_maximum,
                                   threadIdx.x % 4 == 0 && row + 8 * r < n_q && fabsf(maximum[r]) <= 3.402823466e38f,
                                   maximum[r], changed, of_maximum);
                    maximum[r] = changed;
                }
            }
        }
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
        return {*this, to.sum, to.maximum, to.sum_acts, row, call.n_q};
    }

    /// The output with the P V of a key tile, of rows `row` and `row` + 8.
    template <class Call, int count>
    __device__ __forceinline__ void output(const Place& to, const Call& call, int row, float (&o)[count]) {
        if constexpr (whole_state) {
#pragma unroll
            for (int e = 0; e < count; ++e) {
                const float changed = o[e] * to.output;
                if constexpr (recorded)
                    add_scaled(of_output, row + e / 2 % 2 * 8 < call.n_q && fabsf(o[e]) <= 3.402823466e38f, o[e],
                               changed, to.output);
                o[e] = changed;
            }
        }
    }

    /// When all of a query tile has been multiplied.
    __device__ __forceinline__ void keep(const TilePlace& at, int q_tiles) const {
        if constexpr (recorded) {
            store(in.p_cast, of_p, at, q_tiles);
            store(in.row_sum, of_sum, at, q_tiles);
            store(in.row_max, of_maximum, at, q_tiles);
        }
    }
    /// When its output has been: beside the next query tile's first p.
    __device__ __forceinline__ void keep_output(const TilePlace& at, int q_tiles) {
        if constexpr (recorded && whole_state) {
            store(in.pv_accumulate, of_output, at, q_tiles);
            of_output = {};
        }
    }

  private:
    /// Where a fault does not act now, nothing was counted of it.
    __device__ __forceinline__ void store(const ForwardScalings::At& to, const AlteredSums& sums, const TilePlace& at,
                                          int q_tiles) const {
        const std::size_t slot = (static_cast<std::size_t>(at.head) * q_tiles + at.q_tile) * 8 + warp;
        store_sums(to.sums, acts(to.heads, at.head), sums, slot);
    }
};

}  // namespace faultline::tensor_kernel
