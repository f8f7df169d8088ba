// SPDX-License-Identifier: Apache-2.0
// The backward by mma.sync, for every card since compute capability 8.0 with shared memory enough: the schedule of
// FlashAttention-2 (arXiv 2307.08691), with the scores transposed as in backward.cuh. A block of eight warps takes 128 keys, 16
// a warp, and goes over the queries that see them, 64 at a time; Q and dO of the next are copied meanwhile.
#pragma once

#include <faultline/tensor_kernel/forward.hpp>
#include <faultline/tensor_kernel/fragment.cuh>
#include <faultline/tensor_kernel/mma.cuh>
#include <faultline/tensor_kernel/probability.cuh>
#include <faultline/tensor_kernel/zero_sum.cuh>

namespace faultline::tensor_kernel {

/// One call: pointers and strides as in BackwardCall, in elements; the others as in BackwardArguments.
template <class T>
struct MmaBackwardArguments {
    const T *q, *k, *v, *dout;
    T *dk, *dv;
    Strides q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides;
    const float *lse, *delta;
    float* dq;
    double* zero_sums;
    int* turn;
    int kv_heads, group, n_q, n_k, n_padded, k_tiles;
    int all_heads, heads_at_once;
    bool causal;
    float exponent, scale;
};

template <class T, int d>
struct MmaBackwardTiles {
    static constexpr int threads = 256, block_q = 64, block_k = 128;
    struct Memory {
        alignas(128) T k[block_k * d];
        alignas(128) T v[block_k * d];
        alignas(128) T q[2][block_q * d];
        alignas(128) T dout[2][block_q * d];
        alignas(128) T ds[block_k * block_q];  ///< rows are keys
    };
};

template <class T, int d, class Variant>
class MmaBackward {
    using Tiles = MmaBackwardTiles<T, d>;
    static constexpr int block_q = Tiles::block_q, block_k = Tiles::block_k, threads = Tiles::threads;

  public:
    __device__ __forceinline__ MmaBackward(const MmaBackwardArguments<T>& in, typename Tiles::Memory& m)
        : in_(in), m_(m) {
        const int per_section = in.heads_at_once * in.k_tiles, number = blockIdx.x;
        const int section = number / per_section, within = number % per_section;
        const int heads = min(in.heads_at_once, in.all_heads - section * in.heads_at_once);
        const int head = section * in.heads_at_once + within % heads;
        const int tile = in.turn != nullptr ? in.k_tiles - 1 - within / heads : within / heads;
        batch_ = head / in.kv_heads;
        kv_head_ = head % in.kv_heads;
        first_key_ = tile * block_k;
        end_q_ = in.n_padded / block_q;
        first_q_ =
            in.causal ? min(end_q_, max(0, first_key_ - (in.n_k - in.n_q)) / fa2_tile * (fa2_tile / block_q)) : 0;
    }

    __device__ __forceinline__ void run() {
        copy_rows<T, d, block_k, threads>(m_.k, at(in_.k, in_.k_strides, kv_head_), in_.k_strides.row, first_key_,
                                          in_.n_k);
        copy_rows<T, d, block_k, threads>(m_.v, at(in_.v, in_.v_strides, kv_head_), in_.v_strides.row, first_key_,
                                          in_.n_k);
        const int blocks = end_q_ - first_q_, count = blocks * in_.group;
        if (count > 0) copy_queries(0, 0);
        for (int step = 0; step < count; ++step) {
            wait_copies<0>();
            __syncthreads();  // the tile is here, and every warp has done with the one before
            if (step + 1 < count) copy_queries((step + 1) % 2, step + 1);
            do_step(step % 2, step / blocks, q_tile_of(step % blocks));
        }
        if (in_.zero_sums != nullptr) {
            const std::int64_t head = static_cast<std::int64_t>(batch_) * in_.kv_heads + kv_head_;
            zero_sum_.store(in_.zero_sums + 2 * ((head * in_.k_tiles + first_key_ / block_k) * 8 + warp_));
        }
        store();
    }

  private:
    /// FlashAttention-2's query tile, of one or two steps of 64 queries; tiles in descending order, steps in ascending.
    static constexpr int fa2_tile = d == 64 ? 128 : 64;
    [[nodiscard]] __device__ __forceinline__ int q_tile_of(int step) const {
        constexpr int steps = fa2_tile / block_q;
        return end_q_ - steps - step / steps * steps + step % steps;
    }

    template <class U>
    [[nodiscard]] __device__ __forceinline__ U* at(U* base, const Strides& strides, int head) const {
        return base + head * strides.head + batch_ * strides.batch;
    }
    __device__ __forceinline__ void copy_queries(int stage, int step) {
        const int blocks = end_q_ - first_q_, head = kv_head_ * in_.group + step / blocks;
        const int first = q_tile_of(step % blocks) * block_q;
        copy_rows<T, d, block_q, threads>(m_.q[stage], at(in_.q, in_.q_strides, head), in_.q_strides.row, first,
                                          in_.n_q);
        copy_rows<T, d, block_q, threads>(m_.dout[stage], at(in_.dout, in_.dout_strides, head), in_.dout_strides.row,
                                          first, in_.n_q);
    }

    /// x = keys queries^T of this warp's 16 keys.
    __device__ __forceinline__ void multiply(float (&x)[32], T* keys, T* queries) const {
#pragma unroll
        for (float& e : x) e = 0;
#pragma unroll
        for (int i = 0; i < d / 16; ++i) {
            std::uint32_t a[4];
            load_matrices<false>(a, group_of_eight<T, d>(keys, warp_ * 16 + lane_ % 16, 2 * i + lane_ / 16));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                std::uint32_t b[4];
                load_matrices<false>(
                    b, group_of_eight<T, d>(queries, 16 * j + lane_ / 16 * 8 + lane_ % 8, 2 * i + lane_ / 8 % 2));
                mma<T>(x + 8 * j, a, b[0], b[1]);
                mma<T>(x + 8 * j + 4, a, b[2], b[3]);
            }
        }
    }
    /// x += left queries.
    __device__ __forceinline__ void add_product(float (&x)[d / 2], const Fragment& left, T* queries) const {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < d / 16; ++j) {
                std::uint32_t b[4];
                load_matrices<true>(b, group_of_eight<T, d>(queries, 16 * i + lane_ % 16, 2 * j + lane_ / 16));
                mma<T>(x + 8 * j, left[i], b[0], b[1]);
                mma<T>(x + 8 * j + 4, left[i], b[2], b[3]);
            }
    }

    __device__ __forceinline__ void do_step(int stage, int g, int q_tile) {
        const std::int64_t head = (static_cast<std::int64_t>(batch_) * in_.kv_heads + kv_head_) * in_.group + g;
        const std::int64_t rows = head * in_.n_padded + q_tile * block_q;
        const auto* const lse = reinterpret_cast<const float2*>(in_.lse + rows) + lane_ % 4;
        const auto* const delta = reinterpret_cast<const float2*>(in_.delta + rows) + lane_ % 4;
        float s[32], dp[32];
        multiply(s, m_.k, m_.q[stage]);
        mask(s, q_tile * block_q);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const float2 two = lse[4 * c];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s[4 * c + e] = probability<Variant>(s[4 * c + e], in_.exponent, e % 2 == 0 ? two.x : two.y);
        }
        multiply(dp, m_.v, m_.dout[stage]);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const float2 two = delta[4 * c];
#pragma unroll
            for (int e = 0; e < 4; ++e) dp[4 * c + e] = s[4 * c + e] * (dp[4 * c + e] - (e % 2 == 0 ? two.x : two.y));
        }
        Fragment p, ds;
        cast<T>(s, p);
        cast<T>(dp, ds);
        if (in_.zero_sums != nullptr) zero_sum_.template add<T>(ds);
            // Word i of a fragment: key lane/4 + 8 (i%2), queries 8 (i/2) + 2 (lane%4) and the next.
#pragma unroll
        for (int i = 0; i < 16; ++i)
            *reinterpret_cast<std::uint32_t*>(group_of_eight<T, 64>(m_.ds, warp_ * 16 + lane_ / 4 + i % 2 * 8, i / 2) +
                                              lane_ % 4 * 2) = ds[i / 4][i % 4];
        add_product(dv_, p, m_.dout[stage]);
        add_product(dk_, ds, m_.q[stage]);
        __syncthreads();  // ds is there
        add_dq(head, q_tile);
    }

    __device__ __forceinline__ void mask(float (&s)[32], int first_query) const {
        const int offset = in_.n_k - in_.n_q;
        const bool cut = in_.causal && first_key_ + block_k - 1 > first_query + offset;
        if (!cut && first_key_ + block_k <= in_.n_k) return;
        const int key = first_key_ + warp_ * 16 + lane_ / 4;
#pragma unroll
        for (int e = 0; e < 32; ++e) {
            const int j = key + e / 2 % 2 * 8, i = first_query + e / 4 * 8 + lane_ % 4 * 2 + e % 2;
            if (j >= in_.n_k || (in_.causal && j > i + offset)) s[e] = -INFINITY;
        }
    }

    /// dq += ds k: a warp takes 16 queries and half of the columns, and leaves them as the warpgroups of backward.cuh do.
    __device__ __forceinline__ void add_dq(std::int64_t head, int q_tile) {
        constexpr int columns = d / 2;
        float dq[columns / 2] = {};
#pragma unroll
        for (int i = 0; i < block_k / 16; ++i) {
            std::uint32_t a[4];
            load_matrices<true>(
                a, group_of_eight<T, 64>(m_.ds, 16 * i + lane_ / 16 * 8 + lane_ % 8, warp_ % 4 * 2 + lane_ / 8 % 2));
#pragma unroll
            for (int j = 0; j < columns / 16; ++j) {
                std::uint32_t b[4];
                load_matrices<true>(
                    b, group_of_eight<T, d>(m_.k, 16 * i + lane_ % 16, warp_ / 4 * (columns / 8) + 2 * j + lane_ / 16));
                mma<T>(dq + 8 * j, a, b[0], b[1]);
                mma<T>(dq + 8 * j + 4, a, b[2], b[3]);
            }
        }
        constexpr int unit = 64 * 64;  // floats; head size 64: one for 64 queries, else two
        float* const to = in_.dq + head * in_.n_padded * d + q_tile * (64 * d) +
                          warp_ / 4 * (d == 64 ? unit / 2 : unit) + (warp_ % 4 * 32 + lane_) * 4;
        const std::int64_t place = head * (in_.n_padded / block_q) + q_tile;
        if (in_.turn != nullptr) wait_turn(place, q_tile);
#pragma unroll
        for (int c = 0; c < columns / 8; ++c) {
#if __CUDA_ARCH__ >= 900
            add_four(to + 512 * c, make_float4(dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]));
#else
#pragma unroll
            for (int e = 0; e < 4; ++e) atomicAdd(to + 512 * c + e, dq[4 * c + e]);
#endif
        }
        if (in_.turn != nullptr) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) atomicAdd(in_.turn + place, 1);
        }
    }
    /// Until the key tiles above this one that see the queries have added.
    __device__ __forceinline__ void wait_turn(std::int64_t place, int q_tile) const {
        if (threadIdx.x == 0) {
            const int end_row = min((q_tile + 1) * block_q, in_.n_q);
            const int seen = in_.causal ? min(in_.n_k, end_row + in_.n_k - in_.n_q) : in_.n_k;
            const int above = (seen - 1 - first_key_) / block_k;
            while (*static_cast<volatile int*>(in_.turn + place) < above) {
            }
            __threadfence();
        }
        __syncthreads();
    }

    __device__ __forceinline__ void store() const {
        T* const dk = at(in_.dk, in_.dk_strides, kv_head_);
        T* const dv = at(in_.dv, in_.dv_strides, kv_head_);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const std::int64_t key = first_key_ + warp_ * 16 + lane_ / 4 + 8 * r;
            if (key >= in_.n_k) continue;
#pragma unroll
            for (int c = 0; c < d / 8; ++c) {
                const int e = 4 * c + 2 * r, column = 8 * c + lane_ % 4 * 2;
                *reinterpret_cast<std::uint32_t*>(dk + key * in_.dk_strides.row + column) =
                    pack<T>(dk_[e] * in_.scale, dk_[e + 1] * in_.scale);
                *reinterpret_cast<std::uint32_t*>(dv + key * in_.dv_strides.row + column) = pack<T>(dv_[e], dv_[e + 1]);
            }
        }
    }

    const MmaBackwardArguments<T>& in_;
    typename Tiles::Memory& m_;
    const int lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32;
    int batch_, kv_head_, first_key_, first_q_, end_q_;
    ZeroSum16 zero_sum_;
    float dv_[d / 2] = {}, dk_[d / 2] = {};
};

template <class T, int d, class Variant>
__global__ void __launch_bounds__(256, 1) backward_mma(const __grid_constant__ MmaBackwardArguments<T> in) {
    extern __shared__ __align__(128) std::uint8_t dynamic[];
    MmaBackward<T, d, Variant>(in, *reinterpret_cast<typename MmaBackwardTiles<T, d>::Memory*>(dynamic)).run();
}

}  // namespace faultline::tensor_kernel
