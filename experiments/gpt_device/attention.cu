// SPDX-License-Identifier: Apache-2.0
// Attention of fast_attention.hpp on CUDA cores: any head_dim that is a multiple of 8 up to 128, fp32 products in chains of
// fused multiply-adds over ascending k, as lib/gemm. For fp32 runs, and heads that the tensor cores' kernel does not have.
//
// A block has 64 queries of a head (forward, dQ) or 64 keys (dK, dV) and goes over the other side in tiles of 64. Thread (y, x)
// of 16 x 16 has rows 4 y … 4 y + 3 of the score tile and its columns x, x + 16, x + 32, x + 48.
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
    int length, heads, head_dim;
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
    /// First element of this block's head in [tokens, columns of `width` each].
    __device__ std::size_t at(int part, int parts) const {
        const std::size_t batch = blockIdx.y / heads, head = blockIdx.y % heads;
        return batch * length * parts * width() + static_cast<std::size_t>(part) * width() + head * head_dim;
    }
};

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

/// A tile of sums of P V in registers, changed by way of shared memory.
template <int D>
__device__ void alter_output(BlockFaults& altered, float* shared, int rows, int cols,
                             float (&out)[4][Sizes<D>::columns]) {
    if (!altered.any_at(KernelSite::pv_accumulate)) return;
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
    const auto at = [&](int i, int j) -> float& { return shared[i * Sizes<D>::row + j]; };
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < Sizes<D>::columns; ++c) at(4 * y + i, output_column(x, c)) = out[i][c];
    __syncthreads();
    altered.tile(
        KernelSite::pv_accumulate, rows, cols, [&](int i, int j) { return static_cast<double>(at(i, j)); },
        [&](int i, int j, double held) {
            at(i, j) = static_cast<float>(held);
            return held;
        });
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < Sizes<D>::columns; ++c) out[i][c] = at(4 * y + i, output_column(x, c));
}

template <int D, class E, class F>
__global__ void __launch_bounds__(threads) forward_tile(Operands<E> in, const __grid_constant__ F faults) {
    extern __shared__ float4 shared4[];
    __shared__ SharedOf<F> shared;
    [[maybe_unused]] auto altered = faults_of(faults, in, shared);
    float* q = reinterpret_cast<float*>(shared4);
    float *k = q + Sizes<D>::operand, *v = k + Sizes<D>::operand, *p = v + Sizes<D>::operand;
    const int y = threadIdx.x / 16, x = threadIdx.x % 16, first = blockIdx.x * tile;
    const float scale = in.scale();
    const E *const keys = in.k(), *const values = in.v();
    load_tile<D>(in.q(), in.in.qk_stride, first, in.length, in.head_dim, q);
    float max[4], sum[4] = {}, weighted[4] = {}, s[4][4], out[4][Sizes<D>::columns] = {};
    for (float& m : max) m = -INFINITY;
    const bool detailed = in.seen.rows != nullptr;
    const auto scores = [&](int first_key) {
        products<D>(q, k, y, x, s);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const bool visible = first_key + x + 16 * j <= first + 4 * y + i;
                s[i][j] = visible ? capped(s[i][j] * scale, in.cap) : -INFINITY;
            }
    };
    for (int key = 0; key <= first; key += tile) {
        __syncthreads();
        load_tile<D>(keys, in.in.qk_stride, key, in.length, in.head_dim, k);
        __syncthreads();
        scores(key);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) max[i] = fmaxf(max[i], s[i][j]);
    }
    // The last tile of keys has the rows of the tile of queries.
    if (in.seen.rms != nullptr) {
        // Rows beyond the last are zeros.
        store_sums(row_rms<D>(q, in.head_dim), row_rms<D>(k, in.head_dim), in.seen.rms + 2 * in.part());
    }
#pragma unroll
    for (float& m : max) m = over_row(m, [](float a, float b) { return fmaxf(a, b); });
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (first + 4 * y + i < in.length) largest = fmaxf(largest, max[i]);
    const auto sweep = [&](auto&& use) {
        for (int key = 0; key <= first; key += tile) {
            __syncthreads();
            load_tile<D>(keys, in.in.qk_stride, key, in.length, in.head_dim, k);
            load_tile<D>(values, in.in.v_stride, key, in.length, in.head_dim, v);
            __syncthreads();
            scores(key);
            use(key);
        }
    };
    if constexpr (F::any) {
        altered.begin(blockIdx.x);
        __syncthreads();
        altered.rows(KernelSite::row_max, first, y, x, max);
        altered.sweeps_for_rms(y, x, [&](int f) {
            sweep([&](int key) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) s[i][j] = rounded_to<E>(expf(s[i][j] - max[i]));
                altered.scores(KernelSite::p_cast, first, key, y, x, s, f);
            });
        });
    }
    sweep([&]([[maybe_unused]] int key) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float e = expf(s[i][j] - max[i]);
                sum[i] += e;
                if (detailed && e > 0) weighted[i] += e * (s[i][j] - max[i]);
                s[i][j] = rounded_to<E>(e);
            }
        if constexpr (F::any) altered.scores(KernelSite::p_cast, first, key, y, x, s, altered.count());
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) p[(4 * y + i) * score_row + x + 16 * j] = s[i][j];
        __syncthreads();
        accumulate<D, false>(p, v, y, x, out);
    });
    double saturated = 0, entropy = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first + 4 * y + i;
        sum[i] = over_row(sum[i], [](float a, float b) { return a + b; });
        if (detailed) weighted[i] = over_row(weighted[i], [](float a, float b) { return a + b; });
        if (detailed && x == 0 && row > 0 && row < in.length) {
            const double z = static_cast<double>(sum[i]);
            saturated += 1 / z > 1 - 0x1p-9 ? 1 : 0;
            entropy += log(z) - static_cast<double>(weighted[i]) / z;
        }
    }
    if constexpr (F::any) {
        altered.rows(KernelSite::row_sum, first, y, x, sum);
        alter_output<D>(altered, q, min(tile, in.length - first), in.head_dim, out);
        altered.keep(blockIdx.x);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first + 4 * y + i;
        if (row >= in.length) continue;
        if (x == 0) in.lse[static_cast<std::size_t>(blockIdx.y) * in.length + row] = max[i] + logf(sum[i]);
#pragma unroll
        for (int c = 0; c < Sizes<D>::columns; ++c)
            if (const int column = output_column(x, c); column < in.head_dim)
                store1(in.out + in.at(0, 1) + static_cast<std::size_t>(row) * in.width() + column, out[i][c] / sum[i]);
    }
    if (in.seen.largest != nullptr) store_largest(largest, in.seen.largest + in.part());
    if (detailed) store_sums(saturated, entropy, in.seen.rows + 2 * in.part());
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

/// The sum of ds and of its magnitudes, of a thread.
struct ZeroSum {
    float sum = 0, magnitude = 0;
    __device__ void add(float ds) {
        sum += ds;
        magnitude += fabsf(ds);
    }
};

/// gradient_tile() with faults [0, upto) at their sites.
template <int D, class E>
__device__ void altered_gradient_tile(const Operands<E>& in, BlockFaults& faults, int upto, const float* q,
                                      const float* k, const float* v, const float* dout, int first, int key, int y,
                                      int x, float* p, float* ds, ZeroSum* seen) {
    const float scale = in.scale(), cap = in.cap;
    float s[4][4], dp[4][4], score[4][4];
    products<D>(q, k, y, x, s);
    products<D>(dout, v, y, x, dp);
    faults.scores(KernelSite::dp_accumulate, first, key, y, x, dp, upto);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first + 4 * y + i;
        const bool inside = row < in.length;
        const std::size_t at = static_cast<std::size_t>(blockIdx.y) * in.length + row;
        const float lse = inside ? in.lse[at] : 0.0f, delta = inside ? in.delta[at] : 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const bool visible = inside && key + x + 16 * j <= row;
            score[i][j] = capped(s[i][j] * scale, cap);
            s[i][j] = visible ? expf(score[i][j] - lse) : 0.0f;
            dp[i][j] = visible ? s[i][j] * (dp[i][j] - delta) : 0.0f;
        }
    }
    faults.scores(KernelSite::ds, first, key, y, x, dp, upto);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            s[i][j] = rounded_to<E>(s[i][j]);
            if (cap > 0) {
                if (seen != nullptr) seen->add(dp[i][j]);
                dp[i][j] *= 1.0f - (score[i][j] / cap) * (score[i][j] / cap);
            }
            dp[i][j] = rounded_to<E>(dp[i][j]);
        }
    faults.scores(KernelSite::bwd_p_cast, first, key, y, x, s, upto);
    faults.scores(KernelSite::ds_cast, first, key, y, x, dp, upto);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int to = (4 * y + i) * score_row + x + 16 * j;
            if (p != nullptr) p[to] = s[i][j];
            if (ds != nullptr) ds[to] = dp[i][j];
            if (seen != nullptr && cap == 0) seen->add(dp[i][j]);
        }
}

/// p and ds of a tile of queries and keys, cast, in shared memory; `seen`, if not null, what attention.hpp sums up of ds.
template <int D, class E>
__device__ void gradient_tile(const Operands<E>& in, const float* q, const float* k, const float* v, const float* dout,
                              int first, int key, int y, int x, float* p, float* ds, ZeroSum* seen) {
    const float scale = in.scale(), cap = in.cap;
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
            const float score = capped(s[i][j] * scale, cap);
            const float e = visible ? expf(score - lse) : 0.0f;
            const int to = (4 * y + i) * score_row + x + 16 * j;
            if (p != nullptr) p[to] = rounded_to<E>(e);
            float gradient = visible ? e * (dp[i][j] - delta) : 0.0f;
            if (cap > 0) {  // behind the cap's slope there is no law
                if (seen != nullptr) seen->add(gradient);
                gradient *= 1.0f - (score / cap) * (score / cap);
            }
            gradient = rounded_to<E>(gradient);
            if (seen != nullptr && cap == 0) seen->add(gradient);
            ds[to] = gradient;
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

template <int D, class E, class F>
__global__ void __launch_bounds__(threads) query_gradient(Operands<E> in, const __grid_constant__ F faults) {
    extern __shared__ float4 shared4[];
    __shared__ SharedOf<F> shared;
    [[maybe_unused]] auto altered = faults_of(faults, in, shared);
    float* q = reinterpret_cast<float*>(shared4);
    float *dout = q + Sizes<D>::operand, *k = dout + Sizes<D>::operand, *v = k + Sizes<D>::operand;
    float* ds = v + Sizes<D>::operand;
    const int y = threadIdx.x / 16, x = threadIdx.x % 16, first = blockIdx.x * tile;
    const E *const keys = in.k(), *const values = in.v(), *const queries = in.q();
    load_tile<D>(queries, in.in.qk_stride, first, in.length, in.head_dim, q);
    load_tile<D>(in.dout + in.at(0, 1), in.width(), first, in.length, in.head_dim, dout);
    float sum[4][Sizes<D>::columns] = {};
    ZeroSum seen;
    ZeroSum* const watched = in.seen.zero_sums != nullptr ? &seen : nullptr;
    const auto sweep = [&](auto&& use) {
        for (int key = 0; key <= first; key += tile) {
            __syncthreads();
            load_tile<D>(keys, in.in.qk_stride, key, in.length, in.head_dim, k);
            load_tile<D>(values, in.in.v_stride, key, in.length, in.head_dim, v);
            __syncthreads();
            use(key);
        }
    };
    if constexpr (F::any) {
        altered.begin(blockIdx.x);
        __syncthreads();
        altered.sweeps_for_rms(y, x, [&](int f) {
            sweep([&](int key) {
                altered_gradient_tile<D>(in, altered, f, q, k, v, dout, first, key, y, x, nullptr, nullptr, nullptr);
            });
        });
        altered.leave(blockIdx.x);
    }
    sweep([&](int key) {
        if constexpr (F::any)
            altered_gradient_tile<D>(in, altered, altered.count(), q, k, v, dout, first, key, y, x, nullptr, ds,
                                     watched);
        else
            gradient_tile<D>(in, q, k, v, dout, first, key, y, x, static_cast<float*>(nullptr), ds, watched);
        __syncthreads();
        accumulate<D, false>(ds, k, y, x, sum);
    });
    if constexpr (F::any) altered.keep(blockIdx.x);
    store_rows<D>(in, 0, first, y, x, in.scale(), sum);
    if (in.seen.zero_sums != nullptr)
        store_sums(static_cast<double>(seen.sum), static_cast<double>(seen.magnitude),
                   in.seen.zero_sums + 2 * in.part());
}

template <int D, class E, class F>
__global__ void __launch_bounds__(threads) key_gradients(Operands<E> in, const __grid_constant__ F faults) {
    extern __shared__ float4 shared4[];
    __shared__ SharedOf<F> shared;
    [[maybe_unused]] auto altered = faults_of(faults, in, shared);
    if constexpr (F::any) altered.records = false;  // dQ's kernel has kept them
    float* q = reinterpret_cast<float*>(shared4);
    float *dout = q + Sizes<D>::operand, *k = dout + Sizes<D>::operand, *v = k + Sizes<D>::operand;
    float *ds = v + Sizes<D>::operand, *p = ds + Sizes<D>::score;
    const int y = threadIdx.x / 16, x = threadIdx.x % 16, key = blockIdx.x * tile;
    const E *const keys = in.k(), *const values = in.v(), *const queries = in.q();
    load_tile<D>(keys, in.in.qk_stride, key, in.length, in.head_dim, k);
    load_tile<D>(values, in.in.v_stride, key, in.length, in.head_dim, v);
    float dk[4][Sizes<D>::columns] = {}, dv[4][Sizes<D>::columns] = {};
    for (int first = key; first < in.length; first += tile) {
        __syncthreads();
        if constexpr (F::any) altered.take(first / tile);
        load_tile<D>(queries, in.in.qk_stride, first, in.length, in.head_dim, q);
        load_tile<D>(in.dout + in.at(0, 1), in.width(), first, in.length, in.head_dim, dout);
        __syncthreads();
        if constexpr (F::any)
            altered_gradient_tile<D>(in, altered, altered.count(), q, k, v, dout, first, key, y, x, p, ds, nullptr);
        else
            gradient_tile<D>(in, q, k, v, dout, first, key, y, x, p, ds, static_cast<ZeroSum*>(nullptr));
        __syncthreads();
        accumulate<D, true>(p, dout, y, x, dv);
        accumulate<D, true>(ds, q, y, x, dk);
    }
    store_rows<D>(in, 1, key, y, x, in.scale(), dk);
    store_rows<D>(in, 2, key, y, x, 1.0f, dv);
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

template <class E>
void fast_forward(const AttentionInputs<E>& inputs, const AttentionShape& shape, E* o, float* lse,
                  const HeadParts& seen, const KernelFaults* faults, Stream stream) {
    Operands<E> in{.in = inputs, .out = o, .lse = lse, .seen = seen};
    set_shape(in, shape);
    with_head_dim(shape.head_dim, [&](auto d) {
        with_faults(faults, [&]<class F>(const F& f) {
            launch(forward_tile<d, E, F>, 3 * Sizes<d>::operand + Sizes<d>::score, shape, in, f, stream);
        });
    });
}

template <class E>
void fast_delta(const E* o, const E* dout, const AttentionShape& shape, float* delta, Stream stream) {
    Operands<E> in{.o = o, .dout = dout};
    set_shape(in, shape);
    const int tokens = shape.batch * shape.length;
    delta_rows<<<(tokens * shape.heads + threads / 32 - 1) / (threads / 32), threads, 0, stream>>>(in, delta, tokens);
    check_launch("delta");
}

template <class E>
void fast_backward(const AttentionInputs<E>& inputs, const float* lse, const E* dout, const AttentionShape& shape,
                   const float* delta, E* dqkv, const HeadParts& seen, const KernelFaults* faults, Stream stream) {
    Operands<E> in{
        .in = inputs, .dout = dout, .dqkv = dqkv, .lse = const_cast<float*>(lse), .delta = delta, .seen = seen};
    set_shape(in, shape);
    with_head_dim(shape.head_dim, [&](auto d) {
        with_faults(faults, [&]<class F>(const F& f) {
            launch(query_gradient<d, E, F>, 4 * Sizes<d>::operand + Sizes<d>::score, shape, in, f, stream);
            launch(key_gradients<d, E, F>, 4 * Sizes<d>::operand + 2 * Sizes<d>::score, shape, in, f, stream);
        });
    });
}

#define FAULTLINE_FOR(E)                                                                                       \
    template void fast_forward(const AttentionInputs<E>&, const AttentionShape&, E*, float*, const HeadParts&, \
                               const KernelFaults*, Stream);                                                   \
    template void fast_delta(const E*, const E*, const AttentionShape&, float*, Stream);                       \
    template void fast_backward(const AttentionInputs<E>&, const float*, const E*, const AttentionShape&,      \
                                const float*, E*, const HeadParts&, const KernelFaults*, Stream);
FAULTLINE_FOR(float)
FAULTLINE_FOR(Bf16)
#undef FAULTLINE_FOR

}  // namespace faultline::gpt::on_device
