// SPDX-License-Identifier: Apache-2.0
// The producer of the forward on Hopper: copies Q, K and V tiles into shared memory, some stages ahead of the consumers, and
// draws the numbers of query tiles.
#pragma once

#include <cstdint>

#include <faultline/tensor_kernel/forward_tiles.cuh>

namespace faultline::tensor_kernel {

/// One thread's.
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
        // Of v in e4m3 the rows are the head's columns.
        const bool by_columns = Tiles::is_e4m3 && &map == &in.v;
        const int key = key_tile * Tiles::block_k;
        load_tile(slots[ring.slot], &map, full[ring.slot], by_columns ? key : 0, by_columns ? 0 : key, 0, kv_head,
                  batch);
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

/// Every query tile that `is_elsewhere(tile)` does not name, by all blocks of the launch together.
template <class T, class Tiles, class IsElsewhere>
__device__ __forceinline__ void produce(const ForwardArguments<T>& in, typename Tiles::Memory& m,
                                        const IsElsewhere& is_elsewhere) {
    Producer<T, Tiles> producer(in, m);
    producer.prefetch();
    for (int tile = blockIdx.x; tile < in.tiles;) {
        const int drawn = atomicAdd(in.next, 1);
        if (!is_elsewhere(tile)) producer.query_tile(tile);
        // Each block draws until it gets a number past the end; the last to draw at all puts the counter back.
        if (drawn == in.tiles - 1) *in.next = 0;
        tile = gridDim.x + drawn;
    }
    producer.end();
}

}  // namespace faultline::tensor_kernel
