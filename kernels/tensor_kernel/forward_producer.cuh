// SPDX-License-Identifier: Apache-2.0
// The producer of the forward on Hopper: copies Q, K and V tiles into shared memory, some stages ahead of the consumers, and
// draws the numbers of query tiles.
#pragma once

#include <cstdint>

#include <faultline/tensor_kernel/forward_tiles.cuh>

namespace faultline::tensor_kernel {

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
        const TilePlace at = in.place(tile);
        const int kv_head = in.kv_head(at.head);
        m.tile[q_ring.slot] = tile;
        m.q_full[q_ring.slot].arrive_expect(sizeof m.q[0]);
        load_tile(m.q[q_ring.slot], &in.q, m.q_full[q_ring.slot], 0, at.q_tile * Tiles::block_q, 0, at.head, at.batch);
        q_ring.advance();
        const auto load = [&](Ring<Tiles::stages>& ring, auto& slots, Barrier* full, Barrier* empty,
                              const CUtensorMap& map, int key_tile) {
            empty[ring.slot].wait(ring.parity ^ 1);
            full[ring.slot].arrive_expect(sizeof slots[0]);
            if constexpr (Tiles::is_e4m3)
                if (&map == &in.v) {  // its rows are the head's columns
                    load_tile(slots[ring.slot], &map, full[ring.slot], key_tile * Tiles::block_k, 0, 0, kv_head,
                              at.batch);
                    ring.advance();
                    return;
                }
            load_tile(slots[ring.slot], &map, full[ring.slot], 0, key_tile * Tiles::block_k, 0, kv_head, at.batch);
            ring.advance();
        };
        for (int key_tile = in.template key_tiles<Tiles::block_k>((at.q_tile + 1) * Tiles::block_q) - 1; key_tile >= 0;
             --key_tile) {
            load(k_ring, m.k, m.k_full, m.k_empty, in.k, key_tile);
            load(v_ring, m.v, m.v_full, m.v_empty, in.v, key_tile);
        }
        // Each block draws until it gets a number past the end; the last to draw at all puts the counter back.
        if (drawn == in.tiles - 1) *in.next = 0;
        tile = gridDim.x + drawn;
    }
}

/// What produce() does, in parts, for a kernel with a recorder. (produce() itself stays: made of these its instructions were
/// others, and the plain kernel's are not to depend on the recorder.)
template <class T, class Tiles>
struct Producer {
    const ForwardArguments<T>& in;
    typename Tiles::Memory& m;
    Ring<2> q_ring;
    Ring<Tiles::stages> k_ring, v_ring;

    __device__ __forceinline__ Producer(const ForwardArguments<T>& arguments, typename Tiles::Memory& memory)
        : in(arguments), m(memory) {}

    __device__ __forceinline__ void prefetch() const {
        prefetch_map(&in.q);
        prefetch_map(&in.k);
        prefetch_map(&in.v);
    }
    template <class Slots>
    __device__ __forceinline__ void load(Ring<Tiles::stages>& ring, Slots& slots, Barrier* full, Barrier* empty,
                                         const CUtensorMap& map, int key_tile, int kv_head, int batch) {
        empty[ring.slot].wait(ring.parity ^ 1);  // the first pass finds every slot empty
        full[ring.slot].arrive_expect(sizeof slots[0]);
        load_tile(slots[ring.slot], &map, full[ring.slot], 0, key_tile * Tiles::block_k, 0, kv_head, batch);
        ring.advance();
    }
    __device__ __forceinline__ void query_tile(int tile) {
        m.q_empty[q_ring.slot].wait(q_ring.parity ^ 1);
        const TilePlace at = in.place(tile);
        const int kv_head = in.kv_head(at.head);
        m.tile[q_ring.slot] = tile;
        m.q_full[q_ring.slot].arrive_expect(sizeof m.q[0]);
        load_tile(m.q[q_ring.slot], &in.q, m.q_full[q_ring.slot], 0, at.q_tile * Tiles::block_q, 0, at.head, at.batch);
        q_ring.advance();
        for (int key_tile = in.template key_tiles<Tiles::block_k>((at.q_tile + 1) * Tiles::block_q) - 1; key_tile >= 0;
             --key_tile) {
            load(k_ring, m.k, m.k_full, m.k_empty, in.k, key_tile, kv_head, at.batch);
            load(v_ring, m.v, m.v_full, m.v_empty, in.v, key_tile, kv_head, at.batch);
        }
    }
    /// Says that there is no further tile.
    __device__ __forceinline__ void end() {
        m.q_empty[q_ring.slot].wait(q_ring.parity ^ 1);
        m.tile[q_ring.slot] = -1;
        m.q_full[q_ring.slot].arrive();
        q_ring.advance();
    }
};

/// Whether a kernel with a recorder looks at a query tile.
template <class T, class Rec>
__device__ __forceinline__ bool is_looked_at(const ForwardArguments<T>& in, const typename Rec::Arguments& recording,
                                             int tile) {
    const TilePlace at = in.place(tile);
    return Rec::looks_at(recording, at.batch * in.heads + at.head, at.q_tile);
}

/// The producing warp of a block that records. It finds its query tiles in parts of `part` tiles, a lane each, drawn like tiles.
template <class T, class Tiles, class Rec>
__device__ __forceinline__ void produce_recorded(const ForwardArguments<T>& in, typename Tiles::Memory& m,
                                                 const typename Rec::Arguments& recording) {
    const int lane = threadIdx.x;
    Producer<T, Tiles> producer(in, m);
    if (lane == 0) producer.prefetch();
    const int parts = (in.tiles + recording.part - 1) / recording.part;
    for (int part = blockIdx.x; part < parts;) {
        int drawn = 0;
        if (lane == 0) drawn = atomicAdd(in.next + 1, 1);
        const int first = part * recording.part, tile = first + lane;
        const bool mine = lane < recording.part && tile < in.tiles;
        std::uint32_t found = __ballot_sync(~0u, mine && is_looked_at<T, Rec>(in, recording, tile));
        if (lane == 0) {
            for (; found != 0; found &= found - 1) producer.query_tile(first + __ffs(found) - 1);
            if (drawn == parts - 1) in.next[1] = 0;
        }
        part = gridDim.x + __shfl_sync(~0u, drawn, 0);
    }
    if (lane == 0) producer.end();
}

/// The producing thread of a block that takes the query tiles that nobody looks at, in the order in which such blocks draw them.
template <class T, class Tiles, class Rec>
__device__ __forceinline__ void produce_others(const ForwardArguments<T>& in, typename Tiles::Memory& m,
                                               const typename Rec::Arguments& recording) {
    Producer<T, Tiles> producer(in, m);
    producer.prefetch();
    for (int tile = blockIdx.x; tile < in.tiles;) {
        const int drawn = atomicAdd(in.next, 1);
        if (!is_looked_at<T, Rec>(in, recording, tile)) producer.query_tile(tile);
        // Each block draws until it gets a number past the end; the last to draw at all puts the counter back.
        if (drawn == in.tiles - 1) *in.next = 0;
        tile = gridDim.x + drawn;
    }
    producer.end();
}

}  // namespace faultline::tensor_kernel
