// SPDX-License-Identifier: Apache-2.0
// The forward with a recorder: two kernels beside each other. The first takes the query tiles that are looked at, in few blocks; the
// second, the plain kernel for all others, begins beside it, takes the multiprocessors that are free, and the rest when the first
// kernel's blocks end. (docs/results/tensor-kernel-forward.md has what else was tried.)
#pragma once

#include <faultline/tensor_kernel/forward.cuh>

namespace faultline::tensor_kernel {

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

/// The query tiles that Rec looks at.
template <class T, class Tiles, class Variant, class Rec>
__global__ void __launch_bounds__(Tiles::threads, 1)
    forward_recorded(const __grid_constant__ ForwardArguments<T> in,
                     const __grid_constant__ typename Rec::Arguments recording) {
    let_dependents_begin();  // first of all: until then the multiprocessors of the others idle
    auto& m = begin_block<Tiles, Rec>();
    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        fewer_registers<40>();  // it looks for its tiles
        if (threadIdx.x < 32) produce_recorded<T, Tiles, Rec>(in, m, recording);
    } else {
        more_registers<232>();
        Consumer<T, Tiles, Variant, Rec>(in, m, recording, m.recorder, warpgroup - 1).run();
    }
}

/// The plain kernel for the query tiles that Rec does not look at. A kernel of its own: with both loops in one, the plain one took
/// 2.4% more time.
template <class T, class Tiles, class Variant, class Rec>
__global__ void __launch_bounds__(Tiles::threads, 1)
    forward_others(const __grid_constant__ ForwardArguments<T> in,
                   const __grid_constant__ typename Rec::Arguments recording) {
    auto& m = begin_block<Tiles, NoRecorder>();
    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        fewer_registers<Tiles::producer_registers>();
        if (threadIdx.x == 0) {
            produce_others<T, Tiles, Rec>(in, m, recording);
            wait_for_dependency();
        }
    } else {
        more_registers<Tiles::consumer_registers>();
        Consumer<T, Tiles, Variant, NoRecorder>(in, m, {}, m.recorder, warpgroup - 1).run();
    }
}

}  // namespace faultline::tensor_kernel
