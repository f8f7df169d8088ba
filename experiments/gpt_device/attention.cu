// SPDX-License-Identifier: Apache-2.0
// Attention of fast_attention.hpp on CUDA cores: any head_dim that is a multiple of 8 up to 128, fp32 products in chains of
// fused multiply-adds over ascending k, as lib/gemm. For fp32 runs, and heads that the tensor cores' kernel does not have.
//
// A block has 64 queries of a head (forward, dQ) or 64 keys (dK, dV) and goes over the other side in tiles of 64. Thread (y, x)
// of 16 x 16 has rows 4 y … 4 y + 3 of the score tile and its columns x, x + 16, x + 32, x + 48.
#include <cfloat>

#include <faultline/gpt_device/elements.cuh>

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
    const E* qkv;
    const E* o;
    const E* dout;
    E* dqkv;
    E* out;
    float* lse;
    const float* delta;
    int length, heads, head_dim;
    float scale;

    __device__ int width() const { return heads * head_dim; }
    /// First element of this block's head in [tokens, columns of `width` each].
    __device__ std::size_t at(int part, int parts) const {
        const std::size_t batch = blockIdx.y / heads, head = blockIdx.y % heads;
        return batch * length * parts * width() + static_cast<std::size_t>(part) * width() + head * head_dim;
    }
};

template <int D, class E>
__global__ void __launch_bounds__(threads) forward_tile(Operands<E> in) {
    extern __shared__ float4 shared4[];
    float* q = reinterpret_cast<float*>(shared4);
    float *k = q + Sizes<D>::operand, *v = k + Sizes<D>::operand, *p = v + Sizes<D>::operand;
    const int y = threadIdx.x / 16, x = threadIdx.x % 16, first = blockIdx.x * tile;
    const std::size_t stride = static_cast<std::size_t>(3) * in.width();
    load_tile<D>(in.qkv + in.at(0, 3), stride, first, in.length, in.head_dim, q);
    float max[4], sum[4] = {}, s[4][4], out[4][Sizes<D>::columns] = {};
    for (float& m : max) m = -INFINITY;
    const auto scores = [&](int first_key) {
        products<D>(q, k, y, x, s);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const bool visible = first_key + x + 16 * j <= first + 4 * y + i;
                s[i][j] = visible ? s[i][j] * in.scale : -INFINITY;
            }
    };
    for (int key = 0; key <= first; key += tile) {
        __syncthreads();
        load_tile<D>(in.qkv + in.at(1, 3), stride, key, in.length, in.head_dim, k);
        __syncthreads();
        scores(key);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) max[i] = fmaxf(max[i], s[i][j]);
    }
#pragma unroll
    for (float& m : max) m = over_row(m, [](float a, float b) { return fmaxf(a, b); });
    for (int key = 0; key <= first; key += tile) {
        __syncthreads();
        load_tile<D>(in.qkv + in.at(1, 3), stride, key, in.length, in.head_dim, k);
        load_tile<D>(in.qkv + in.at(2, 3), stride, key, in.length, in.head_dim, v);
        __syncthreads();
        scores(key);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float e = expf(s[i][j] - max[i]);
                sum[i] += e;
                p[(4 * y + i) * score_row + x + 16 * j] = rounded_to<E>(e);
            }
        __syncthreads();
        accumulate<D, false>(p, v, y, x, out);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first + 4 * y + i;
        sum[i] = over_row(sum[i], [](float a, float b) { return a + b; });
        if (row >= in.length) continue;
        if (x == 0) in.lse[static_cast<std::size_t>(blockIdx.y) * in.length + row] = max[i] + logf(sum[i]);
#pragma unroll
        for (int c = 0; c < Sizes<D>::columns; ++c)
            if (const int column = output_column(x, c); column < in.head_dim)
                store1(in.out + in.at(0, 1) + static_cast<std::size_t>(row) * in.width() + column, out[i][c] / sum[i]);
    }
}

/// delta = sum of dO O over a head's columns: a warp for each row and head.
template <class E>
__global__ void __launch_bounds__(threads) delta_rows(Operands<E> in, float* delta, int tokens) {
    const int at = blockIdx.x * (threads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (at >= tokens * in.heads) return;
    const int token = at / in.heads, head = at % in.heads;
    const std::size_t begin = static_cast<std::size_t>(token) * in.width() + head * in.head_dim;
    float sum = 0;
    for (int c = lane; c < in.head_dim; c += 32) sum += value_of(in.dout[begin + c]) * value_of(in.o[begin + c]);
    sum = warp_sum(sum);
    const int batch = token / in.length, row = token % in.length;
    if (lane == 0) delta[(static_cast<std::size_t>(batch) * in.heads + head) * in.length + row] = sum;
}

/// p and ds of a tile of queries and keys, cast, in shared memory.
template <int D, class E>
__device__ void gradient_tile(const Operands<E>& in, const float* q, const float* k, const float* v, const float* dout,
                              int first, int key, int y, int x, float* p, float* ds) {
    float s[4][4], dp[4][4];
    products<D>(q, k, y, x, s);
    products<D>(dout, v, y, x, dp);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first + 4 * y + i;
        const bool inside = row < in.length;
        const std::size_t at = static_cast<std::size_t>(blockIdx.y) * in.length + row;
        const float lse = inside ? in.lse[at] : 0.0f, delta = inside ? in.delta[at] : 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const bool visible = inside && key + x + 16 * j <= row;
            const float e = visible ? expf(s[i][j] * in.scale - lse) : 0.0f;
            const int to = (4 * y + i) * score_row + x + 16 * j;
            if (p != nullptr) p[to] = rounded_to<E>(e);
            ds[to] = visible ? rounded_to<E>(e * (dp[i][j] - delta)) : 0.0f;
        }
    }
}

template <int D, class E>
__device__ void store_rows(const Operands<E>& in, int part, int first, int y, int x, float factor,
                           const float (&sum)[4][Sizes<D>::columns]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first + 4 * y + i;
        if (row >= in.length) continue;
#pragma unroll
        for (int c = 0; c < Sizes<D>::columns; ++c)
            if (const int column = output_column(x, c); column < in.head_dim)
                store1(in.dqkv + in.at(part, 3) + static_cast<std::size_t>(row) * 3 * in.width() + column,
                       sum[i][c] * factor);
    }
}

template <int D, class E>
__global__ void __launch_bounds__(threads) query_gradient(Operands<E> in) {
    extern __shared__ float4 shared4[];
    float* q = reinterpret_cast<float*>(shared4);
    float *dout = q + Sizes<D>::operand, *k = dout + Sizes<D>::operand, *v = k + Sizes<D>::operand;
    float* ds = v + Sizes<D>::operand;
    const int y = threadIdx.x / 16, x = threadIdx.x % 16, first = blockIdx.x * tile;
    const std::size_t stride = static_cast<std::size_t>(3) * in.width();
    load_tile<D>(in.qkv + in.at(0, 3), stride, first, in.length, in.head_dim, q);
    load_tile<D>(in.dout + in.at(0, 1), in.width(), first, in.length, in.head_dim, dout);
    float sum[4][Sizes<D>::columns] = {};
    for (int key = 0; key <= first; key += tile) {
        __syncthreads();
        load_tile<D>(in.qkv + in.at(1, 3), stride, key, in.length, in.head_dim, k);
        load_tile<D>(in.qkv + in.at(2, 3), stride, key, in.length, in.head_dim, v);
        __syncthreads();
        gradient_tile<D>(in, q, k, v, dout, first, key, y, x, static_cast<float*>(nullptr), ds);
        __syncthreads();
        accumulate<D, false>(ds, k, y, x, sum);
    }
    store_rows<D>(in, 0, first, y, x, in.scale, sum);
}

template <int D, class E>
__global__ void __launch_bounds__(threads) key_gradients(Operands<E> in) {
    extern __shared__ float4 shared4[];
    float* q = reinterpret_cast<float*>(shared4);
    float *dout = q + Sizes<D>::operand, *k = dout + Sizes<D>::operand, *v = k + Sizes<D>::operand;
    float *ds = v + Sizes<D>::operand, *p = ds + Sizes<D>::score;
    const int y = threadIdx.x / 16, x = threadIdx.x % 16, key = blockIdx.x * tile;
    const std::size_t stride = static_cast<std::size_t>(3) * in.width();
    load_tile<D>(in.qkv + in.at(1, 3), stride, key, in.length, in.head_dim, k);
    load_tile<D>(in.qkv + in.at(2, 3), stride, key, in.length, in.head_dim, v);
    float dk[4][Sizes<D>::columns] = {}, dv[4][Sizes<D>::columns] = {};
    for (int first = key; first < in.length; first += tile) {
        __syncthreads();
        load_tile<D>(in.qkv + in.at(0, 3), stride, first, in.length, in.head_dim, q);
        load_tile<D>(in.dout + in.at(0, 1), in.width(), first, in.length, in.head_dim, dout);
        __syncthreads();
        gradient_tile<D>(in, q, k, v, dout, first, key, y, x, p, ds);
        __syncthreads();
        accumulate<D, true>(p, dout, y, x, dv);
        accumulate<D, true>(ds, q, y, x, dk);
    }
    store_rows<D>(in, 1, key, y, x, in.scale, dk);
    store_rows<D>(in, 2, key, y, x, 1.0f, dv);
}

template <class Kernel, class E>
void launch(Kernel* kernel, int floats, const AttentionShape& shape, const Operands<E>& in, Stream stream) {
    const int bytes = floats * static_cast<int>(sizeof(float));
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
        check_launch("shared memory of the attention");
    const dim3 grid((shape.length + tile - 1) / tile, shape.batch * shape.heads);
    kernel<<<grid, threads, bytes, stream>>>(in);
    check_launch("attention");
}

template <class F>
void with_head_dim(int head_dim, F&& run) {
    if (head_dim <= 32) return run(std::integral_constant<int, 32>{});
    if (head_dim <= 64) return run(std::integral_constant<int, 64>{});
    run(std::integral_constant<int, 128>{});
}

}  // namespace

template <class E>
void fast_forward(const E* qkv, const AttentionShape& shape, E* o, float* lse, Stream stream) {
    const Operands<E> in{qkv,     nullptr,      nullptr,     nullptr,        o,          lse,
                         nullptr, shape.length, shape.heads, shape.head_dim, shape.scale};
    with_head_dim(shape.head_dim, [&](auto d) {
        launch(forward_tile<d, E>, 3 * Sizes<d>::operand + Sizes<d>::score, shape, in, stream);
    });
}

template <class E>
void fast_backward(const E* qkv, const E* o, const float* lse, const E* dout, const AttentionShape& shape, float* delta,
                   E* dqkv, Stream stream) {
    const Operands<E> in{qkv,          o,           dout,           dqkv,       nullptr, const_cast<float*>(lse), delta,
                         shape.length, shape.heads, shape.head_dim, shape.scale};
    const int tokens = shape.batch * shape.length;
    delta_rows<<<(tokens * shape.heads + threads / 32 - 1) / (threads / 32), threads, 0, stream>>>(in, delta, tokens);
    check_launch("delta");
    with_head_dim(shape.head_dim, [&](auto d) {
        launch(query_gradient<d, E>, 4 * Sizes<d>::operand + Sizes<d>::score, shape, in, stream);
        launch(key_gradients<d, E>, 4 * Sizes<d>::operand + 2 * Sizes<d>::score, shape, in, stream);
    });
}

template void fast_forward(const float*, const AttentionShape&, float*, float*, Stream);
template void fast_forward(const Bf16*, const AttentionShape&, Bf16*, float*, Stream);
template void fast_backward(const float*, const float*, const float*, const float*, const AttentionShape&, float*,
                            float*, Stream);
template void fast_backward(const Bf16*, const Bf16*, const float*, const Bf16*, const AttentionShape&, float*, Bf16*,
                            Stream);

}  // namespace faultline::gpt::on_device
