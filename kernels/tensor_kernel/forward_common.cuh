// SPDX-License-Identifier: Apache-2.0
// What the forwards on the two generations of tensor cores have in common: the call, the order of query tiles, the mask and
// the end of a query tile. A thread holds rows g and g + 8 of its warp's 16, of every eight columns two (softmax.cuh).
#pragma once

#include <cstdint>

#include <faultline/tensor_kernel/softmax.cuh>

namespace faultline::tensor_kernel {

/// Where a query tile lies.
struct TilePlace {
    int q_tile, head, batch;
};

struct ForwardShape {
    int heads, kv_heads, n_q, n_k;
    int q_tiles, heads_at_once, tiles;  ///< query tiles a head; heads (of all batch elements) a section; tiles in all
    bool causal;                        ///< key j is visible to query i when j <= i + n_k - n_q
    float natural;                      ///< scale
    SoftmaxScales scales;

    /// Query tiles with the most keys come first, within sections of some heads.
    [[nodiscard]] __device__ __forceinline__ TilePlace place(int tile) const {
        const int section_tiles = heads_at_once * q_tiles, section = tile / section_tiles;
        const int first = section * heads_at_once;
        const int here = min(heads_at_once, tiles / q_tiles - first);
        const int rest = tile - section * section_tiles;
        const int head = first + rest % here;
        return {q_tiles - 1 - rest / here, head % heads, head / heads};
    }
    /// Keys that a row sees; negative where there is none.
    [[nodiscard]] __device__ __forceinline__ int visible(int row) const {
        return causal ? min(n_k, row + n_k - n_q + 1) : n_k;
    }
    /// Key tiles that the rows before `end` reach; one, which is masked away, where there is none.
    template <int block_k>
    [[nodiscard]] __device__ __forceinline__ int key_tiles(int end) const {
        return max(1, (visible(min(end, n_q) - 1) + block_k - 1) / block_k);
    }
    /// Key tiles that this row and all after it see whole.
    template <int block_k>
    [[nodiscard]] __device__ __forceinline__ int whole_tiles(int row) const {
        return max(0, visible(row)) / block_k;
    }
    [[nodiscard]] __device__ __forceinline__ int kv_head(int head) const { return head / (heads / kv_heads); }
};

/// o [batch, heads, n_q, d] by strides in elements; lse [batch, heads, n_q] contiguous.
template <class T>
struct ForwardOutput {
    T* o;
    float* o_unrounded;  ///< null, or o before its cast, with o's strides
    float* lse;          ///< natural units; +inf where a row has no key
    float* largest;      ///< null, or ForwardCall::largest
    std::int64_t o_row, o_head, o_batch;
};

/// Scores of keys that a row does not see become -inf. row: the thread's first.
template <int keys>
__device__ __forceinline__ void mask_scores(const ForwardShape& in, float (&s)[keys / 2], int key0, int row) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int limit = in.visible(row + 8 * r) - key0 - 2 * t;
#pragma unroll
        for (int j = 0; j < keys / 8; ++j) {
            if (8 * j >= limit) s[4 * j + 2 * r] = -INFINITY;
            if (8 * j + 1 >= limit) s[4 * j + 2 * r + 1] = -INFINITY;
        }
    }
}

/// P as the A operand of P V, 16 keys a step.
template <class T, int keys>
__device__ __forceinline__ void pack_p(const float (&s)[keys / 2], std::uint32_t (&p)[keys / 16][4]) {
#pragma unroll
    for (int i = 0; i < keys / 16; ++i)
#pragma unroll
        for (int w = 0; w < 4; ++w) p[i][w] = pack<T>(s[8 * i + 2 * w], s[8 * i + 2 * w + 1]);
}

/// The same in e4m3, 32 keys a step, in the order in which the thread has them: V's keys are in that order (key_at(),
/// transposed_values.cuh).
template <int keys>
__device__ __forceinline__ void pack_p_e4m3(const float (&s)[keys / 2], std::uint32_t (&p)[keys / 32][4]) {
#pragma unroll
    for (int i = 0; i < keys / 32; ++i)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float* const x = &s[16 * i + w / 2 * 8 + w % 2 * 2];
            asm("{\n.reg .b16 low, high;\n"
                "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
                "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
                "mov.b32 %0, {low, high};\n}\n"
                : "=r"(p[i][w])
                : "f"(x[0]), "f"(x[1]), "f"(x[4]), "f"(x[5]));
        }
}

/// Four neighbouring columns groups of a row meet in one thread of the quad, which then has eight columns in a row.
__device__ __forceinline__ uint4 transpose_quad(const std::uint32_t (&x)[4], int t) {
    // Thread t has words x[i] of group i; it wants word u of group t from thread u. Two rounds of exchanges.
    std::uint32_t y[4];
    const bool odd = t & 1, high = t & 2;
    const std::uint32_t a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
    const std::uint32_t b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    y[0] = odd ? a : x[0];
    y[1] = odd ? x[1] : a;
    y[2] = odd ? b : x[2];
    y[3] = odd ? x[3] : b;
    const std::uint32_t c = __shfl_xor_sync(~0u, high ? y[0] : y[2], 2);
    const std::uint32_t e = __shfl_xor_sync(~0u, high ? y[1] : y[3], 2);
    return {high ? c : y[0], high ? e : y[1], high ? y[2] : c, high ? y[3] : e};
}

/// The largest scaled score of the warp's 16 rows. row: the thread's first.
template <class Softmax>
__device__ __forceinline__ void store_largest(const ForwardShape& in, float* to, const TilePlace& at, int row,
                                              const Softmax& softmax, const float& natural) {
    float largest = -INFINITY;
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (row + 8 * r < in.n_q) largest = fmaxf(largest, softmax.largest(r) * natural);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const int group = row / 16, groups = (in.n_q + 15) / 16;
    if (threadIdx.x % 32 == 0 && group < groups)
        to[(static_cast<std::int64_t>(at.batch) * in.heads + at.head) * groups + group] = largest;
}

/// A query tile's end: o divided by the row sums, cast and stored, and lse. inverse: what o was multiplied with. natural: what
/// makes logits of scores; factor, where max_offset is not 0: what multiplies the output beside 1 / row sum.
template <class T, int d, class Softmax>
__device__ __forceinline__ void store_rows(const ForwardShape& in, const ForwardOutput<T>& out, const TilePlace& at,
                                           int row, const Softmax& softmax, const float (&o)[d / 2],
                                           float (&inverse)[2], const float& natural, float factor = 1) {
    const int t = threadIdx.x % 4;
    if (out.largest != nullptr) store_largest(in, out.largest, at, row, softmax, natural);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row + 8 * r;
        const float sum = softmax.joined(r);
        const bool empty = sum == 0 || sum != sum;
        inverse[r] = empty ? 1.0f : __frcp_rn(sum);
        if constexpr (Softmax::max_offset != 0) inverse[r] *= factor;
        const std::int64_t begin = at.batch * out.o_batch + at.head * out.o_head + i * out.o_row;
        const bool inside = i < in.n_q;
        if (t == 0 && inside) {
            float log2_sum;
            asm("lg2.approx.f32 %0, %1;" : "=f"(log2_sum) : "f"(sum));
            // max scale + logf(sum), one fma; __logf is lg2.approx times ln 2 (special/lg2_approx.hpp).
            float logarithm = log2_sum * 0.693147182464599609375f;
            if constexpr (Softmax::max_offset != 0)
                logarithm =
                    static_cast<float>(static_cast<double>(logarithm) - Softmax::max_offset * 0.693147180559945309417);
            const float lse = Softmax::has_state ? held_lse(softmax.maximum[r], natural, logarithm, in.scales.state.lse)
                                                 : fmaf(softmax.maximum[r], natural, logarithm);
            out.lse[(static_cast<std::int64_t>(at.batch) * in.heads + at.head) * in.n_q + i] = empty ? INFINITY : lse;
        }
#pragma unroll
        for (int c = 0; c < d / 32; ++c) {  // 32 columns: four groups of eight
            std::uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float low = o[16 * c + 4 * j + 2 * r] * inverse[r];
                const float high = o[16 * c + 4 * j + 2 * r + 1] * inverse[r];
                words[j] = pack<T>(low, high);
                if (out.o_unrounded != nullptr && inside)
                    *reinterpret_cast<float2*>(out.o_unrounded + begin + 32 * c + 8 * j + 2 * t) = {low, high};
            }
            const uint4 eight = transpose_quad(words, t);
            if (inside) *reinterpret_cast<uint4*>(out.o + begin + 32 * c + 8 * t) = eight;
        }
    }
}

}  // namespace faultline::tensor_kernel
