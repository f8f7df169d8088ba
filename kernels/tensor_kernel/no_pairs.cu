// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/no_pairs.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

#include <faultline/tensor_kernel/tensor_map.cuh>

namespace faultline::tensor_kernel {
namespace {

constexpr unsigned threads = 256;

unsigned blocks_for(std::int64_t work) {
    return static_cast<unsigned>(std::clamp<std::int64_t>((work + threads - 1) / threads, 1, 1 << 16));
}

/// [batch, heads, rows, words of 16 bytes], as the strides have it, in bytes.
struct Rows {
    void* base;
    std::int64_t row, head, batch;
    int heads, rows, words;
    std::int64_t all;
};

__global__ void __launch_bounds__(threads) clear_rows(const Rows to) {
    for (std::int64_t i = blockIdx.x * std::int64_t{threads} + threadIdx.x; i < to.all;
         i += std::int64_t{gridDim.x} * threads) {
        const std::int64_t line = i / to.words, head = line / to.rows;
        char* const at = static_cast<char*>(to.base) + line % to.rows * to.row + head % to.heads * to.head +
                         head / to.heads * to.batch;
        reinterpret_cast<uint4*>(at)[i % to.words] = uint4{};
    }
}

__global__ void __launch_bounds__(threads) fill(float* to, std::int64_t count, float value) {
    for (std::int64_t i = blockIdx.x * std::int64_t{threads} + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * threads)
        to[i] = value;
}

/// size: bytes of an element.
void clear(void* base, const Strides& strides, int batch, int heads, int rows, int head_dim, int size,
           cudaStream_t stream) {
    const int words = head_dim * size / 16;
    const Rows to{base,
                  strides.row * size,
                  strides.head * size,
                  strides.batch * size,
                  heads,
                  rows,
                  words,
                  std::int64_t{1} * batch * heads * rows * words};
    if (base == nullptr || to.all == 0) return;
    clear_rows<<<blocks_for(to.all), threads, 0, stream>>>(to);
    check(cudaGetLastError(), "clearing what a call without keys or queries leaves");
}

void fill_floats(float* to, std::int64_t count, float value, cudaStream_t stream) {
    if (to == nullptr || count == 0) return;
    fill<<<blocks_for(count), threads, 0, stream>>>(to, count, value);
    check(cudaGetLastError(), "filling what a call without keys leaves");
}

template <class Call>
void expect_sizes(const Call& call) {
    const bool positive = call.batch > 0 && call.heads > 0 && call.kv_heads > 0 && call.scale > 0;
    if (!positive || call.heads % call.kv_heads != 0 || (call.head_dim != 64 && call.head_dim != 128))
        throw std::invalid_argument(
            "tensor_kernel: sizes must be positive, heads a multiple of kv_heads, head_dim 64 or 128");
}

constexpr int element = 2;  // bytes; of e4m3 the outputs are bf16

}  // namespace

void write_without_pairs(const ForwardCall& call, void* stream) {
    expect_sizes(call);
    const auto on = static_cast<cudaStream_t>(stream);
    clear(call.o, call.o_strides, call.batch, call.heads, call.n_q, call.head_dim, element, on);
    clear(call.o_unrounded, call.o_strides, call.batch, call.heads, call.n_q, call.head_dim, sizeof(float), on);
    const std::int64_t heads = std::int64_t{1} * call.batch * call.heads;
    fill_floats(call.lse, heads * call.n_q, HUGE_VALF, on);
    fill_floats(call.largest, heads * row_groups(call.n_q), -HUGE_VALF, on);
}

void write_without_pairs(const BackwardCall& call, void* stream) {
    expect_sizes(call);
    const auto on = static_cast<cudaStream_t>(stream);
    clear(call.dq, call.dq_strides, call.batch, call.heads, call.n_q, call.head_dim, element, on);
    clear(call.dk, call.dk_strides, call.batch, call.kv_heads, call.n_k, call.head_dim, element, on);
    clear(call.dv, call.dv_strides, call.batch, call.kv_heads, call.n_k, call.head_dim, element, on);
    const std::size_t sums = std::size_t{2} * static_cast<std::size_t>(call.batch) *
                             static_cast<std::size_t>(call.kv_heads) *
                             static_cast<std::size_t>(zero_sum_parts(call.n_k));
    if (call.zero_sums == nullptr || sums == 0) return;
    check(cudaMemsetAsync(call.zero_sums, 0, sums * sizeof(double), on), "clearing the sums of no ds");
}

}  // namespace faultline::tensor_kernel
