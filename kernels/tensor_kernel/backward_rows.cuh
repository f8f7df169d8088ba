// SPDX-License-Identifier: Apache-2.0
// What a row of the score gradient must know of all of its keys before the backward's main kernel runs: delta from P and dP
// in place of O, or what the cast ds of the row sums to, for a zero-sum projection. S and dP are computed as in the main
// kernel, with the same bits; one block takes 128 queries and goes over the keys that they see.
#pragma once

#include <cstdint>

#include <faultline/tensor_kernel/probability.cuh>
#include <faultline/tensor_kernel/wgmma.cuh>

namespace faultline::tensor_kernel {

template <class T, int d>
struct RowTiles {
    static constexpr int head_dim = d, block_q = 128, block_k = 128, stages = 2, panels = d / 64;
    static constexpr int threads = 384, producer_registers = 24, consumer_registers = 240;
    struct Memory {
        alignas(1024) T q[panels * block_q * 64];
        alignas(1024) T dout[panels * block_q * 64];
        alignas(1024) T k[stages][panels * block_k * 64];
        alignas(1024) T v[stages][panels * block_k * 64];
        Barrier query_full, key_full[stages], key_empty[stages];
    };
    static constexpr int shared_bytes = sizeof(Memory) + 1024;
    static_assert(shared_bytes <= 232448);
};

/// Maps as in BackwardArguments, boxes of 128 rows and all panels; arrays [batch * heads, n_padded].
struct RowArguments {
    CUtensorMap q, k, v, dout;
    const float* lse;  ///< in the exponential's units; +inf beyond n_q
    float* delta;      ///< written, or, for a projection, read
    /// For a projection: minus the row's sum of the cast ds, over sum p (weighted; p is to be added so many times), over the
    /// number of keys (uniform) or over 1 (largest).
    float* factor;
    int* largest;  ///< for a projection: the first key of the largest |ds|
    int heads, kv_heads, n_q, n_k, n_padded;
    bool causal;
    float exponent, scale;
    DeltaFrom delta_from;
    ZeroSum zero_sum;
};

/// Keys that a query sees.
__device__ __forceinline__ int visible_keys(const RowArguments& in, int query) {
    return in.causal ? max(0, min(in.n_k, query + 1 + in.n_k - in.n_q)) : in.n_k;
}

template <class T, class Tiles>
__device__ __forceinline__ void load_key_tiles(const RowArguments& in, typename Tiles::Memory& m, int q_tile,
                                               int tiles) {
    for (const CUtensorMap* map : {&in.q, &in.k, &in.v, &in.dout}) prefetch_map(map);
    const int head = blockIdx.y % in.heads, batch = blockIdx.y / in.heads, kv_head = head / (in.heads / in.kv_heads);
    m.query_full.arrive_expect(sizeof m.q + sizeof m.dout);
    load_tile(m.q, &in.q, m.query_full, 0, q_tile * Tiles::block_q, 0, head, batch);
    load_tile(m.dout, &in.dout, m.query_full, 0, q_tile * Tiles::block_q, 0, head, batch);
    for (int i = 0; i < tiles; ++i) {
        const int stage = i % Tiles::stages;
        m.key_empty[stage].wait((i / Tiles::stages & 1) ^ 1);
        m.key_full[stage].arrive_expect(sizeof m.k[0] + sizeof m.v[0]);
        load_tile(m.k[stage], &in.k, m.key_full[stage], 0, i * Tiles::block_k, 0, kv_head, batch);
        load_tile(m.v[stage], &in.v, m.key_full[stage], 0, i * Tiles::block_k, 0, kv_head, batch);
    }
}

/// Two rows of a thread: g and g + 8 of its warp. `projected`: of the cast ds; otherwise of p dp.
template <class T, class Tiles, class Variant, bool projected>
__device__ __forceinline__ void sum_rows(const RowArguments& in, typename Tiles::Memory& m, int which, int q_tile,
                                         int tiles) {
    constexpr int d = Tiles::head_dim, block_k = Tiles::block_k;
    using Product = Wgmma<T, block_k>;
    const int lane = threadIdx.x % 32;
    const int row = q_tile * Tiles::block_q + which * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const std::int64_t base = static_cast<std::int64_t>(blockIdx.y) * in.n_padded;
    float lse[2], delta[2], sum[2] = {0, 0}, p_sum[2] = {0, 0}, size[2] = {-1, -1};
    int key[2] = {-1, -1}, seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row + 8 * r;
        lse[r] = i < in.n_q ? in.lse[base + i] : INFINITY;
        delta[r] = projected && i < in.n_q ? in.delta[base + i] : 0.0f;
        seen[r] = i < in.n_q ? visible_keys(in, i) : 0;
    }
    m.query_full.wait(0);
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % Tiles::stages;
        m.key_full[stage].wait(tile / Tiles::stages & 1);
        float s[block_k / 2], dp[block_k / 2];
        const auto multiply = [&](float(&x)[block_k / 2], const T* queries, const T* keys) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < d / 16; ++i)
                Product::template ss<0, 0>(
                    x, k_major(queries + (i / 4 * Tiles::block_q + which * 64) * 64) + i % 4 * k_major_step,
                    k_major(keys + i / 4 * block_k * 64) + i % 4 * k_major_step, i > 0);
            wgmma_commit();
        };
        multiply(s, m.q, m.k[stage]);
        multiply(dp, m.dout, m.v[stage]);
        wgmma_wait<1>();
        keep(s);
#pragma unroll
        for (int e = 0; e < block_k / 2; ++e) {
            const int r = e / 2 % 2, j = tile * block_k + e / 4 * 8 + lane % 4 * 2 + e % 2;
            s[e] = j < seen[r] ? probability<Variant>(s[e], in.exponent, lse[r]) : 0.0f;
        }
        wgmma_wait<0>();
        keep(dp);
        if (lane == 0) m.key_empty[stage].arrive();
#pragma unroll
        for (int e = 0; e < block_k / 2; ++e) {
            const int r = e / 2 % 2;
            p_sum[r] += s[e];
            if constexpr (projected) {
                float x = s[e] * (dp[e] - delta[r]);
                if constexpr (Variant::value.ds_scale == DsScale::before) x = x * in.scale;
                const float ds = static_cast<float>(static_cast<T>(x));
                sum[r] += ds;
                if (fabsf(ds) > size[r]) {
                    size[r] = fabsf(ds);
                    key[r] = tile * block_k + e / 4 * 8 + lane % 4 * 2 + e % 2;
                }
            } else {
                sum[r] += s[e] * dp[e];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int half = 2; half > 0; half /= 2) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], half);
            p_sum[r] += __shfl_xor_sync(~0u, p_sum[r], half);
            if constexpr (projected) {
                const float other = __shfl_xor_sync(~0u, size[r], half);
                const int other_key = __shfl_xor_sync(~0u, key[r], half);
                if (other > size[r] || (other == size[r] && other_key < key[r])) {
                    size[r] = other;
                    key[r] = other_key;
                }
            }
        }
        const int i = row + 8 * r;
        if (lane % 4 != 0 || i >= in.n_padded) continue;
        if constexpr (projected) {
            const float over = in.zero_sum == ZeroSum::weighted  ? p_sum[r]
                               : in.zero_sum == ZeroSum::uniform ? static_cast<float>(seen[r])
                                                                 : 1.0f;
            in.factor[base + i] = over > 0 ? -sum[r] / over : 0.0f;
            in.largest[base + i] = key[r];
        } else {
            const bool normalized = in.delta_from == DeltaFrom::p_dp_normalized && p_sum[r] > 0;
            in.delta[base + i] = normalized ? sum[r] / p_sum[r] : sum[r];
        }
    }
}

/// Grid: query tiles of 128, those with the most keys first; heads of all batch elements.
template <class T, class Tiles, class Variant, bool projected>
__global__ void __launch_bounds__(Tiles::threads, 1) backward_rows(const __grid_constant__ RowArguments in) {
    extern __shared__ std::uint8_t dynamic[];
    auto& m = *reinterpret_cast<typename Tiles::Memory*>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);
    if (threadIdx.x == 0) {
        m.query_full.init(1);
        for (int i = 0; i < Tiles::stages; ++i) {
            m.key_full[i].init(1);
            m.key_empty[i].init(8);  // one thread of each consuming warp
        }
        fence_barrier_init();
    }
    __syncthreads();
    const int warpgroup = uniform(threadIdx.x / 128);
    const int q_tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    const int keys = visible_keys(in, min(in.n_q, (q_tile + 1) * Tiles::block_q) - 1);
    const int tiles = (keys + Tiles::block_k - 1) / Tiles::block_k;
    if (warpgroup == 0) {
        fewer_registers<Tiles::producer_registers>();
        if (threadIdx.x == 0) load_key_tiles<T, Tiles>(in, m, q_tile, tiles);
    } else {
        more_registers<Tiles::consumer_registers>();
        sum_rows<T, Tiles, Variant, projected>(in, m, warpgroup - 1, q_tile, tiles);
    }
}

}  // namespace faultline::tensor_kernel
