// SPDX-License-Identifier: Apache-2.0
// The forward on Hopper's tensor cores: o = softmax(scale q k^T) v and lse, FlashAttention-style (arXiv 2307.08691,
// 2407.08608). One block a multiprocessor, which takes query tile after query tile:
//   - warpgroup 0 is the producer (forward_producer.cuh);
//   - the others are consumers, 64 rows of the query tile each. S of the next key tile, be it the first of the next query
//     tile, is issued before P V of this one, and its softmax runs beside that; the consumers take turns at issuing (a token
//     goes round), so that one's products run beside another's exponentials.
// Key tiles in descending order: those that the causal mask or the end of the keys cut come first.
// Query tiles: those with the most keys first, a few heads at a time whose keys and values stay in the second-level cache.
#pragma once

#include <cstdint>
#include <type_traits>

#include <faultline/tensor_kernel/forward_producer.cuh>
#include <faultline/tensor_kernel/recorder.cuh>
#include <faultline/tensor_kernel/wgmma.cuh>

namespace faultline::tensor_kernel {

/// What stands in a recorder's place multiplies (forward_scaling.cuh): it has no branches, and the factors of a query tile.
template <class Rec>
concept Scales = requires {
    Rec::scales;
};

template <class T, class Tiles, class Variant, class Rec>
struct Consumer {
    static constexpr bool alters_elements = Rec::alters && !Scales<Rec>;
    static constexpr ForwardVariant variant = Variant::value;
    static constexpr int d = Tiles::head_dim, keys = Tiles::block_k, s_count = keys / 2, o_count = d / 2;
    using Softmax = StreamingSoftmax<T, variant, keys, std::conditional_t<Rec::alters_state, double, float>>;
    const ForwardArguments<T>& in;
    typename Tiles::Memory& m;
    Rec recorder;
    int group;  ///< 0 to consumers - 1
    float s[s_count];
    float o[o_count];
    std::uint32_t p[keys / Tiles::k_step][4];
    Ring<2> q_ring;
    Ring<Tiles::stages> k_ring, v_ring;

    /// A query tile as this thread sees it.
    struct QueryTile : DescaledScales<T> {
        TilePlace at;
        int row;    ///< the first of this thread's two, which are 8 apart
        int count;  ///< key tiles
        int whole;  ///< key tiles that every row of the group sees whole
        Softmax softmax;
        typename Rec::Place place;
    };

    __device__ __forceinline__ Consumer(const ForwardArguments<T>& arguments, typename Tiles::Memory& memory,
                                        const typename Rec::Arguments& recording, typename Rec::Memory& recorded, int g)
        : in(arguments), m(memory), recorder(recording, recorded, threadIdx.x / 32 - 4), group(g) {}

    static constexpr int first_token = 1;  // named barriers 1, 2, …: group's turn
    __device__ __forceinline__ void take_turn() const { named_sync(first_token + group, 256); }
    __device__ __forceinline__ void pass_turn() const {
        named_arrive(first_token + (group + 1 == Tiles::consumers ? 0 : group + 1), 256);
    }
    __device__ __forceinline__ void release(Barrier& empty) const {
        if (threadIdx.x % 32 == 0) empty.arrive();
    }

    __device__ __forceinline__ void pack_probabilities() {
        if constexpr (Tiles::is_e4m3)
            pack_p_e4m3<keys>(s, p);
        else
            pack_p<T, keys>(s, p);
    }
    /// Of the keys' head that a query tile sees; 1 where the call has none.
    __device__ __forceinline__ float descale(const float* factors, const TilePlace& at) const {
        return factors == nullptr ? 1.0f : factors[at.batch * in.kv_heads + in.kv_head(at.head)];
    }

    /// Waits for the next query tile; false where there is none.
    __device__ __forceinline__ bool next_tile(QueryTile& tile) {
        m.q_full[q_ring.slot].wait(q_ring.parity);
        // Lane 0 alone reads it: it is the one who says, by an arrival, that the slot may be written again.
        const int number = uniform(threadIdx.x % 32 == 0 ? m.tile[q_ring.slot] : 0);
        if (number < 0) return false;
        tile.at = in.place(number);
        const int group_row = tile.at.q_tile * Tiles::block_q + group * 64;
        tile.row = group_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        tile.count = in.template key_tiles<keys>((tile.at.q_tile + 1) * Tiles::block_q);
        tile.whole = in.template whole_tiles<keys>(group_row);
        tile.softmax = Softmax{};
        if constexpr (Tiles::is_e4m3) {
            tile.natural = in.natural * (descale(in.q_descale, tile.at) * descale(in.k_descale, tile.at));
            tile.exponent = exponent_of(tile.natural);
        }
        if constexpr (Rec::records)
            tile.place = recorder.begin(tile.at.batch * in.heads + tile.at.head,
                                        group_row + threadIdx.x % 128 / 32 * 16, in.n_q);
        if constexpr (Scales<Rec>) tile.place = recorder.begin(tile.at.head);
        return true;
    }

    /// Scores that are complete become p, in s; the keys' slot is free when that is done.
    template <bool first, bool masked>
    __device__ __forceinline__ void scores_to_p(QueryTile& tile, int key_tile, float (&alpha)[2], ErrorSum (&sums)[4]) {
        if constexpr (Rec::records)
            if (sample::has_scores(tile.at.q_tile, key_tile))
                recorder.template scores<Tiles::block_q>(
                    tile.place, s, m.q[q_ring.slot], group * 64 + threadIdx.x % 128 / 32 * 16, m.k[k_ring.slot],
                    key_tile, in.visible(tile.row + 8 * tile.place.half()) - key_tile * keys);
        release(m.k_empty[k_ring.slot]);
        k_ring.advance();
        if (masked && key_tile >= tile.whole) mask_scores<keys>(in, s, key_tile * keys, tile.row);
        float kept[Rec::kept_scores];  // p takes the scores' place
        if constexpr (Rec::records) Rec::keep_scores(kept, s);
        if constexpr (Tiles::is_e4m3) {
            SoftmaxScales scales = in.scales;
            scales.exponent = tile.exponent;
            tile.softmax.template step<first>(s, alpha, scales);
        } else if constexpr (Rec::alters_state) {
            tile.softmax.template step<first>(
                s, alpha, in.scales,
                recorder.rows(tile.place, in, tile.at, tile.at.q_tile * Tiles::block_q, tile.row, key_tile * keys));
        } else {
            tile.softmax.template step<first>(s, alpha, in.scales);
        }
        if constexpr (Rec::records) {
            recorder.elements(tile.place, tile.softmax, kept, s, in.scales.exponent, sums);
            if (first) recorder.write_elements(tile.place, sums, key_tile);  // there is nothing to rescale yet
        }
        if constexpr (Rec::alters)
            recorder.probabilities(tile.place, in, tile.at, tile.at.q_tile * Tiles::block_q, tile.row, key_tile, s);
    }

    /// Issues s = q k^T of the next key tile.
    __device__ __forceinline__ void issue_scores() {
        if constexpr (Tiles::is_e4m3) {
            const auto* const rows = m.q[q_ring.slot] + group * 64 * d;
            const auto* const columns = m.k[k_ring.slot];
            const std::uint64_t q = d == 64 ? k_major_64(rows) : k_major(rows),
                                k = d == 64 ? k_major_64(columns) : k_major(columns);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < d / 32; ++i) WgmmaE4m3<keys>::ss(s, q + i * k_major_step, k + i * k_major_step, i > 0);
        } else {
            const std::uint64_t q = k_major(m.q[q_ring.slot] + group * 64 * 64), k = k_major(m.k[k_ring.slot]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < d / 16; ++i) {
                const int panel = i / 4, step = i % 4 * k_major_step;
                Wgmma<T, keys>::ss(s, q + panel * (Tiles::block_q * 128 / 16) + step,
                                   k + panel * (keys * 128 / 16) + step, i > 0);
            }
        }
        wgmma_commit();
    }
    /// Issues o (+)= p v of this key tile.
    __device__ __forceinline__ void issue_output(bool accumulate) {
        if constexpr (Tiles::is_e4m3) {
            const std::uint64_t v = k_major(m.v[v_ring.slot]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < keys / 32; ++i) WgmmaE4m3<d>::rs(o, p[i], v + i * k_major_step, i > 0 || accumulate);
        } else {
            const std::uint64_t v = mn_major(m.v[v_ring.slot], keys * 128);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < keys / 16; ++i)
                Wgmma<T, d>::template rs<1>(o, p[i], v + i * mn_major_step, i > 0 || accumulate);
        }
        wgmma_commit();
    }

    /// Issues S of the next key tile (of `next`) and P V of the one in hand (of `tile`), and makes P of the next while P V runs.
    template <bool first, bool masked>
    __device__ __forceinline__ void step(QueryTile& tile, int tile_in_hand, bool accumulate, QueryTile& next,
                                         int next_key_tile, float (&alpha)[2], ErrorSum (&sums)[4]) {
        before_output(tile, tile_in_hand, accumulate);
        m.k_full[k_ring.slot].wait(k_ring.parity);
        take_turn();
        issue_scores();
        m.v_full[v_ring.slot].wait(v_ring.parity);
        issue_output(accumulate);
        pass_turn();
        wgmma_wait<1>();
        keep(s);
        scores_to_p<first, masked>(next, next_key_tile, alpha, sums);
        finish_output(tile, tile_in_hand);
    }
    __device__ __forceinline__ void before_output(QueryTile& tile, int key_tile, bool accumulate) {
        if constexpr (Rec::records)
            if (sample::has_output(tile.at.q_tile, key_tile))
                recorder.before_output(tile.place, o, key_tile, accumulate);
    }
    __device__ __forceinline__ void finish_output(QueryTile& tile, int key_tile) {
        wgmma_wait<0>();
        keep(o);
        if constexpr (Rec::records)
            if (sample::has_output(tile.at.q_tile, key_tile))
                recorder.output(tile.place, o, p, m.v[v_ring.slot], key_tile);
        if constexpr (Rec::alters_state && alters_elements)
            recorder.output(tile.place, in, tile.at, tile.at.q_tile * Tiles::block_q, tile.row, key_tile * keys, o);
        if constexpr (Scales<Rec>) recorder.output(tile.place, in, tile.row, o);
        release(m.v_empty[v_ring.slot]);
        v_ring.advance();
        Softmax::hold_output(o, in.scales.state);
    }

    template <bool masked>
    __device__ __forceinline__ void same_tile(QueryTile& tile, int key_tile) {
        float alpha[2];
        ErrorSum sums[4];
        step<false, masked>(tile, key_tile + 1, key_tile + 2 < tile.count, tile, key_tile, alpha, sums);
        pack_probabilities();
        if constexpr (Rec::records) recorder.rescale(tile.place, o, alpha, sums, key_tile);
        Softmax::rescale(o, alpha, in.scales.state);
    }

    /// Takes query tiles until the producer says that there is none.
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
        float none[2];
        {
            ErrorSum sums[4];
            scores_to_p<true, true>(tile, tile.count - 1, none, sums);
        }
        pack_probabilities();
        while (true) {
            // All key tiles but the first, whose P is in hand, up to the P of the last.
            int key_tile = tile.count - 2;
            constexpr bool once = Rec::alters_state && alters_elements;  // what changes elements is compiled once
            const int whole = once ? 0 : tile.whole;
            for (; key_tile >= whole; --key_tile) same_tile<true>(tile, key_tile);
            if constexpr (!once)
                for (; key_tile >= 0; --key_tile) same_tile<false>(tile, key_tile);
            if constexpr (Scales<Rec>) recorder.keep(tile.at, in.q_tiles);
            const bool accumulate = tile.count > 1;
            release(m.q_empty[q_ring.slot]);
            q_ring.advance();
            QueryTile next;
            const bool more = next_tile(next);
            if (more) {
                ErrorSum sums[4];
                step<true, true>(tile, 0, accumulate, next, next.count - 1, none, sums);
            } else {
                before_output(tile, 0, accumulate);
                m.v_full[v_ring.slot].wait(v_ring.parity);
                issue_output(accumulate);
                finish_output(tile, 0);
            }
            store(tile);
            if (!more) return;
            pack_probabilities();
            tile = next;
        }
    }

    __device__ __forceinline__ void store(const QueryTile& tile) {
        float inverse[2];
        if constexpr (Tiles::is_e4m3)
            store_rows<OutputOf<T>, d>(in, in, tile.at, tile.row, tile.softmax, o, inverse, tile.natural,
                                       descale(in.v_descale, tile.at));
        else
            store_rows<T, d>(in, in, tile.at, tile.row, tile.softmax, o, inverse, in.natural);
        if constexpr (Rec::records) recorder.output_cast(tile.place, o, inverse);
        if constexpr (alters_elements) recorder.keep(tile.place, tile.at, in.q_tiles);
        if constexpr (Scales<Rec>) recorder.keep_output(tile.at, in.q_tiles);
    }
};

/// What a block has in shared memory.
template <class Tiles, class Rec>
struct BlockMemory : Tiles::Memory {
    typename Rec::Memory recorder;
    static constexpr int bytes =
        sizeof(typename Tiles::Memory) + sizeof(typename Rec::Memory) +
        2048;  // dynamic shared memory may begin off the alignment of 1024, the size is a multiple
};

/// A block's memory, its barriers ready for all threads.
template <class Tiles, class Rec>
__device__ __forceinline__ BlockMemory<Tiles, Rec>& begin_block() {
    extern __shared__ std::uint8_t dynamic[];
    auto& m = *reinterpret_cast<BlockMemory<Tiles, Rec>*>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);
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
        if constexpr (Rec::records)
            for (int i = 0; i < 8; ++i) m.recorder.eighths[i] = eighths_of_two[i];
    }
    __syncthreads();
    return m;
}

/// The kernel without a recorder; forward_beside.cuh has those with one.
template <class T, class Tiles, class Variant, class Rec>
__global__ void __launch_bounds__(Tiles::threads, 1)
    forward(const __grid_constant__ ForwardArguments<T> in, const __grid_constant__ typename Rec::Arguments recording) {
    if constexpr (Scales<Rec>) let_dependents_begin();  // first of all: the sequences of which nothing is recorded
    auto& m = begin_block<Tiles, Rec>();
    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        fewer_registers<Tiles::producer_registers>();
        if (threadIdx.x == 0) {
            produce<T, Tiles>(in, m, [](int) { return false; });
            if constexpr (Scales<Rec>) wait_for_dependency();
        }
    } else {
        more_registers<Tiles::consumer_registers>();
        Consumer<T, Tiles, Variant, Rec>(in, m, recording, m.recorder, warpgroup - 1).run();
    }
}

}  // namespace faultline::tensor_kernel
