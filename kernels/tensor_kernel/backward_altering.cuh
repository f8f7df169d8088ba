// SPDX-License-Identifier: Apache-2.0
// What changes elements inside the backward, in a recorder's place (altering.hpp).
#pragma once

#include <faultline/tensor_kernel/altering.cuh>
#include <faultline/tensor_kernel/backward_launch.cuh>

namespace faultline::tensor_kernel {

/// The elements of dP, dS and the casts of P and dS to T.
template <class T>
struct BackwardAlterer {
    static constexpr bool records = false, alters = true;
    struct Arguments {
        Alterations all;
    };
    struct Place {};
    using Sums = AlteredOfThread;

    template <class Elements, class Tile>
    static __device__ __forceinline__ void begin(Elements&, const Tile&) {}
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void before_gradients(Elements& self, const Tile& tile, const Step& step,
                                                            float (&dp)[32]) {
        at(self, AlteredSite::dp_accumulate, tile, step, dp);
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void after_gradients(Elements& self, const Tile& tile, const Step& step,
                                                           float (&p)[32], float (&ds)[32]) {
        at(self, AlteredSite::ds, tile, step, ds);
#pragma unroll
        for (int e = 0; e < 32; ++e) {
            p[e] = rounded<T>(p[e]);
            ds[e] = rounded<T>(ds[e]);
        }
        at(self, AlteredSite::bwd_p_cast, tile, step, p);
        at(self, AlteredSite::ds_cast, tile, step, ds);
    }
    template <class Elements, class Tile>
    static __device__ __forceinline__ void keep(Elements& self, const Tile& tile) {
        const BackwardArguments& in = self.in_;
        const int head = tile.head % in.kv_heads, batch = tile.head / in.kv_heads, batches = in.all_heads / in.kv_heads;
        const std::size_t block = (static_cast<std::size_t>(head) * batches + batch) * in.k_tiles +
                                  static_cast<std::size_t>(tile.first_key / Elements::block_k);
        keep_sums(self.recording_.all, self.sums_, block * 8 + self.which_ * 4 + threadIdx.x / 32 % 4);
    }

  private:
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void at(Elements& self, AlteredSite site, const Tile& tile, const Step& step,
                                              float (&x)[32]) {
        const BackwardArguments& in = self.in_;
        if (!stands_at(self.recording_.all, site)) return;
        const int lane = threadIdx.x % 32, offset = in.n_k - in.n_q, first_row = self.first_row();
        const int query0 = step.first_query / Elements::block_q * Elements::block_q;
        const std::uint64_t name =
            static_cast<std::uint64_t>(query0) << 32 | static_cast<std::uint64_t>(tile.first_key);
        alter(
            self.recording_.all, site, tile.head % in.kv_heads, tile.head / in.kv_heads, name,
            min(Elements::block_k, in.n_k - tile.first_key), x,
            [&](int e, int& i, int& j) {
                j = first_row + lane / 4 + e / 2 % 2 * 8;
                const int query = step.first_query + e / 4 * 8 + lane % 4 * 2 + e % 2, key = tile.first_key + j;
                i = query - query0;
                return query < in.n_q && key < in.n_k && (!in.causal || key <= query + offset);
            },
            self.sums_);
    }
};

template <class T, int d>
void run_altered(const BackwardCall& call, const BackwardWorkspace& at, ZeroSum zero_sum,
                 const Alterations& alterations, cudaStream_t stream) {
    run_backward<T, d, Fused, BackwardAlterer<T>>(call, at, zero_sum, {alterations}, stream);
}

}  // namespace faultline::tensor_kernel
