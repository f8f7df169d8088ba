// SPDX-License-Identifier: Apache-2.0
// The backward on Hopper's tensor cores: dq, dk, dv of o = softmax(scale q k^T) v from dO, lse and delta, FlashAttention-style
// (arXiv 2307.08691, 2407.08608). One block takes 128 keys and goes over the query tiles that see them, of every query head
// that shares the keys:
//   - warpgroup 0: one thread copies K, V and, two stages deep, Q, dO, lse and delta into shared memory; where dq is summed in
//     a fixed order, one adds finished dq tiles to memory by bulk copies;
//   - warpgroups 1 and 2 own 64 keys each. They hold the scores transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and
//     dS^T, cast, are the left operands of dV += P^T dO and dK += dS^T Q in the registers in which they were computed. dS^T
//     goes to shared memory for dQ = dS K, of which each warpgroup computes 64 x 64 and, where any order will do, adds it to
//     memory from its registers.
// The score products of 64 queries are one step. Head size 64 has tiles of 128 queries, two steps, and registers enough to
// have the products of the next step in flight; head size 128 has tiles of 64.
#pragma once

#include <cstdint>

#include <faultline/tensor_kernel/backward_elements.cuh>
#include <faultline/tensor_kernel/wgmma.cuh>

namespace faultline::tensor_kernel {

template <class T, class Tiles, class Variant, class Rec>
class BackwardConsumer : BackwardElements<T, Tiles, Variant, Rec> {
    using Elements = BackwardElements<T, Tiles, Variant, Rec>;
    using Elements::correction, Elements::first_row, Elements::matrix_address, Elements::probabilities,
        Elements::score_gradients, Elements::stage, Elements::step_of, Elements::store_watched, Elements::watch;
    using Elements::in_, Elements::m_, Elements::step_, Elements::which_;
    friend Rec;
    using typename Elements::Step;
    static constexpr BackwardVariant variant = Variant::value;
    static constexpr int d = Tiles::head_dim, block_q = Tiles::block_q, block_k = Tiles::block_k;
    using Product = Wgmma<T, 64>;

  public:
    __device__ __forceinline__ BackwardConsumer(const BackwardArguments& in, const typename Rec::Arguments& recording,
                                                typename Tiles::Memory& m, int which)
        : Elements{in, recording, m, which} {}

    /// number: of the block's key tile (KeyTile).
    __device__ __forceinline__ void run(int number) {
        const KeyTile<Tiles> tile(in_, number);
        if constexpr (Rec::alters) Rec::begin(*this, tile);
#pragma unroll
        for (int i = 0; i < d / 2; ++i) dv_[i] = dk_[i] = 0;
        const int count = (tile.end_q - tile.first_q) * in_.group;
        m_.k_full.wait(0);
        if (count > 0) {
            m_.v_full.wait(0);
            if constexpr (Tiles::steps == 1)
                one_step(tile, count);
            else
                two_steps(tile, count);
        }
        store_watched(tile);
        store(tile);
    }

  private:
    /// s = k q^T of this warpgroup's 64 keys and 64 queries. Issued, not waited for.
    __device__ __forceinline__ void scores(float (&s)[32], unsigned stage, int half) {
        multiply(s, m_.k + which_ * 64 * 64, m_.q[stage] + half * 64 * 64);
    }
    __device__ __forceinline__ void gradients_of_p(float (&dp)[32], unsigned stage, int half) {
        multiply(dp, m_.v + which_ * 64 * 64, m_.dout[stage] + half * 64 * 64);
    }
    __device__ __forceinline__ void multiply(float (&x)[32], const T* keys, const T* queries) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < d / 16; ++i)
            Product::template ss<0, 0>(x, k_major(keys + i / 4 * block_k * 64) + i % 4 * k_major_step,
                                       k_major(queries + i / 4 * block_q * 64) + i % 4 * k_major_step, i > 0);
        wgmma_commit();
    }
    /// x += fragment rows: 64 keys, 64 queries of the tile, all of d.
    __device__ __forceinline__ void add_product(float (&x)[d / 2], const Fragment& left, const T* queries, int half) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            Wgmma<T, d>::template rs<1>(
                x, left[i], mn_major(queries, block_q * 64 * sizeof(T)) + (half * 4 + i) * mn_major_step, 1);
    }
    /// dq = ds k: queries and columns of head_dim that are this warpgroup's. A projection is a second ds, in the other buffer.
    __device__ __forceinline__ void multiply_dq(float (&dq)[32]) {
        named_sync(1, 256);  // both warpgroups' ds is there
        const T* const k = m_.k + (Tiles::panels == 2 ? which_ * block_k * 64 : 0);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < (variant.projected ? 2 : 1); ++part) {
            const T* const ds =
                m_.ds[variant.projected ? part : step_ & 1] + (Tiles::steps == 2 ? which_ * block_k * 64 : 0);
#pragma unroll
            for (int i = 0; i < block_k / 16; ++i)
                Product::template ss<1, 1>(dq, mn_major(ds, 0) + i * mn_major_step, mn_major(k, 0) + i * mn_major_step,
                                           part + i > 0);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void store_ds(const Fragment& ds, int half, int buffer) {
#pragma unroll
        for (int i = 0; i < 4; ++i) store_matrices(matrix_address(m_.ds[buffer], half * 8 + 2 * i), ds[i]);
    }
    [[nodiscard]] __device__ __forceinline__ int ds_buffer() const { return variant.projected ? 0 : step_ & 1; }

    /// dq of this warpgroup: accumulator columns 8c to 8c+7 of all threads are 512 floats in a row.
    __device__ __forceinline__ void add_dq(const float (&dq)[32], const KeyTile<Tiles>& tile, int q_tile, int g) {
        const int at = which_ * 4096 + threadIdx.x % 128 * 4;
        if (in_.turn == nullptr) {
            const std::int64_t block = static_cast<std::int64_t>(tile.head * in_.group + g) * in_.q_tiles + q_tile;
            float* const to = in_.dq + block * (block_q * d) + at;
#pragma unroll
            for (int c = 0; c < 8; ++c)
                add_four(to + 512 * c, make_float4(dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]));
        } else {
            m_.dq_empty.wait((step_ & 1) ^ 1);
#pragma unroll
            for (int c = 0; c < 8; ++c)
                *reinterpret_cast<float4*>(m_.dq + at + 512 * c) =
                    make_float4(dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]);
            fence_proxy_async();
            m_.dq_full.arrive();
        }
    }
    /// Every thread says so of what it has read of lse and delta. One arrival for a warp, behind a __syncwarp(), is no faster,
    /// and racecheck does not follow it (docs/results/tensor-kernel-backward.md).
    __device__ __forceinline__ void release(unsigned stage) { m_.tile_empty[stage].arrive(); }
    __device__ __forceinline__ void wait_for_q(unsigned step) {
        m_.q_full[step % Tiles::stages].wait(step / Tiles::stages & 1);
    }
    __device__ __forceinline__ void wait_for_dout(unsigned step) {
        m_.dout_full[step % Tiles::stages].wait(step / Tiles::stages & 1);
    }

    /// Head size 128: a tile of 64 queries is one step. dq before dk, so that dq's way out runs beside dk.
    __device__ __forceinline__ void one_step(const KeyTile<Tiles>& tile, int count) {
        int q_tile = tile.first_q, g = 0;
        for (int left = count; left > 0; --left, ++step_) {
            const unsigned stage = this->stage();
            float s[32], dp[32], dq[32];
            Fragment p, ds, rest;
            Step step = step_of(tile, q_tile, g, 0);
            wait_for_q(step_);
            scores(s, stage, 0);
            wait_for_dout(step_);
            gradients_of_p(dp, stage, 0);
            wgmma_wait<1>();
            keep(s);
            probabilities(s, tile, step);
            wgmma_wait<0>();
            keep(dp);
            score_gradients(s, dp, tile, step);
            cast<T>(s, p);
            keep(p);
            keep(dv_);
            wgmma_fence();
            add_product(dv_, p, m_.dout[stage], 0);
            wgmma_commit();
            cast<T>(dp, ds);
            if constexpr (variant.projected) {
                named_sync(1, 256);  // the last tile's ds has been read
                correction(p, rest, tile, q_tile * block_q, 0);
                store_ds(rest, 0, 1);
            }
            watch(ds, rest);
            store_ds(ds, 0, ds_buffer());
            fence_proxy_async();
            multiply_dq(dq);
            keep(ds);
            if constexpr (variant.projected) keep(rest);
            keep(dk_);
            wgmma_fence();
            add_product(dk_, ds, m_.q[stage], 0);
            if constexpr (variant.projected) add_product(dk_, rest, m_.q[stage], 0);
            wgmma_commit();
            wgmma_wait<1>();
            keep(p);
            keep(dv_);
            keep(dq);
            add_dq(dq, tile, q_tile, g);
            wgmma_wait<0>();
            keep(ds);
            if constexpr (variant.projected) keep(rest);
            keep(dk_);
            release(stage);
            if (++q_tile == tile.end_q) {
                q_tile = tile.first_q;
                ++g;
            }
        }
    }

    /// Head size 64: a tile of 128 queries is two steps. The first step's products of the next tile run beside dq's way out.
    __device__ __forceinline__ void two_steps(const KeyTile<Tiles>& tile, int count) {
        float first[32], second[32], dp[32];
        int q_tile = tile.first_q, g = 0;
        wait_for_q(step_);
        scores(first, stage(), 0);
        wait_for_dout(step_);
        gradients_of_p(dp, stage(), 0);
        wgmma_wait<1>();
        for (int left = count;;) {
            const unsigned stage = this->stage();
            float dq[32];
            Fragment p, ds, rest;
            Step step = step_of(tile, q_tile, g, 0);
            const auto finish_step = [&](float(&s)[32], Step& step) {
                const int half = step.half;
                score_gradients(s, dp, tile, step);
                cast<T>(s, p);
                cast<T>(dp, ds);
                if constexpr (variant.projected) {
                    if (half == 0) named_sync(1, 256);  // the last tile's ds has been read
                    correction(p, rest, tile, q_tile * block_q + half * 64, half);
                    store_ds(rest, half, 1);
                }
                watch(ds, rest);
                store_ds(ds, half, ds_buffer());
            };
            const auto all_there = [&] {
                keep(p);
                keep(ds);
                if constexpr (variant.projected) keep(rest);
                keep(dv_);
                keep(dk_);
            };
            const auto add_products = [&](int half) {
                all_there();
                wgmma_fence();
                add_product(dv_, p, m_.dout[stage], half);
                add_product(dk_, ds, m_.q[stage], half);
                if constexpr (variant.projected) add_product(dk_, rest, m_.q[stage], half);
                wgmma_commit();
            };
            keep(first);
            scores(second, stage, 1);
            probabilities(first, tile, step);
            wgmma_wait<1>();
            keep(dp);
            finish_step(first, step);
            gradients_of_p(dp, stage, 1);
            add_products(0);
            wgmma_wait<2>();
            keep(second);
            step = step_of(tile, q_tile, g, 1);
            probabilities(second, tile, step);
            wgmma_wait<0>();
            keep(dp);
            all_there();
            finish_step(second, step);
            fence_proxy_async();
            add_products(1);
            multiply_dq(dq);
            if (left > 1) {
                wait_for_q(step_ + 1);
                scores(first, (step_ + 1) % Tiles::stages, 0);
                wait_for_dout(step_ + 1);
                gradients_of_p(dp, (step_ + 1) % Tiles::stages, 0);
                wgmma_wait<2>();
            } else {
                wgmma_wait<0>();
            }
            keep(dq);
            all_there();
            release(stage);
            add_dq(dq, tile, q_tile, g);
            wgmma_wait<0>();
            keep(first);
            keep(dp);
            if (++q_tile == tile.end_q) {
                q_tile = tile.first_q;
                ++g;
            }
            ++step_;
            if (--left == 0) break;
        }
    }

    /// dk and dv, cast, by way of the memory of k and v, so that a row leaves in one piece. By plain stores, which every checker
    /// sees.
    __device__ __forceinline__ void store(const KeyTile<Tiles>& tile) {
        if constexpr (Rec::alters) Rec::keep(*this, tile);
        named_sync(1, 256);  // the other warpgroup has read k for dq
        float scale = variant.ds_scale == DsScale::before ? 1.0f : in_.scale;
        if constexpr (Descales<Rec>) scale = this->sums_.dk_scale;
#pragma unroll
        for (int i = 0; i < d / 16; ++i) {
            std::uint32_t v[4], k[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                v[e] = pack<T>(dv_[8 * i + 2 * e], dv_[8 * i + 2 * e + 1]);
                k[e] = pack<T>(dk_[8 * i + 2 * e] * scale, dk_[8 * i + 2 * e + 1] * scale);
            }
            store_matrices(matrix_address(m_.v, 2 * i), v);
            store_matrices(matrix_address(m_.k, 2 * i), k);
        }
        __syncwarp();  // a warp stores the sixteen rows that it wrote
        const int lane = threadIdx.x % 32;
        const std::int64_t head = tile.head % in_.kv_heads, batch = tile.head / in_.kv_heads;
        T* const dk = static_cast<T*>(in_.dk) + batch * in_.dk_batch + head * in_.dk_head;
        T* const dv = static_cast<T*>(in_.dv) + batch * in_.dv_batch + head * in_.dv_head;
        constexpr int groups = d / 8;  // of eight columns, 16 bytes
#pragma unroll
        for (int i = lane; i < 16 * groups; i += 32) {
            const int row = first_row() + i / groups, group = i % groups;
            const std::int64_t key = tile.first_key + row;
            const int from = (group / 8 * block_k + row) * 64 + ((group % 8) ^ (row & 7)) * 8;
            if (key >= in_.n_k) continue;
            *reinterpret_cast<uint4*>(dk + key * in_.dk_row + group * 8) = *reinterpret_cast<const uint4*>(m_.k + from);
            *reinterpret_cast<uint4*>(dv + key * in_.dv_row + group * 8) = *reinterpret_cast<const uint4*>(m_.v + from);
        }
    }

    float dv_[d / 2], dk_[d / 2];
};

/// A block's memory, its barriers ready for all threads.
template <class Tiles>
__device__ __forceinline__ typename Tiles::Memory& begin_backward_block() {
    extern __shared__ std::uint8_t dynamic[];
    auto& m = *reinterpret_cast<typename Tiles::Memory*>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);
    if (threadIdx.x == 0) {
        for (Barrier* b : {&m.k_full, &m.v_full, &m.dq_empty}) b->init(1);
        m.dq_full.init(256);
        for (int i = 0; i < Tiles::stages; ++i) {
            m.q_full[i].init(1);
            m.dout_full[i].init(1);
            m.tile_empty[i].init(256);  // consuming threads
        }
        fence_barrier_init();
    }
    __syncthreads();
    return m;
}

/// Variant: a type with the BackwardVariant as `value`; nvcc 13.0 cannot name a kernel whose template argument is an object.
/// With a recorder: its listed key tiles, which backward_others() does not take; or all, where it has no list.
template <class T, class Tiles, class Variant, class Rec>
__global__ void __launch_bounds__(Tiles::threads, 1)
    backward(const __grid_constant__ BackwardArguments in, const __grid_constant__ typename Rec::Arguments recording) {
    if constexpr (Rec::records) let_dependents_begin();
    auto& m = begin_backward_block<Tiles>();
    const int warpgroup = uniform(threadIdx.x / 128);
    int number = blockIdx.x;
    [[maybe_unused]] bool recorded = true;
    if constexpr (Rec::records) {
        if (recording.listed > 0)
            number = recording.list[blockIdx.x];
        else
            recorded = Rec::looks_at(recording, in, number);
    }
    if (warpgroup == 0) {
        fewer_registers<Tiles::producer_registers>();
        if (threadIdx.x == 0) load_tiles<T, Tiles, Variant::value.projected>(in, m, number);
        if (threadIdx.x == 32 && in.turn != nullptr) add_dq_in_turn<Tiles>(in, m);
    } else {
        more_registers<Tiles::consumer_registers>();
        if constexpr (Rec::records)
            if (!recorded) {
                const NoBackwardRecorder::Arguments none;
                BackwardConsumer<T, Tiles, Variant, NoBackwardRecorder>(in, none, m, warpgroup - 1).run(number);
                return;
            }
        if constexpr (requires { typename Rec::Elsewhere; }) {  // tiles of which nothing is recorded
            if (!Rec::looks_at(in, KeyTile<Tiles>(in, number)))
                return BackwardConsumer<T, Tiles, Variant, typename Rec::Elsewhere>(in, recording, m, warpgroup - 1)
                    .run(number);
        }
        BackwardConsumer<T, Tiles, Variant, Rec>(in, recording, m, warpgroup - 1).run(number);
    }
}

/// The plain kernel for the key tiles that are not in the set, dq summed in any order.
template <class T, class Tiles, class Variant>
__global__ void __launch_bounds__(Tiles::threads, 1)
    backward_others(const __grid_constant__ BackwardArguments in, const __grid_constant__ KeyTileSet recorded) {
    // One block waits for the launch beside this one, the last to begin: any other would keep its multiprocessor until then.
    const bool waits = blockIdx.x + 1 == gridDim.x;
    if (recorded.has(blockIdx.x)) {
        if (waits) wait_for_dependency();
        return;
    }
    auto& m = begin_backward_block<Tiles>();
    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        fewer_registers<Tiles::producer_registers>();
        if (threadIdx.x == 0) {
            load_tiles<T, Tiles, Variant::value.projected>(in, m, blockIdx.x);
            if (waits) wait_for_dependency();
        }
    } else {
        more_registers<Tiles::consumer_registers>();
        const NoBackwardRecorder::Arguments none;
        BackwardConsumer<T, Tiles, Variant, NoBackwardRecorder>(in, none, m, warpgroup - 1).run(blockIdx.x);
    }
}

}  // namespace faultline::tensor_kernel
