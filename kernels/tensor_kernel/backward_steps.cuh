// SPDX-License-Identifier: Apache-2.0
// What stands before and after the backward's main kernel: delta and lse in log2 units, and dq scaled and cast.
#pragma once

#include <cstdint>

#include <faultline/tensor_kernel/backward_variant.hpp>
#include <faultline/tensor_kernel/hopper.cuh>
#include <faultline/tensor_kernel/widen.cuh>

namespace faultline::tensor_kernel {

template <class T>
__device__ __forceinline__ void load_eight(const T* from, float (&to)[8]) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const std::uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = widen<T>(pairs[i]);
        to[2 * i] = two.x;
        to[2 * i + 1] = two.y;
    }
}
template <>
__device__ __forceinline__ void load_eight<float>(const float* from, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(from + 4 * i);
        to[4 * i] = four.x;
        to[4 * i + 1] = four.y;
        to[4 * i + 2] = four.z;
        to[4 * i + 3] = four.w;
    }
}

/// Shapes: dout, o [batch, heads, n_q, d] by strides in elements; lse [batch, heads, n_q]; lse_log2, delta [batch * heads,
/// n_padded], whose rows beyond n_q get lse = +inf and delta = 0, so that their p is 0; dq [batch * heads, n_padded, d], cleared.
template <class T, class O>
struct PrepareArguments {
    const T* dout;
    const O* o;  ///< null: delta is 0
    const float* lse;
    float* lse_log2;
    float* delta;
    float4* dq;
    std::int64_t dout_row, dout_head, dout_batch, o_row, o_head, o_batch;
    int heads, n_q, n_padded;
    std::int64_t rows;  ///< batch * heads * n_padded
    float unit;         ///< of lse: log2(e), or 1
};

constexpr int prepare_threads = 256;

/// `lanes` threads a row: each adds the products of its octets of columns, lane, lane + lanes, ..., in order (octet_pairs: two
/// products are added to each other first), then they join over thread xor half, ..., 2, 1 as dot_in_order of kernels/cpu.
template <class T, class O, int d, DeltaOrder order, int lanes>
__global__ void __launch_bounds__(prepare_threads) prepare_backward(const PrepareArguments<T, O> in) {
    const std::int64_t slot = (static_cast<std::int64_t>(blockIdx.x) * prepare_threads + threadIdx.x) / lanes;
    const int lane = threadIdx.x % lanes;
    if (slot >= in.rows) return;  // a row's threads together
    const auto head = static_cast<int>(slot / in.n_padded);
    const auto row = static_cast<int>(slot - static_cast<std::int64_t>(head) * in.n_padded);
    for (int i = lane; i < d / 4; i += lanes) in.dq[slot * (d / 4) + i] = make_float4(0, 0, 0, 0);
    float sum = 0;
    if (row < in.n_q && in.o != nullptr) {
        const std::int64_t batch = head / in.heads, h = head % in.heads;
        const T* const dout = in.dout + batch * in.dout_batch + h * in.dout_head + row * in.dout_row;
        const O* const o = in.o + batch * in.o_batch + h * in.o_head + row * in.o_row;
#pragma unroll
        for (int octet = lane; octet < d / 8; octet += lanes) {
            float a[8], b[8];
            load_eight(dout + octet * 8, a);
            load_eight(o + octet * 8, b);
            constexpr int step = order == DeltaOrder::octet_pairs ? 2 : 1;
#pragma unroll
            for (int i = 0; i < 8; i += step) {
                float term = a[i] * b[i];
                if (step == 2) term = term + a[i + 1] * b[i + 1];
                sum = sum + term;
            }
        }
    }
    const unsigned here = __activemask();  // whole rows
#pragma unroll
    for (int half = lanes / 2; half > 0; half /= 2) sum = sum + __shfl_xor_sync(here, sum, half);
    if (lane != 0) return;
    in.delta[slot] = sum;
    float lse = INFINITY;
    if (row < in.n_q) {
        lse = in.lse[static_cast<std::int64_t>(head) * in.n_q + row] * in.unit;
        if (lse == -INFINITY) lse = INFINITY;  // no key: p is 0 whichever infinity the forward left
    }
    in.lse_log2[slot] = lse;
}

/// Shapes: dq [batch * heads, query blocks, 2, 8, 128, 4], as the consumers' accumulators hold it (backward.cuh); out
/// [batch, heads, n_q, d] by strides in elements.
template <class T>
struct FinishArguments {
    const float* dq;
    T* out;
    std::int64_t row, head, batch;
    int heads, n_q, query_blocks;
    float scale;
    const float* factors;  ///< null, or [batch * heads / group]: of the scale
    int group;             ///< query heads of a key head
};

/// One block for each 64 x 64 of dq; grid: 2 * query blocks, heads of all batch elements.
template <class T, int d>
__global__ void __launch_bounds__(128) finish_backward(const FinishArguments<T> in) {
    __shared__ std::uint32_t tile[64][33];  // a word more than the row: columns lie in different banks
    const int block = blockIdx.x / 2, unit = blockIdx.x % 2, head = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float4* const from = reinterpret_cast<const float4*>(in.dq) +
                               ((static_cast<std::int64_t>(head) * in.query_blocks + block) * 2 + unit) * 1024 +
                               threadIdx.x;
    const int row = warp * 16 + lane / 4;
    const float scale = in.factors == nullptr ? in.scale : in.scale * in.factors[head / in.group];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const float4 x = from[c * 128];
        tile[row][c * 4 + lane % 4] = pack<T>(x.x * scale, x.y * scale);
        tile[row + 8][c * 4 + lane % 4] = pack<T>(x.z * scale, x.w * scale);
    }
    __syncthreads();
    const int first_row = d == 64 ? block * 128 + unit * 64 : block * 64, first_column = d == 64 ? 0 : unit * 64;
    T* const out = in.out + head / in.heads * in.batch + head % in.heads * in.head + first_column;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int r = i * 4 + warp;
        if (first_row + r < in.n_q)
            *reinterpret_cast<std::uint32_t*>(out + (first_row + r) * in.row + 2 * lane) = tile[r][lane];
    }
}

}  // namespace faultline::tensor_kernel
