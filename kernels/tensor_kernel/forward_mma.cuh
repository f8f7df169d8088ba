// SPDX-License-Identifier: Apache-2.0
// The forward by mma.sync, for every card since compute capability 8.0: the schedule of FlashAttention-2 (arXiv 2307.08691).
// A block of four warps takes 64 rows, 16 a warp, and walks the key tiles in descending order. K of the next tile is copied
// while this one's softmax and P V run, V while S does; there is one buffer of each, and several blocks a multiprocessor hide
// what is left.
#pragma once

#include <faultline/tensor_kernel/forward_common.cuh>

namespace faultline::tensor_kernel {

/// One call; q, k, v as in ForwardCall, strides in elements.
template <class T>
struct MmaArguments : ForwardShape, ForwardOutput<T> {
    const T* q;
    const T* k;
    const T* v;
    std::int64_t q_row, q_head, q_batch, k_row, k_head, k_batch, v_row, v_head, v_batch;
};

/// c += a b of one mma.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"): a, c as wgmma.cuh has them for a warp; b: of
/// column lane/4 the rows 2t, 2t+1 and 2t+8, 2t+9.
template <class T>
__device__ __forceinline__ void mma(float* c, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
            "%1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Rows of d elements in shared memory whose groups of eight are permuted within 64, so that eight rows' same group lies in
/// eight different banks' quads.
template <class T, int d>
__device__ __forceinline__ T* group_of_eight(T* rows, int row, int group) {
    return rows + row * d + (group ^ (row % 8)) * 8;
}

/// Four 8 x 8 matrices, matrix i by the addresses of lanes 8i to 8i+7; transposed or not.
template <bool transposed, class T>
__device__ __forceinline__ void load_matrices(std::uint32_t (&x)[4], const T* row) {
    const std::uint32_t address = shared_address(row);
    if constexpr (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
}

/// Begins to copy rows first to first + rows - 1 of [n, d]; those past the end arrive as zeros. By the whole block.
template <class T, int d, int rows, int threads>
__device__ __forceinline__ void copy_rows(T* to, const T* from, std::int64_t stride, int first, int n) {
#pragma unroll
    for (int i = 0; i < rows * d / 8 / threads; ++i) {
        const int at = i * threads + threadIdx.x, row = at / (d / 8), group = at % (d / 8);
        const bool inside = first + row < n;
        const T* source = from + (inside ? first + row : 0) * stride + group * 8;
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(group_of_eight<T, d>(to, row, group))),
            "l"(source), "r"(inside ? 16 : 0)
            : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits for all but the last `pending` copies of this thread.
template <int pending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

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
#pragma unroll
        for (int i = 0; i < d / 2; ++i) o[i] *= alpha[i / 2 % 2];
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
    }
    float inverse[2];
    store_rows<T, d>(in, in, at, row, softmax, o, inverse);
}

}  // namespace faultline::tensor_kernel
