// SPDX-License-Identifier: Apache-2.0
// The forward by mma.sync, for every card since compute capability 8.0: the schedule of FlashAttention-2 (arXiv 2307.08691).
// A block of four warps takes 64 rows, 16 a warp, and walks the key tiles in descending order. K of the next tile is copied
// while this one's softmax and P V run, V while S does; there is one buffer of each, and several blocks a multiprocessor hide
// what is left.
#pragma once

#include <faultline/tensor_kernel/forward_common.cuh>
#include <faultline/tensor_kernel/mma.cuh>

namespace faultline::tensor_kernel {

/// One call; q, k, v as in ForwardCall, strides in elements.
template <class T>
struct MmaArguments : ForwardShape, ForwardOutput<T> {
    const T* q;
    const T* k;
    const T* v;
    std::int64_t q_row, q_head, q_batch, k_row, k_head, k_batch, v_row, v_head, v_batch;
};

template <class T, int d, int keys>
struct MmaTiles {
    static constexpr int threads = 128, block_q = 64;
    struct Memory {
        alignas(128) T q[block_q * d];
        alignas(128) T k[keys * d];
        alignas(128) T v[keys * d];
    };
};

template <class T, int d, int keys, class Variant>
__global__ void __launch_bounds__(128) forward_mma(const __grid_constant__ MmaArguments<T> in) {
    using Tiles = MmaTiles<T, d, keys>;
    extern __shared__ __align__(128) std::uint8_t dynamic[];
    auto& m = *reinterpret_cast<typename Tiles::Memory*>(dynamic);
    constexpr int threads = Tiles::threads;
    const TilePlace at = in.place(blockIdx.x);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = in.kv_head(at.head);
    const int row0 = at.q_tile * Tiles::block_q, row = row0 + warp * 16 + lane / 4;
    const T* k = in.k + kv_head * in.k_head + at.batch * in.k_batch;
    const T* v = in.v + kv_head * in.v_head + at.batch * in.v_batch;
    const int count = in.template key_tiles<keys>(row0 + Tiles::block_q), whole = in.template whole_tiles<keys>(row0);

    copy_rows<T, d, Tiles::block_q, threads>(m.q, in.q + at.head * in.q_head + at.batch * in.q_batch, in.q_row, row0,
                                             in.n_q);
    copy_rows<T, d, keys, threads>(m.k, k, in.k_row, (count - 1) * keys, in.n_k);
    wait_copies<1>();
    __syncthreads();
    std::uint32_t q[d / 16][4];
#pragma unroll
    for (int i = 0; i < d / 16; ++i)
        load_matrices<false>(q[i], group_of_eight<T, d>(m.q, warp * 16 + lane % 16, 2 * i + lane / 16));

    StreamingSoftmax<T, Variant::value, keys> softmax;
    float o[d / 2] = {};
    for (int tile = count - 1; tile >= 0; --tile) {
        wait_copies<0>();
        __syncthreads();  // K is here, and every warp has done with V
        copy_rows<T, d, keys, threads>(m.v, v, in.v_row, tile * keys, in.n_k);
        float s[keys / 2] = {};
#pragma unroll
        for (int i = 0; i < d / 16; ++i)
#pragma unroll
            for (int j = 0; j < keys / 16; ++j) {
                std::uint32_t b[4];
                load_matrices<false>(
                    b, group_of_eight<T, d>(m.k, 16 * j + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
                mma<T>(s + 8 * j, q[i], b[0], b[1]);
                mma<T>(s + 8 * j + 4, q[i], b[2], b[3]);
            }
        wait_copies<0>();
        __syncthreads();  // V is here, and every warp has done with K
        if (tile > 0) copy_rows<T, d, keys, threads>(m.k, k, in.k_row, (tile - 1) * keys, in.n_k);
        if (tile >= whole) mask_scores<keys>(in, s, tile * keys, row);
        float alpha[2] = {1, 1};
        if (tile == count - 1)
            softmax.template step<true>(s, alpha, in.scales);
        else
            softmax.template step<false>(s, alpha, in.scales);
        softmax.rescale(o, alpha, in.scales.state);
        std::uint32_t p[keys / 16][4];
        pack_p<T, keys>(s, p);
#pragma unroll
        for (int i = 0; i < keys / 16; ++i)
#pragma unroll
            for (int j = 0; j < d / 16; ++j) {
                std::uint32_t b[4];
                load_matrices<true>(b, group_of_eight<T, d>(m.v, 16 * i + lane % 16, 2 * j + lane / 16));
                mma<T>(o + 8 * j, p[i], b[0], b[1]);
                mma<T>(o + 8 * j + 4, p[i], b[2], b[3]);
            }
        softmax.hold_output(o, in.scales.state);
    }
    float inverse[2];
    store_rows<T, d>(in, in, at, row, softmax, o, inverse, in.natural);
}

}  // namespace faultline::tensor_kernel
