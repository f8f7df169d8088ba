// SPDX-License-Identifier: Apache-2.0
// The backward's memory, arguments and order of tiles, and what its first warpgroup does: the copies. backward.cuh says what
// for.
#pragma once

#include <cstdint>

#include <faultline/plan/schedule.hpp>
#include <faultline/tensor_kernel/wgmma.cuh>

namespace faultline::tensor_kernel {

template <class T, int d>
struct BackwardTiles {
    static constexpr int head_dim = d, block_k = 128, block_q = d == 64 ? 128 : 64, stages = 2;
    static constexpr int steps = block_q / 64, panels = d / 64;
    static constexpr int threads = 384;
    // setmaxnreg: 128 (24 + 2 240) registers are what the launch allots, 168 a thread.
    static constexpr int producer_registers = 24, consumer_registers = 240;

    struct Memory {
        alignas(1024) T k[panels * block_k * 64];
        alignas(1024) T v[panels * block_k * 64];
        alignas(1024) T q[stages][panels * block_q * 64];
        alignas(1024) T dout[stages][panels * block_q * 64];
        alignas(1024) T ds[2][block_k * block_q];  ///< dS^T: panels of 64 queries, rows are keys
        alignas(128) float dq[block_q * d];
        alignas(128) float lse[stages][block_q];
        alignas(128) float delta[stages][block_q];
        alignas(128) float factor[stages][block_q];  ///< of a projection
        alignas(128) int largest[stages][block_q];
        Barrier k_full, v_full, q_full[stages], dout_full[stages], tile_empty[stages], dq_full, dq_empty;
    };
    static constexpr int shared_bytes = sizeof(Memory) + 1024;  // dynamic shared memory may begin off the alignment
    static_assert(shared_bytes <= 232448);                      // what a block may have on compute capability 9.0
};

/// One call. q, dout [batch, heads, n_q, d], k, v [batch, kv_heads, n_k, d] by tensor maps of five dimensions: 64 columns, row,
/// panel, head, batch, boxes of all panels; dk, dv like k by strides in elements.
struct BackwardArguments {
    CUtensorMap q, k, v, dout;
    void* dk;
    void* dv;
    std::int64_t dk_row, dk_head, dk_batch, dv_row, dv_head, dv_batch;
    const float* lse;     ///< [batch * heads, n_padded], in the exponential's units; +inf beyond n_q
    const float* delta;   ///< the same shape, 0 beyond n_q
    const float* factor;  ///< the same shape, of a projection (backward_rows.cuh), 0 beyond n_q
    const int* largest;   ///< the same
    ZeroSum zero_sum;     ///< which projection
    float* dq;            ///< [batch * heads, query tiles, 2, 8, 128, 4]: see add_dq
    double* zero_sums;    ///< null, or BackwardCall::zero_sums
    int* turn;            ///< [batch * heads, query tiles], zero: how many key tiles have added; null: any order
    int kv_heads, group, n_q, n_k, n_padded, q_tiles, k_tiles;
    int all_heads;      ///< key heads of all batch elements
    int heads_at_once;  ///< of those, whose tiles follow each other
    bool causal;        ///< key j is visible to query i when j <= i + n_k - n_q
    float exponent;     ///< scale, times log2(e) where the base is two
    float scale;
};

/// Where a tile number lies: a few heads at a time, whose Q, dO and dq stay in the second-level cache, and of those the key
/// tiles with the most queries first.
template <class Tiles>
struct KeyTile {
    int head, first_key, first_q, end_q;  ///< key head of all batch elements; query tiles [first_q, end_q)

    __host__ __device__ __forceinline__ KeyTile(const BackwardArguments& in, int number) {
        const int section = number / (in.heads_at_once * in.k_tiles), within = number % (in.heads_at_once * in.k_tiles);
        const int heads = min(in.heads_at_once, in.all_heads - section * in.heads_at_once);
        head = section * in.heads_at_once + within % heads;
        int tile = within / heads;
        if (in.turn != nullptr) tile = in.k_tiles - 1 - tile;  // a tile waits for those above it alone
        first_key = tile * Tiles::block_k;
        end_q = in.q_tiles;
        first_q = in.causal ? min(end_q, max(0, first_key - (in.n_k - in.n_q)) / Tiles::block_q) : 0;
    }
};

// ---- warpgroup 0 ----------------------------------------------------------------------------------------------------
template <class T, class Tiles, bool projected>
__device__ __forceinline__ void load_tiles(const BackwardArguments& in, typename Tiles::Memory& m, int number) {
    for (const CUtensorMap* map : {&in.q, &in.k, &in.v, &in.dout}) prefetch_map(map);
    constexpr std::uint32_t key_bytes = sizeof m.k, query_bytes = sizeof m.q[0] + sizeof m.lse[0];
    constexpr std::uint32_t projection_bytes = projected ? sizeof m.factor[0] + sizeof m.largest[0] : 0;
    const KeyTile<Tiles> tile(in, number);
    const int batch = tile.head / in.kv_heads, kv_head = tile.head % in.kv_heads;
    m.k_full.arrive_expect(key_bytes);
    load_tile(m.k, &in.k, m.k_full, 0, tile.first_key, 0, kv_head, batch);
    unsigned step = 0;
    for (int g = 0; g < in.group; ++g) {
        const int head = kv_head * in.group + g;
        const std::int64_t rows = static_cast<std::int64_t>(tile.head * in.group + g) * in.n_padded;
        for (int i = tile.first_q; i < tile.end_q; ++i, ++step) {
            const unsigned stage = step % Tiles::stages;
            m.tile_empty[stage].wait((step / Tiles::stages & 1) ^ 1);
            m.q_full[stage].arrive_expect(query_bytes);
            load_tile(m.q[stage], &in.q, m.q_full[stage], 0, i * Tiles::block_q, 0, head, batch);
            load_bytes(m.lse[stage], in.lse + rows + i * Tiles::block_q, sizeof m.lse[0], m.q_full[stage]);
            if (step == 0) {
                m.v_full.arrive_expect(key_bytes);
                load_tile(m.v, &in.v, m.v_full, 0, tile.first_key, 0, kv_head, batch);
            }
            m.dout_full[stage].arrive_expect(query_bytes + projection_bytes);
            load_tile(m.dout[stage], &in.dout, m.dout_full[stage], 0, i * Tiles::block_q, 0, head, batch);
            load_bytes(m.delta[stage], in.delta + rows + i * Tiles::block_q, sizeof m.delta[0], m.dout_full[stage]);
            if constexpr (projected) {
                load_bytes(m.factor[stage], in.factor + rows + i * Tiles::block_q, sizeof m.factor[0],
                           m.dout_full[stage]);
                load_bytes(m.largest[stage], in.largest + rows + i * Tiles::block_q, sizeof m.largest[0],
                           m.dout_full[stage]);
            }
        }
    }
}

/// Adds dq tiles to memory, each after those of the key tiles above this one.
template <class Tiles>
__device__ __forceinline__ void add_dq_in_turn(const BackwardArguments& in, typename Tiles::Memory& m) {
    const KeyTile<Tiles> tile(in, blockIdx.x);
    unsigned step = 0;
    for (int g = 0; g < in.group; ++g)
        for (int i = tile.first_q; i < tile.end_q; ++i, ++step) {
            const std::int64_t at = static_cast<std::int64_t>(tile.head * in.group + g) * in.q_tiles + i;
            const int end_row = min((i + 1) * Tiles::block_q, in.n_q);
            const int seen = in.causal ? min(in.n_k, end_row + in.n_k - in.n_q) : in.n_k;
            const int above = (seen - 1 - tile.first_key) / Tiles::block_k;
            m.dq_full.wait(step & 1);
            int added;
            do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(added) : "l"(in.turn + at) : "memory");
            while (added < above);
            // What others added by copies is to come before what this copy adds, and this before the next one's turn.
            asm volatile("fence.proxy.async.global;" ::: "memory");
            add_floats(in.dq + at * (Tiles::block_q * Tiles::head_dim), m.dq, sizeof m.dq);
            store_commit();
            store_wait_read();
            m.dq_empty.arrive();
            store_wait();
            asm volatile("fence.proxy.async.global;" ::: "memory");
            asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(in.turn + at) : "memory");
        }
}

}  // namespace faultline::tensor_kernel
