// SPDX-License-Identifier: Apache-2.0
// Attention of fast_attention.hpp on CUDA cores: any head_dim that is a multiple of 8 up to 128, fp32 products in chains of
// fused multiply-adds over ascending k, as lib/gemm. For fp32 runs, and heads that the tensor cores' kernel does not have.
// Here what its forward (attention_forward.cu) and backward (attention_backward.cu) share.
//
// A block has 64 queries of a head (forward, dQ) or 64 keys (dK, dV) and goes over the other side in tiles of 64. Thread (y, x)
// of 16 x 16 has rows 4 y … 4 y + 3 of the score tile and its columns x, x + 16, x + 32, x + 48.
#pragma once

#include <cfloat>

#include <faultline/gpt_device/altered_attention.cuh>
#include <faultline/gpt_device/attention.hpp>

namespace faultline::gpt::on_device {
namespace {

constexpr int tile = 64, threads = 256;
constexpr int score_row = tile + 4;

template <int D>
struct Sizes {
    static constexpr int row = D + 4;           // floats of a row in shared memory: 16-byte aligned, banks spread
    static constexpr int columns = D / 16;      // of an output row, of a thread
    static constexpr int operand = tile * row;  // floats of a tile of q, k, v or dO
    static constexpr int score = tile * score_row;
};

/// Column c of a thread's output row: pairs side by side.
__device__ int output_column(int x, int c) { return 2 * x + c % 2 + 32 * (c / 2); }

/// Rows first … first + 63 of a head as floats; zero beyond the last row and beyond head_dim.
template <int D, class E>
__device__ void load_tile(const E* from, std::size_t stride, int first, int length, int head_dim, float* to) {
    for (int i = threadIdx.x; i < tile * D / 8; i += threads) {
        const int row = i / (D / 8), column = i % (D / 8) * 8;
        Octet v{};
        if (first + row < length && column < head_dim)
            v = load8(from + static_cast<std::size_t>(first + row) * stride + column);
        store8(to + row * Sizes<D>::row + column, v);
    }
}

/// s[i][j] = row 4 y + i of a times row x + 16 j of b.
template <int D>
__device__ void products(const float* a, const float* b, int y, int x, float (&s)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) s[i][j] = 0;
#pragma unroll 4
    for (int k = 0; k < D; k += 4) {
        float4 l[4], r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) l[i] = *reinterpret_cast<const float4*>(a + (4 * y + i) * Sizes<D>::row + k);
#pragma unroll
        for (int j = 0; j < 4; ++j) r[j] = *reinterpret_cast<const float4*>(b + (x + 16 * j) * Sizes<D>::row + k);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                s[i][j] = fmaf(l[i].x, r[j].x, s[i][j]);
                s[i][j] = fmaf(l[i].y, r[j].y, s[i][j]);
                s[i][j] = fmaf(l[i].z, r[j].z, s[i][j]);
                s[i][j] = fmaf(l[i].w, r[j].w, s[i][j]);
            }
    }
}

/// sum[i][c] += row 4 y + i of p (or column, where transposed) times b.
template <int D, bool transposed>
__device__ void accumulate(const float* p, const float* b, int y, int x, float (&sum)[4][Sizes<D>::columns]) {
#pragma unroll 4
    for (int k = 0; k < tile; ++k) {
        float l[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) l[i] = transposed ? p[k * score_row + 4 * y + i] : p[(4 * y + i) * score_row + k];
#pragma unroll
        for (int c = 0; c < Sizes<D>::columns; c += 2) {
            const float2 r = *reinterpret_cast<const float2*>(b + k * Sizes<D>::row + output_column(x, c));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[i][c] = fmaf(l[i], r.x, sum[i][c]);
                sum[i][c + 1] = fmaf(l[i], r.y, sum[i][c + 1]);
            }
        }
    }
}

/// The lanes of a row are 16 neighbours; all get the result.
template <class F>
__device__ float over_row(float x, F&& join) {
#pragma unroll
    for (int step = 8; step > 0; step /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

template <class E>
struct Operands {
    AttentionInputs<E> in;
    const E* o;
    const E* dout;
    E* dqkv;
    E* out;
    float* lse;
    const float* delta;
    int length, heads, head_dim, gradient_row;
    float standard_scale, cap;
    HeadParts seen;

    __device__ int width() const { return heads * head_dim; }
    __device__ int head() const { return blockIdx.y % heads; }
    __device__ float scale() const { return in.scales != nullptr ? in.scales[head()] : standard_scale; }
    __device__ const E* rows(const E* from, std::size_t stride) const {
        return from + blockIdx.y / heads * length * stride + head() * head_dim;
    }
    __device__ const E* q() const { return rows(in.q, in.qk_stride); }
    __device__ const E* k() const { return rows(in.k, in.qk_stride); }
    __device__ const E* v() const { return rows(in.v, in.v_stride); }
    /// Of a block's numbers in an array of HeadParts.
    __device__ std::size_t part() const { return static_cast<std::size_t>(blockIdx.y) * gridDim.x + blockIdx.x; }
    /// First element of this block's head in rows of `row` elements, after `part` times the width.
    __device__ std::size_t at(int part, int row) const {
        const std::size_t batch = blockIdx.y / heads;
        return batch * length * row + static_cast<std::size_t>(part) * width() + head() * head_dim;
    }
};

/// use(key) for each tile of the head's `keys` and `values`, from row `key` on, that queries first … first + 63 see, in shared
/// memory at k and v. All threads of the block call it.
template <int D, class E, class Use>
__device__ void for_each_key_tile(const Operands<E>& in, const E* keys, const E* values, int first, float* k, float* v,
                                  Use&& use) {
    for (int key = 0; key <= first; key += tile) {
        __syncthreads();
        load_tile<D>(keys, in.in.qk_stride, key, in.length, in.head_dim, k);
        load_tile<D>(values, in.in.v_stride, key, in.length, in.head_dim, v);
        __syncthreads();
        use(key);
    }
}

/// cap tanh(s / cap), or s without a cap; tanh as attention_rows.cpp.
__device__ float capped(float s, float cap) {
    if (cap == 0) return s;
    const float t = s / cap;
    return cap * (1.0f - 2.0f / (1.0f + expf(t + t)));
}

/// The rms of row threadIdx.x / 4 of a tile; the four threads of a row get it, one of them counts it.
template <int D>
__device__ double row_rms(const float* tile_rows, int head_dim) {
    const float* row = tile_rows + threadIdx.x / 4 * Sizes<D>::row;
    float squares = 0;
#pragma unroll
    for (int c = threadIdx.x % 4; c < D; c += 4) squares += row[c] * row[c];
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares += __shfl_xor_sync(0xffffffffu, squares, 2);
    return threadIdx.x % 4 == 0 ? sqrt(static_cast<double>(squares) / head_dim) : 0.0;
}

/// Sums of a block's numbers, in a fixed order, into to[0] and to[1].
__device__ void store_sums(double a, double b, double* to) {
    __shared__ double sums[threads / 32][2];
    a = warp_sum(a);
    b = warp_sum(b);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32][0] = a;
        sums[threadIdx.x / 32][1] = b;
    }
    __syncthreads();
    if (threadIdx.x >= 2) return;
    double total = 0;
    for (int w = 0; w < threads / 32; ++w) total += sums[w][threadIdx.x];
    to[threadIdx.x] = total;
}
__device__ void store_largest(float x, float* to) {
    __shared__ float parts[threads / 32];
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < threads / 32; ++w) x = fmaxf(x, parts[w]);
    *to = x;
}

/// The faults of a block; a stand-in where the kernel has none.
template <class E>
__device__ BlockFaults faults_of(const KernelFaults& faults, const Operands<E>& in,
                                 Uninitialised<SharedFaults>& shared) {
    return {faults,
            shared.value(),
            in.head(),
            static_cast<int>(blockIdx.y) / in.heads,
            static_cast<int>(gridDim.y) / in.heads,
            static_cast<int>(gridDim.x),
            in.length};
}
template <class E>
__device__ NoFaults faults_of(const NoFaults&, const Operands<E>&, char&) {
    return {};
}
template <class E, class F>
void launch(void (*kernel)(Operands<E>, const F), int floats, const AttentionShape& shape, const Operands<E>& in,
            const F& faults, Stream stream) {
    const int bytes = floats * static_cast<int>(sizeof(float));
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
        check_launch("shared memory of the attention");
    const dim3 grid((shape.length + tile - 1) / tile, shape.batch * shape.heads);
    kernel<<<grid, threads, bytes, stream>>>(in, faults);
    check_launch("attention");
}

template <class E>
void set_shape(Operands<E>& in, const AttentionShape& shape) {
    in.length = shape.length;
    in.heads = shape.heads;
    in.head_dim = shape.head_dim;
    in.gradient_row = shape.gradient_row();
    in.standard_scale = shape.scale;
    in.cap = shape.softcap;
}

template <class F>
void with_head_dim(int head_dim, F&& run) {
    if (head_dim <= 32) return run(std::integral_constant<int, 32>{});
    if (head_dim <= 64) return run(std::integral_constant<int, 64>{});
    run(std::integral_constant<int, 128>{});
}

/// With the faults, or by kernels compiled without.
template <class Run>
void with_faults(const KernelFaults* faults, Run&& run) {
    if (faults != nullptr && faults->count > 0) return run(*faults);
    run(NoFaults{});
}

}  // namespace

}  // namespace faultline::gpt::on_device
