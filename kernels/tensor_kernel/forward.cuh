// SPDX-License-Identifier: Apache-2.0
// The forward on Hopper's tensor cores: o = softmax(scale q k^T) v and lse, FlashAttention-style (arXiv 2307.08691,
// 2407.08608). One block a multiprocessor, which takes query tile after query tile:
//   - warpgroup 0 is the producer: one thread copies Q, K and V tiles into shared memory (two stages of K and of V) and draws
//     the next tile's number;
//   - the others are consumers, 64 rows of the query tile each. S of the next key tile is issued before the softmax of this
//     one, and P V of this one runs beside it; the consumers take turns at issuing (a token goes round), so that one's
//     products run beside another's exponentials.
// Key tiles in descending order: those that the causal mask or the end of the keys cut come first.
// Query tiles: those with the most keys first, a few heads at a time whose keys and values stay in the second-level cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include <faultline/tensor_kernel/softmax.cuh>
#include <faultline/tensor_kernel/wgmma.cuh>

namespace faultline::tensor_kernel {

template <class T, int d, int consumer_groups, int keys = 128>
struct ForwardTiles {
    static constexpr int head_dim = d, consumers = consumer_groups;
    static constexpr int block_q = 64 * consumers, block_k = keys, stages = 2, panels = d / 64;
    static constexpr int threads = 128 * (consumers + 1);
    // setmaxnreg: the sum over warpgroups is what the launch allots, 65536/threads rounded down to 8.
    static constexpr int producer_registers = consumers == 2 ? 24 : 32, consumer_registers = consumers == 2 ? 240 : 160;

    struct Memory {
        alignas(1024) T q[panels * block_q * 64];
        alignas(1024) T k[stages][panels * block_k * 64];
        alignas(1024) T v[stages][panels * block_k * 64];
        Barrier q_full, q_empty, k_full[stages], k_empty[stages], v_full[stages], v_empty[stages];
        int tile;  ///< comes and goes with q
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

/// Key tiles that rows before `end` reach.
template <int block_k, class T>
__device__ __forceinline__ int key_tiles(const ForwardArguments<T>& in, int end) {
    const int visible = in.causal ? max(0, min(in.n_k, min(end, in.n_q) + in.n_k - in.n_q)) : in.n_k;
    return (visible + block_k - 1) / block_k;
}

/// A position in a ring of two slots and the parity of its pass.
struct Ring {
    int slot = 0;
    std::uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        slot ^= 1;
        parity ^= slot == 0;
    }
};

template <class T, class Tiles>
__device__ __forceinline__ void produce(const ForwardArguments<T>& in, typename Tiles::Memory& m) {
    constexpr std::uint32_t q_bytes = sizeof m.q, k_bytes = sizeof m.k[0];
    prefetch_map(&in.q);
    prefetch_map(&in.k);
    prefetch_map(&in.v);
    Ring k_ring, v_ring;
    std::uint32_t q_parity = 1;  // the first wait finds every slot empty
    int tile = blockIdx.x;
    while (true) {
        m.q_empty.wait(q_parity);
        q_parity ^= 1;
        if (tile >= in.tiles) {
            m.tile = -1;
            m.q_full.arrive();
            return;
        }
        const int drawn = atomicAdd(in.next, 1);
        const TilePlace at = place(in, tile);
        const int kv_head = at.head / (in.heads / in.kv_heads);
        m.tile = tile;
        m.q_full.arrive_expect(q_bytes);
        load_tile(m.q, &in.q, m.q_full, 0, at.q_tile * Tiles::block_q, 0, at.head, at.batch);
        const auto load_k = [&](int key_tile) {
            m.k_empty[k_ring.slot].wait(k_ring.parity ^ 1);
            m.k_full[k_ring.slot].arrive_expect(k_bytes);
            load_tile(m.k[k_ring.slot], &in.k, m.k_full[k_ring.slot], 0, key_tile * Tiles::block_k, 0, kv_head,
                      at.batch);
            k_ring.advance();
        };
        const auto load_v = [&](int key_tile) {
            m.v_empty[v_ring.slot].wait(v_ring.parity ^ 1);
            m.v_full[v_ring.slot].arrive_expect(k_bytes);
            load_tile(m.v[v_ring.slot], &in.v, m.v_full[v_ring.slot], 0, key_tile * Tiles::block_k, 0, kv_head,
                      at.batch);
            v_ring.advance();
        };
        const int count = key_tiles<Tiles::block_k>(in, (at.q_tile + 1) * Tiles::block_q);
        if (count > 0) load_k(count - 1);
        for (int key_tile = count - 2; key_tile >= 0; --key_tile) {
            load_k(key_tile);
            load_v(key_tile + 1);
        }
        if (count > 0) load_v(0);
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
    const ForwardArguments<T>& in;
    typename Tiles::Memory& m;
    int group;  ///< 0 to consumers - 1
    float s[s_count];
    float o[o_count];
    std::uint32_t p[keys / 16][4];
    Ring k_ring, v_ring;

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

    /// Issues s = q k^T of the next key tile.
    __device__ __forceinline__ void issue_scores() {
        const std::uint64_t q = k_major(m.q + group * 64 * 64), k = k_major(m.k[k_ring.slot]);
#pragma unroll
        for (int i = 0; i < d / 16; ++i) {
            const int panel = i / 4, step = i % 4 * k_major_step;
            Wgmma<T, keys>::ss(s, q + panel * (Tiles::block_q * 128 / 16) + step, k + panel * (keys * 128 / 16) + step,
                               i > 0);
        }
        wgmma_commit();
    }
    /// Issues o += p v of this key tile.
    __device__ __forceinline__ void issue_output(bool accumulate) {
        const std::uint64_t v = mn_major(m.v[v_ring.slot], keys * 128);
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

    template <bool masked>
    __device__ __forceinline__ void step(int key_tile, int row, bool accumulate,
                                         StreamingSoftmax<T, variant, keys>& softmax) {
        m.k_full[k_ring.slot].wait(k_ring.parity);
        take_turn();
        wgmma_fence();
        issue_scores();
        m.v_full[v_ring.slot].wait(v_ring.parity);
        wgmma_fence();
        issue_output(accumulate);
        pass_turn();
        wgmma_wait<1>();
        keep(s);
        release(m.k_empty[k_ring.slot]);
        k_ring.advance();
        if (masked) mask(key_tile * keys, row);
        float alpha[2];
        softmax.template step<false>(s, alpha, in.scales);
        softmax.finish_before_what_follows();
        wgmma_wait<0>();
        keep(o);
        release(m.v_empty[v_ring.slot]);
        v_ring.advance();
        pack_p();
#pragma unroll
        for (int i = 0; i < o_count; ++i) o[i] *= alpha[i / 2 % 2];
    }

    __device__ __forceinline__ void run() {
        if (group == Tiles::consumers - 1) pass_turn();  // the first turn is group 0's
        for (std::uint32_t parity = 0;; parity ^= 1) {
            m.q_full.wait(parity);
            const int tile = m.tile;
            if (tile < 0) return;
            query_tile(place(in, tile));
        }
    }

    __device__ __forceinline__ void query_tile(const TilePlace& at) {
        const int lane = threadIdx.x % 32;
        const int group_row = at.q_tile * Tiles::block_q + group * 64;
        const int row = group_row + threadIdx.x % 128 / 32 * 16 + lane / 4;
        const int count = key_tiles<keys>(in, (at.q_tile + 1) * Tiles::block_q);
        // Key tiles that every row of the group sees whole.
        const int whole = (in.causal ? max(0, min(in.n_k, group_row + in.n_k - in.n_q + 1)) : in.n_k) / Tiles::block_k;
        StreamingSoftmax<T, variant, keys> softmax;
        if (count == 0) {
            release(m.q_empty);
#pragma unroll
            for (float& x : o) x = 0;
        } else {
            m.k_full[k_ring.slot].wait(k_ring.parity);
            take_turn();
            wgmma_fence();
            issue_scores();
            pass_turn();
            wgmma_wait<0>();
            keep(s);
            release(m.k_empty[k_ring.slot]);
            k_ring.advance();
            if (count > whole) mask((count - 1) * keys, row);
            float alpha[2];
            softmax.template step<true>(s, alpha, in.scales);
            pack_p();
            int key_tile = count - 2;
            bool accumulate = false;
            for (; key_tile >= whole; --key_tile) {
                step<true>(key_tile, row, accumulate, softmax);
                accumulate = true;
            }
            for (; key_tile >= 0; --key_tile) {
                step<false>(key_tile, row, accumulate, softmax);
                accumulate = true;
            }
            release(m.q_empty);
            m.v_full[v_ring.slot].wait(v_ring.parity);
            wgmma_fence();
            issue_output(accumulate);
            wgmma_wait<0>();
            keep(o);
            release(m.v_empty[v_ring.slot]);
            v_ring.advance();
        }
        store(at, row, softmax);
    }

    __device__ __forceinline__ void store(const TilePlace& at, int row,
                                          const StreamingSoftmax<T, variant, keys>& softmax) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = row + 8 * r;
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
        m.q_full.init(1);
        m.q_empty.init(warps);
        for (int i = 0; i < Tiles::stages; ++i) {
            m.k_full[i].init(1);
            m.v_full[i].init(1);
            m.k_empty[i].init(warps);
            m.v_empty[i].init(warps);
        }
        fence_barrier_init();
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        fewer_registers<Tiles::producer_registers>();
        if (threadIdx.x == 0) produce<T, Tiles>(in, m);
    } else {
        more_registers<Tiles::consumer_registers>();
        Consumer<T, Tiles, Variant>(in, m, warpgroup - 1).run();
    }
}

}  // namespace faultline::tensor_kernel
