// SPDX-License-Identifier: Apache-2.0
// What changes elements inside the forward, in a recorder's place (altering.hpp).
#pragma once

#include <faultline/tensor_kernel/altering.cuh>
#include <faultline/tensor_kernel/forward_common.cuh>

namespace faultline::tensor_kernel {

struct ForwardAlterations {
    Alterations all;
    int batches;
};

/// The elements of P after their cast to T.
template <class T>
struct ForwardAlterer {
    static constexpr bool records = false, alters = true, alters_state = false;
    using Arguments = ForwardAlterations;
    struct Memory {};
    struct Place {
        AlteredOfThread sums;  ///< of a query tile
    };
    static constexpr int kept_scores = 1;
    const Arguments& in;
    int warp;

    __device__ __forceinline__ ForwardAlterer(const Arguments& arguments, Memory&, int consuming_warp)
        : in(arguments), warp(consuming_warp) {}

    /// p of keys [128 key_tile, …) of rows `row` and `row` + 8, in the wgmma's accumulator layout.
    template <class Call, int count>
    __device__ __forceinline__ void probabilities(Place& to, const Call& call, const TilePlace& at, int first_row,
                                                  int row, int key_tile, float (&p)[count]) const {
        constexpr int keys = 2 * count;
        const int t = threadIdx.x % 4, key0 = key_tile * keys;
#pragma unroll
        for (float& x : p) x = rounded<T>(x);
        alter(
            in.all, AlteredSite::p_cast, at.head, at.batch,
            static_cast<std::uint64_t>(first_row) << 32 | static_cast<std::uint64_t>(key0), min(keys, call.n_k - key0),
            p,
            [&](int e, int& i, int& j) {
                const int octet = e / 4, r = e / 2 % 2;
                j = 8 * octet + 2 * t + e % 2;
                i = row + 8 * r - first_row;
                return row + 8 * r < call.n_q && key0 + j < call.visible(row + 8 * r);
            },
            to.sums);
    }
    __device__ __forceinline__ void keep(const Place& of, const TilePlace& at, int q_tiles) const {
        const std::size_t block = (static_cast<std::size_t>(at.head) * in.batches + at.batch) * q_tiles + at.q_tile;
        keep_sums(in.all, of.sums, block * 8 + warp);
    }
};

/// And row maxima, row sums and the output: the state that goes from key tile to key tile.
template <class T>
struct ForwardStateAlterer : ForwardAlterer<T> {
    static constexpr bool alters_state = true;
    using ForwardAlterer<T>::ForwardAlterer, ForwardAlterer<T>::in;
    using typename ForwardAlterer<T>::Place;

    /// The state of rows `row` and `row` + 8, which four threads have alike. All of them change it, so that no path is one
    /// thread's alone (nvcc makes wgmma wait for those); the first counts.
    struct Rows {
        static constexpr bool alters = true;
        const Alterations& all;
        Place& to;
        TilePlace at;
        int first_row, row, n_q;
        std::uint64_t tile;

        __device__ __forceinline__ void change(AlteredSite site, float (&x)[2]) const {
            alter(
                all, site, at.head, at.batch, tile, 1, x,
                [&](int r, int& i, int& j) {
                    i = row + 8 * r - first_row;
                    j = 0;
                    return row + 8 * r < n_q;
                },
                to.sums, threadIdx.x % 4 == 0);
        }
        __device__ __forceinline__ void row_max(float (&maximum)[2]) const { change(AlteredSite::row_max, maximum); }
        __device__ __forceinline__ float continued(double sum, float alpha, float term) const {
            return static_cast<float>(sum * alpha + term);
        }
        /// The quad's first lane of a sum takes the whole change.
        __device__ __forceinline__ void row_sum(const float (&joined)[2], double (&lane)[2]) const {
            float changed[2] = {joined[0], joined[1]};
            change(AlteredSite::row_sum, changed);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (threadIdx.x % 4 == 0 && changed[r] != joined[r])
                    lane[r] += static_cast<double>(changed[r]) - static_cast<double>(joined[r]);
        }
    };
    template <class Call>
    __device__ __forceinline__ Rows rows(Place& to, const Call& call, const TilePlace& at, int first_row, int row,
                                         int key0) const {
        return {in.all,
                to,
                at,
                first_row,
                row,
                call.n_q,
                static_cast<std::uint64_t>(first_row) << 32 | static_cast<std::uint64_t>(key0)};
    }

    /// The output with the P V of these keys, in the wgmma's accumulator layout.
    template <class Call, int count>
    __device__ __forceinline__ void output(Place& to, const Call& call, const TilePlace& at, int first_row, int row,
                                           int key0, float (&o)[count]) const {
        alter(
            in.all, AlteredSite::pv_accumulate, at.head, at.batch,
            static_cast<std::uint64_t>(first_row) << 32 | static_cast<std::uint64_t>(key0), 2 * count, o,
            [&](int e, int& i, int& j) {
                j = e / 4 * 8 + threadIdx.x % 4 * 2 + e % 2;
                i = row + e / 2 % 2 * 8 - first_row;
                return row + e / 2 % 2 * 8 < call.n_q;
            },
            to.sums);
    }
};

}  // namespace faultline::tensor_kernel
