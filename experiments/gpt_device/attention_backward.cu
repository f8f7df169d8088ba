// SPDX-License-Identifier: Apache-2.0
// The backward of attention on CUDA cores (attention_tiles.cuh): delta, then dQ, then dK and dV.
#include <faultline/gpt_device/attention_tiles.cuh>

namespace faultline::gpt::on_device {
namespace {

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
__device__ int count_of(const KernelFaults& faults) { return faults.count; }
__device__ int count_of(const NoFaults&) { return 0; }

/// p and ds of a tile of queries and keys, cast, in shared memory (either may be null), with faults [0, upto) at their sites;
/// `seen`, if not null, what attention.hpp sums up of ds. A fault needs its site's values of the whole tile at once, else each
/// row goes through to the end by itself.
template <int D, class E, class F>
__device__ void gradient_tile(const Operands<E>& in, F& faults, int upto, const float* q, const float* k,
                              const float* v, const float* dout, int first, int key, int y, int x, float* p, float* ds,
                              ZeroSum* seen) {
    const float scale = in.scale(), cap = in.cap;
    float s[4][4], dp[4][4], score[4][4];
    products<D>(q, k, y, x, s);
    products<D>(dout, v, y, x, dp);
    const auto differentiate = [&](int i) {  // p and ds in place of the products
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
    };
    const auto cast = [&](int i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            s[i][j] = rounded_to<E>(s[i][j]);
            if (cap > 0) {  // behind the cap's slope there is no law
                if (seen != nullptr) seen->add(dp[i][j]);
                dp[i][j] *= 1.0f - (score[i][j] / cap) * (score[i][j] / cap);
            }
            dp[i][j] = rounded_to<E>(dp[i][j]);
        }
    };
    const auto keep = [&](int i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int to = (4 * y + i) * score_row + x + 16 * j;
            if (p != nullptr) p[to] = s[i][j];
            if (ds != nullptr) ds[to] = dp[i][j];
            if (seen != nullptr && cap == 0) seen->add(dp[i][j]);
        }
    };
    if constexpr (!std::is_same_v<F, NoFaults>) {
        faults.scores(KernelSite::dp_accumulate, first, key, y, x, dp, upto);
#pragma unroll
        for (int i = 0; i < 4; ++i) differentiate(i);
        faults.scores(KernelSite::ds, first, key, y, x, dp, upto);
#pragma unroll
        for (int i = 0; i < 4; ++i) cast(i);
        faults.scores(KernelSite::bwd_p_cast, first, key, y, x, s, upto);
        faults.scores(KernelSite::ds_cast, first, key, y, x, dp, upto);
#pragma unroll
        for (int i = 0; i < 4; ++i) keep(i);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            differentiate(i);
            cast(i);
            keep(i);
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
                store1(
                    in.dqkv + in.at(part, in.gradient_row) + static_cast<std::size_t>(row) * in.gradient_row + column,
                    sum[i][c] * factor);
    }
}

template <int D, class E, class F>
__global__ void __launch_bounds__(threads) query_gradient(Operands<E> in, const __grid_constant__ F faults) {
    extern __shared__ float4 shared4[];
    __shared__ SharedOf<F> shared;
    auto altered = faults_of(faults, in, shared);
    float* q = reinterpret_cast<float*>(shared4);
    float *dout = q + Sizes<D>::operand, *k = dout + Sizes<D>::operand, *v = k + Sizes<D>::operand;
    float* ds = v + Sizes<D>::operand;
    const int y = threadIdx.x / 16, x = threadIdx.x % 16, first = blockIdx.x * tile;
    const E *const keys = in.k(), *const values = in.v(), *const queries = in.q();
    load_tile<D>(queries, in.in.qk_stride, first, in.length, in.head_dim, q);
    load_tile<D>(in.dout + in.at(0, in.width()), in.width(), first, in.length, in.head_dim, dout);
    float sum[4][Sizes<D>::columns] = {};
    ZeroSum seen;
    ZeroSum* const watched = in.seen.zero_sums != nullptr ? &seen : nullptr;
    if constexpr (F::any) {
        altered.begin(blockIdx.x);
        __syncthreads();
        altered.sweeps_for_rms(y, x, [&](int f) {
            for_each_key_tile<D>(in, keys, values, first, k, v, [&](int key) {
                gradient_tile<D>(in, altered, f, q, k, v, dout, first, key, y, x, nullptr, nullptr, nullptr);
            });
        });
        altered.leave(blockIdx.x);
    }
    for_each_key_tile<D>(in, keys, values, first, k, v, [&](int key) {
        gradient_tile<D>(in, altered, count_of(faults), q, k, v, dout, first, key, y, x, nullptr, ds, watched);
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
    auto altered = faults_of(faults, in, shared);
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
        load_tile<D>(in.dout + in.at(0, in.width()), in.width(), first, in.length, in.head_dim, dout);
        __syncthreads();
        gradient_tile<D>(in, altered, count_of(faults), q, k, v, dout, first, key, y, x, p, ds, nullptr);
        __syncthreads();
        accumulate<D, true>(p, dout, y, x, dv);
        accumulate<D, true>(ds, q, y, x, dk);
    }
    store_rows<D>(in, 1, key, y, x, in.scale(), dk);
    store_rows<D>(in, 2, key, y, x, 1.0f, dv);
}

}  // namespace

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

#define FAULTLINE_FOR(E)                                                                                  \
    template void fast_delta(const E*, const E*, const AttentionShape&, float*, Stream);                  \
    template void fast_backward(const AttentionInputs<E>&, const float*, const E*, const AttentionShape&, \
                                const float*, E*, const HeadParts&, const KernelFaults*, Stream);
FAULTLINE_FOR(float)
FAULTLINE_FOR(Bf16)
#undef FAULTLINE_FOR

}  // namespace faultline::gpt::on_device
