// SPDX-License-Identifier: Apache-2.0
// The forward with a recorder: two kernels beside each other. The first takes the query tiles that are looked at, in few blocks; the
// second, the plain kernel for all others, begins beside it, takes the multiprocessors that are free, and the rest when the first
// kernel's blocks end. (docs/results/tensor-kernel-forward.md has what else was tried.)
#pragma once

#include <faultline/tensor_kernel/forward.cuh>

namespace faultline::tensor_kernel {

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

/// A consumer that takes one key tile after another, where Consumer has the next tile's scores beside this one's output: the same
/// numbers by half of the code. Alone, few blocks take as long either way; beside the plain kernel these cost less
/// (docs/results/tensor-kernel-forward.md).
template <class T, class Tiles, class Variant, class Rec>
struct StepwiseConsumer : Consumer<T, Tiles, Variant, Rec> {
    using Base = Consumer<T, Tiles, Variant, Rec>;
    using Base::Base, Base::in, Base::k_ring, Base::m, Base::o, Base::q_ring, Base::recorder, Base::s, Base::v_ring;

    __device__ __forceinline__ void run() {
        typename Base::QueryTile tile;
        while (this->next_tile(tile)) {
            const int last = tile.count - 1;
#pragma unroll
            for (float& x : o) x = 0;
#pragma unroll 1
            for (int key_tile = last; key_tile >= 0; --key_tile) {
                const bool first = key_tile == last;
                float alpha[2];
                ErrorSum sums[4];
                m.k_full[k_ring.slot].wait(k_ring.parity);
                this->issue_scores();
                wgmma_wait<0>();
                keep(s);
                // Before the first key tile the maxima are -inf and the sums 0: alpha is 0, and a row's sum its first term.
                this->template scores_to_p<false, true>(tile, key_tile, alpha, sums);
                this->pack_probabilities();
                if (first)
                    recorder.write_elements(tile.place, sums, key_tile);  // there is nothing to rescale yet
                else
                    recorder.rescale(tile.place, o, alpha, sums, key_tile);
                Base::Softmax::rescale(o, alpha, in.scales.state);
                this->before_output(tile, key_tile, !first);
                m.v_full[v_ring.slot].wait(v_ring.parity);
                this->issue_output(!first);
                this->finish_output(tile, key_tile);
            }
            this->release(m.q_empty[q_ring.slot]);
            q_ring.advance();
            this->store(tile);
        }
    }
};

/// The query tiles that Rec looks at. Begins beside the kernel before it, and waits for that before it reads anything.
template <class T, class Tiles, class Variant, class Rec, bool stepwise>
__global__ void __launch_bounds__(Tiles::threads, 1)
    forward_recorded(const __grid_constant__ ForwardArguments<T> in,
                     const __grid_constant__ typename Rec::Arguments recording) {
    auto& m = begin_block<Tiles, Rec>();
    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        fewer_registers<40>();  // it looks for its tiles
        if (threadIdx.x < 32) {
            wait_for_dependency();
            let_dependents_begin();  // not sooner: the others do not wait for what this kernel waited for
            produce_recorded<T, Tiles, Rec>(in, m, recording);
        }
    } else {
        more_registers<232>();
        using Consuming =
            std::conditional_t<stepwise, StepwiseConsumer<T, Tiles, Variant, Rec>, Consumer<T, Tiles, Variant, Rec>>;
        Consuming(in, m, recording, m.recorder, warpgroup - 1).run();
    }
}

/// The plain kernel for the query tiles that Rec does not look at. A kernel of its own: with both loops in one, the plain one took
/// 2.4% more time. It reads q, k and v without a wait of its own: it begins when each block of the kernel above has waited for
/// whatever wrote them, so that that has ended by then.
template <class T, class Tiles, class Variant, class Rec>
__global__ void __launch_bounds__(Tiles::threads, 1)
    forward_others(const __grid_constant__ ForwardArguments<T> in,
                   const __grid_constant__ typename Rec::Arguments recording) {
    auto& m = begin_block<Tiles, NoRecorder>();
    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        fewer_registers<Tiles::producer_registers>();
        if (threadIdx.x == 0) {
            produce<T, Tiles>(in, m, [&](int tile) { return is_looked_at<T, Rec>(in, recording, tile); });
            wait_for_dependency();
        }
    } else {
        more_registers<Tiles::consumer_registers>();
        Consumer<T, Tiles, Variant, NoRecorder>(in, m, {}, m.recorder, warpgroup - 1).run();
    }
}

}  // namespace faultline::tensor_kernel
