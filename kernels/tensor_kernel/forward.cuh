// SPDX-License-Identifier: Apache-2.0
// The forward on Hopper's tensor cores: o = softmax(scale q k^T) v and lse, FlashAttention-style (arXiv 2307.08691,
// 2407.08608). One block a multiprocessor, which takes query tile after query tile:
//   - warpgroup 0 is the producer: one thread copies Q, K and V tiles into shared memory, some stages ahead, and draws the
//     next query tile's number;
//   - the others are consumers, 64 rows of the query tile each. S of the next key tile, be it the first of the next query
//     tile, is issued before P V of this one, and its softmax runs beside that; the consumers take turns at issuing (a token
//     goes round), so that one's products run beside another's exponentials.
// Key tiles in descending order: those that the causal mask or the end of the keys cut come first.
// Query tiles: those with the most keys first, a few heads at a time whose keys and values stay in the second-level cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include <faultline/tensor_kernel/softmax.cuh>
#include <faultline/tensor_kernel/wgmma.cuh>

namespace faultline::tensor_kernel {

template <class T, int d, int consumer_groups = 2, int key_stages = d == 64 ? 4 : 2>
struct ForwardTiles {
    static constexpr int head_dim = d, consumers = consumer_groups;
    static constexpr int block_q = 64 * consumers, block_k = 128, stages = key_stages, panels = d / 64;
    static constexpr int threads = 128 * (consumers + 1);
    // setmaxnreg: the sum over warpgroups is what the launch allots, 65536/threads rounded down to 8.
    static constexpr int producer_registers = consumers == 2 ? 24 : 32, consumer_registers = consumers == 2 ? 240 : 160;

    struct Memory {
        alignas(1024) T q[2][panels * block_q * 64];
        alignas(1024) T k[stages][panels * block_k * 64];
        alignas(1024) T v[stages][panels * block_k * 64];
        Barrier q_full[2], q_empty[2], k_full[stages], k_empty[stages], v_full[stages], v_empty[stages];
        int tile[2];  ///< comes and goes with q; -1: no more
    };
    static constexpr int shared_bytes = sizeof(Memory) + 1024;  // dynamic shared memory may begin off the alignment
};

/// One call. Shapes: q [batch, heads, n_q, d], k, v [batch, kv_heads, n_k, d], by tensor maps of five dimensions: 64 columns,
/// row, panel, head, batch. o [batch, heads, n_q, d] by strides in elements; lse [batch, heads, n_q] contiguous.
template <class T>
struct ForwardArguments {
    CUtensorMap q, k, v;
    T* o;
    float* o_unrounded;  ///< null, or o before its cast, with o's strides
    float* lse;          ///< natural units; +inf where a row has no key
    std::int64_t o_row, o_head, o_batch;
    int heads, kv_heads, n_q, n_k;
    int q_tiles, heads_at_once, tiles;  ///< query tiles a head; heads (of all batch elements) a section; tiles in all
    bool causal;                        ///< key j is visible to query i when j <= i + n_k - n_q
    float natural;                      ///< scale
    SoftmaxScales scales;
    int* next;  ///< zero before the launch, and after it
};

/// Where a tile number lies.
struct TilePlace {
    int q_tile, head, batch;
};
template <class T>
__device__ __forceinline__ TilePlace place(const ForwardArguments<T>& in, int tile) {
    const int section_tiles = in.heads_at_once * in.q_tiles, section = tile / section_tiles;
    const int first = section * in.heads_at_once;
    const int here = min(in.heads_at_once, in.tiles / in.q_tiles - first);
    const int rest = tile - section * section_tiles;
    const int head = first + rest % here;
    return {in.q_tiles - 1 - rest / here, head % in.heads, head / in.heads};
}

/// Key tiles that rows before `end` reach; one, which is masked away, where there is none.
template <int block_k, class T>
__device__ __forceinline__ int key_tiles(const ForwardArguments<T>& in, int end) {
    const int visible = in.causal ? min(in.n_k, min(end, in.n_q) + in.n_k - in.n_q) : in.n_k;
    return max(1, (visible + block_k - 1) / block_k);
}

/// A position in a ring of slots and the parity of its pass.
template <int slots>
struct Ring {
    int slot = 0;
    std::uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

template <class T, class Tiles>
__device__ __forceinline__ void produce(const ForwardArguments<T>& in, typename Tiles::Memory& m) {
    prefetch_map(&in.q);
    prefetch_map(&in.k);
    prefetch_map(&in.v);
    Ring<2> q_ring;
    Ring<Tiles::stages> k_ring, v_ring;
    for (int tile = blockIdx.x;;) {
        m.q_empty[q_ring.slot].wait(q_ring.parity ^ 1);  // the first pass finds every slot empty
        if (tile >= in.tiles) {
            m.tile[q_ring.slot] = -1;
            m.q_full[q_ring.slot].arrive();
            return;
        }
        const int drawn = atomicAdd(in.next, 1);
        const TilePlace at = place(in, tile);
        const int kv_head = at.head / (in.heads / in.kv_heads);
        m.tile[q_ring.slot] = tile;
        m.q_full[q_ring.slot].arrive_expect(sizeof m.q[0]);
        load_tile(m.q[q_ring.slot], &in.q, m.q_full[q_ring.slot], 0, at.q_tile * Tiles::block_q, 0, at.head, at.batch);
        q_ring.advance();
        const auto load = [&](Ring<Tiles::stages>& ring, auto& slots, Barrier* full, Barrier* empty,
                              const CUtensorMap& map, int key_tile) {
            empty[ring.slot].wait(ring.parity ^ 1);
            full[ring.slot].arrive_expect(sizeof slots[0]);
            load_tile(slots[ring.slot], &map, full[ring.slot], 0, key_tile * Tiles::block_k, 0, kv_head, at.batch);
            ring.advance();
        };
        for (int key_tile = key_tiles<Tiles::block_k>(in, (at.q_tile + 1) * Tiles::block_q) - 1; key_tile >= 0;
             --key_tile) {
            load(k_ring, m.k, m.k_full, m.k_empty, in.k, key_tile);
            load(v_ring, m.v, m.v_full, m.v_empty, in.v, key_tile);
        }
        // Each block draws until it gets a number past the end; the last to draw at all puts the counter back.
        if (drawn == in.tiles - 1) *in.next = 0;
        tile = gridDim.x + drawn;
    }
}

/// Four neighbouring columns groups of a row meet in one thread of the quad, which then has eight columns in a row.
__device__ __forceinline__ uint4 transpose_quad(const std::uint32_t (&x)[4], int t) {
    // Thread t has words x[i] of group i; it wants word u of group t from thread u. Two rounds of exchanges.
    std::uint32_t y[4];
    const bool odd = t & 1, high = t & 2;
    const std::uint32_t a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
    const std::uint32_t b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    y[0] = odd ? a : x[0];
    y[1] = odd ? x[1] : a;
    y[2] = odd ? b : x[2];
    y[3] = odd ? x[3] : b;
    const std::uint32_t c = __shfl_xor_sync(~0u, high ? y[0] : y[2], 2);
    const std::uint32_t e = __shfl_xor_sync(~0u, high ? y[1] : y[3], 2);
    return {high ? c : y[0], high ? e : y[1], high ? y[2] : c, high ? y[3] : e};
}

template <class T, class Tiles, class Variant>
struct Consumer {
    static constexpr ForwardVariant variant = Variant::value;
    static constexpr int d = Tiles::head_dim, keys = Tiles::block_k, s_count = keys / 2, o_count = d / 2;
    using Softmax = StreamingSoftmax<T, variant, keys>;
    const ForwardArguments<T>& in;
    typename Tiles::Memory& m;
    int group;  ///< 0 to consumers - 1
    float s[s_count];
    float o[o_count];
    std::uint32_t p[keys / 16][4];
    Ring<2> q_ring;
    Ring<Tiles::stages> k_ring, v_ring;

    /// A query tile as this thread sees it.
    struct QueryTile {
        TilePlace at;
        int row;    ///< the first of this thread's two, which are 8 apart
        int count;  ///< key tiles
        int whole;  ///< key tiles that every row of the group sees whole
        Softmax softmax;
    };

    __device__ __forceinline__ Consumer(const ForwardArguments<T>& arguments, typename Tiles::Memory& memory, int g)
        : in(arguments), m(memory), group(g) {}

    static constexpr int first_token = 1;  // named barriers 1, 2, …: group's turn
    __device__ __forceinline__ void take_turn() const { named_sync(first_token + group, 256); }
    __device__ __forceinline__ void pass_turn() const {
        named_arrive(first_token + (group + 1 == Tiles::consumers ? 0 : group + 1), 256);
    }
    __device__ __forceinline__ void release(Barrier& empty) const {
        if (threadIdx.x % 32 == 0) empty.arrive();
    }

    /// Waits for the next query tile; false where there is none.
    __device__ __forceinline__ bool next_tile(QueryTile& tile) {
        m.q_full[q_ring.slot].wait(q_ring.parity);
        const int number = uniform(m.tile[q_ring.slot]);
        if (number < 0) return false;
        tile.at = place(in, number);
        const int group_row = tile.at.q_tile * Tiles::block_q + group * 64;
        tile.row = group_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        tile.count = key_tiles<keys>(in, (tile.at.q_tile + 1) * Tiles::block_q);
        tile.whole = (in.causal ? max(0, min(in.n_k, group_row + in.n_k - in.n_q + 1)) : in.n_k) / keys;
        tile.softmax = Softmax{};
        return true;
    }

    /// Issues s = q k^T of the next key tile.
    __device__ __forceinline__ void issue_scores() {
        const std::uint64_t q = k_major(m.q[q_ring.slot] + group * 64 * 64), k = k_major(m.k[k_ring.slot]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < d / 16; ++i) {
            const int panel = i / 4, step = i % 4 * k_major_step;
            Wgmma<T, keys>::ss(s, q + panel * (Tiles::block_q * 128 / 16) + step, k + panel * (keys * 128 / 16) + step,
                               i > 0);
        }
        wgmma_commit();
    }
    /// Issues o (+)= p v of this key tile.
    __device__ __forceinline__ void issue_output(bool accumulate) {
        const std::uint64_t v = mn_major(m.v[v_ring.slot], keys * 128);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < keys / 16; ++i)
            Wgmma<T, d>::template rs<1>(o, p[i], v + i * mn_major_step, i > 0 || accumulate);
        wgmma_commit();
    }

    /// Scores of keys that a row does not see become -inf.
    __device__ __forceinline__ void mask(int key0, int row) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int sees = in.causal ? min(in.n_k, row + 8 * r + in.n_k - in.n_q + 1) : in.n_k;
            const int limit = sees - key0 - 2 * t;
#pragma unroll
            for (int j = 0; j < keys / 8; ++j) {
                if (8 * j >= limit) s[4 * j + 2 * r] = -INFINITY;
                if (8 * j + 1 >= limit) s[4 * j + 2 * r + 1] = -INFINITY;
            }
        }
    }

    __device__ __forceinline__ void pack_p() {
#pragma unroll
        for (int i = 0; i < keys / 16; ++i)
#pragma unroll
            for (int w = 0; w < 4; ++w) p[i][w] = pack<T>(s[8 * i + 2 * w], s[8 * i + 2 * w + 1]);
    }

    /// Issues S of the next key tile and P V of the one in hand, and makes P of the next while P V runs.
    template <bool first, bool masked>
    __device__ __forceinline__ void step(QueryTile& next, int key_tile, bool accumulate, float (&alpha)[2]) {
        m.k_full[k_ring.slot].wait(k_ring.parity);
        take_turn();
        issue_scores();
        m.v_full[v_ring.slot].wait(v_ring.parity);
        issue_output(accumulate);
        pass_turn();
        wgmma_wait<1>();
        keep(s);
        release(m.k_empty[k_ring.slot]);
        k_ring.advance();
        if (masked && key_tile >= next.whole) mask(key_tile * keys, next.row);
        next.softmax.template step<first>(s, alpha, in.scales);
        wgmma_wait<0>();
        keep(o);
        release(m.v_empty[v_ring.slot]);
        v_ring.advance();
    }

    template <bool masked>
    __device__ __forceinline__ void same_tile(QueryTile& tile, int key_tile, bool& accumulate) {
        float alpha[2];
        step<false, masked>(tile, key_tile, accumulate, alpha);
        pack_p();
#pragma unroll
        for (int i = 0; i < o_count; ++i) o[i] *= alpha[i / 2 % 2];
        accumulate = true;
    }

    __device__ __forceinline__ void run() {
        if (group == Tiles::consumers - 1) pass_turn();  // the first turn is group 0's
        QueryTile tile;
        if (!next_tile(tile)) return;
        m.k_full[k_ring.slot].wait(k_ring.parity);
        take_turn();
        issue_scores();
        pass_turn();
        wgmma_wait<0>();
        keep(s);
        release(m.k_empty[k_ring.slot]);
        k_ring.advance();
        if (tile.count > tile.whole) mask((tile.count - 1) * keys, tile.row);
        float none[2];
        tile.softmax.template step<true>(s, none, in.scales);
        pack_p();
        while (true) {
            bool accumulate = false;
            int key_tile = tile.count - 2;
            for (; key_tile >= tile.whole; --key_tile) same_tile<true>(tile, key_tile, accumulate);
            for (; key_tile >= 0; --key_tile) same_tile<false>(tile, key_tile, accumulate);
            release(m.q_empty[q_ring.slot]);
            q_ring.advance();
            QueryTile next;
            const bool more = next_tile(next);
            if (more) {
                step<true, true>(next, next.count - 1, accumulate, none);
            } else {
                m.v_full[v_ring.slot].wait(v_ring.parity);
                issue_output(accumulate);
                wgmma_wait<0>();
                keep(o);
            }
            store(tile);
            if (!more) return;
            pack_p();
            tile = next;
        }
    }

    __device__ __forceinline__ void store(const QueryTile& tile) const {
        const int t = threadIdx.x % 4;
        const TilePlace& at = tile.at;
        const Softmax& softmax = tile.softmax;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = tile.row + 8 * r;
            const float sum = softmax.joined(r);
            const bool empty = sum == 0 || sum != sum;
            const float inverse = empty ? 1.0f : __frcp_rn(sum);
            const std::int64_t begin = at.batch * in.o_batch + at.head * in.o_head + i * in.o_row;
            const bool inside = i < in.n_q;
            if (t == 0 && inside) {
                float log2_sum;
                asm("lg2.approx.f32 %0, %1;" : "=f"(log2_sum) : "f"(sum));
                // max scale + logf(sum), one fma; __logf is lg2.approx times ln 2 (special/lg2_approx.hpp).
                const float lse = fmaf(softmax.maximum[r], in.natural, log2_sum * 0.693147182464599609375f);
                in.lse[(static_cast<std::int64_t>(at.batch) * in.heads + at.head) * in.n_q + i] =
                    empty ? INFINITY : lse;
            }
#pragma unroll
            for (int c = 0; c < d / 32; ++c) {  // 32 columns: four groups of eight
                std::uint32_t words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float low = o[16 * c + 4 * j + 2 * r] * inverse;
                    const float high = o[16 * c + 4 * j + 2 * r + 1] * inverse;
                    words[j] = pack<T>(low, high);
                    if (in.o_unrounded != nullptr && inside)
                        *reinterpret_cast<float2*>(in.o_unrounded + begin + 32 * c + 8 * j + 2 * t) = {low, high};
                }
                const uint4 eight = transpose_quad(words, t);
                if (inside) *reinterpret_cast<uint4*>(in.o + begin + 32 * c + 8 * t) = eight;
            }
        }
    }
};

template <class T, class Tiles, class Variant>
__global__ void __launch_bounds__(Tiles::threads, 1) forward(const __grid_constant__ ForwardArguments<T> in) {
    extern __shared__ std::uint8_t dynamic[];
    auto& m = *reinterpret_cast<typename Tiles::Memory*>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);
    if (threadIdx.x == 0) {
        constexpr int warps = 4 * Tiles::consumers;  // each consuming warp says that it is done
        for (int i = 0; i < 2; ++i) {
            m.q_full[i].init(1);
            m.q_empty[i].init(warps);
        }
        for (int i = 0; i < Tiles::stages; ++i) {
            m.k_full[i].init(1);
            m.v_full[i].init(1);
            m.k_empty[i].init(warps);
            m.v_empty[i].init(warps);
        }
        fence_barrier_init();
    }
    __syncthreads();
    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        fewer_registers<Tiles::producer_registers>();
        if (threadIdx.x == 0) produce<T, Tiles>(in, m);
    } else {
        more_registers<Tiles::consumer_registers>();
        Consumer<T, Tiles, Variant>(in, m, warpgroup - 1).run();
    }
}

}  // namespace faultline::tensor_kernel
