// SPDX-License-Identifier: Apache-2.0
// The tiles of the forward on Hopper, what a block's memory holds of them, and the arguments of a call.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_fp8.h>

#include <faultline/tensor_kernel/forward_common.cuh>

namespace faultline::tensor_kernel {

template <class T, int d, int consumer_groups = 2, int key_stages = d == 64 ? 4 : 2, int keys = 128>
struct ForwardTiles {
    static constexpr int head_dim = d, consumers = consumer_groups;
    static constexpr int block_q = 64 * consumers, block_k = keys, stages = key_stages, panels = d / 64;
    static constexpr int threads = 128 * (consumers + 1);
    static constexpr bool is_e4m3 = std::is_same_v<T, __nv_fp8_e4m3>;
    static constexpr int k_step = is_e4m3 ? 32 : 16;  ///< of k in one wgmma
    // setmaxnreg: the sum over warpgroups is what the launch allots, 65536/threads rounded down to 8.
    static constexpr int producer_registers = consumers == 2 ? 24 : 32, consumer_registers = consumers == 2 ? 240 : 160;

    struct Memory {
        alignas(1024) T q[2][panels * block_q * 64];
        alignas(1024) T k[stages][panels * block_k * 64];
        alignas(1024) T v[stages][panels * block_k * 64];
        Barrier q_full[2], q_empty[2], k_full[stages], k_empty[stages], v_full[stages], v_empty[stages];
        int tile[2];  ///< comes and goes with q; -1: no more
    };
};

/// Element type of the output.
template <class T>
using OutputOf = std::conditional_t<std::is_same_v<T, __nv_fp8_e4m3>, __nv_bfloat16, T>;

/// Null, or ForwardCall's factors [batch, kv_heads], which e4m3 has alone.
template <class T>
struct DescaleFactors {};
template <>
struct DescaleFactors<__nv_fp8_e4m3> {
    const float *q_descale, *k_descale, *v_descale;
};
/// ForwardShape::natural and SoftmaxScales::exponent with the factors of a query tile's head, of e4m3.
template <class T>
struct DescaledScales {};
template <>
struct DescaledScales<__nv_fp8_e4m3> {
    float natural, exponent;
};

/// One call. Shapes: q [batch, heads, n_q, d], k, v [batch, kv_heads, n_k, d], by tensor maps of five dimensions: 64 columns
/// (of e4m3 d, and one panel), row, panel, head, batch. v of e4m3: [batch, kv_heads, d, n_k], keys as transposed_values.cuh has
/// them.
template <class T>
struct ForwardArguments : ForwardShape, ForwardOutput<OutputOf<T>>, DescaleFactors<T> {
    CUtensorMap q, k, v;
    /// Two counters, zero before the launch and after it: of tiles; with a recorder, of parts of them that it looked through.
    int* next;
};

/// A position in a ring of slots and the parity of its pass.
template <int slots>
struct Ring {
    int slot = 0;
    std::uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

}  // namespace faultline::tensor_kernel
