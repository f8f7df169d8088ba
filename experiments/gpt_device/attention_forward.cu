// SPDX-License-Identifier: Apache-2.0
// The forward of attention on CUDA cores (attention_tiles.cuh).
#include <faultline/gpt_device/attention_tiles.cuh>

namespace faultline::gpt::on_device {
namespace {

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
        for_each_key_tile<D>(in, keys, values, first, k, v, [&](int key) {
            scores(key);
            use(key);
        });
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
                store1(in.out + in.at(0, in.width()) + static_cast<std::size_t>(row) * in.width() + column,
                       out[i][c] / sum[i]);
    }
    if (in.seen.largest != nullptr) store_largest(largest, in.seen.largest + in.part());
    if (detailed) store_sums(saturated, entropy, in.seen.rows + 2 * in.part());
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

#define FAULTLINE_FOR(E)                                                                                       \
    template void fast_forward(const AttentionInputs<E>&, const AttentionShape&, E*, float*, const HeadParts&, \
                               const KernelFaults*, Stream);
FAULTLINE_FOR(float)
FAULTLINE_FOR(Bf16)
#undef FAULTLINE_FOR

}  // namespace faultline::gpt::on_device
