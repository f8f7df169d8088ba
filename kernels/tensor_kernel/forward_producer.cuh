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

}  // namespace faultline::tensor_kernel
