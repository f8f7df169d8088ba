// SPDX-License-Identifier: Apache-2.0
// A block takes 128 queries and goes over the keys that they see, as the row pass of the backward (backward_rows.cuh): one
// thread copies, two warpgroups of 64 queries each multiply.
#include <faultline/tensor_kernel/row_statistics.hpp>

#include <stdexcept>

#include <faultline/tensor_kernel/device_memory.cuh>
#include <faultline/tensor_kernel/head_map.cuh>
#include <faultline/tensor_kernel/request.cuh>
#include <faultline/tensor_kernel/wgmma.cuh>

namespace faultline::tensor_kernel {
namespace {

using T = __nv_bfloat16;

template <int d>
struct Tiles {
    static constexpr int block_q = 128, block_k = 128, stages = 2, panels = d / 64, threads = 384;
    static constexpr int producer_registers = 24, consumer_registers = 240;
    struct Memory {
        alignas(1024) T q[panels * block_q * 64];
        alignas(1024) T k[stages][panels * block_k * 64];
        Barrier query_full, key_full[stages], key_empty[stages];
    };
    static constexpr int shared_bytes = sizeof(Memory) + 1024;  // dynamic shared memory may begin off the alignment
};

struct Arguments {
    CUtensorMap q, k;
    const float* lse;
    double* out;
    int heads, kv_heads, n_q, n_k;
    bool causal;
    float exponent;  ///< scale log2(e)
};

__device__ __forceinline__ int visible_keys(const Arguments& in, int query) {
    return in.causal ? max(0, min(in.n_k, query + 1 + in.n_k - in.n_q)) : in.n_k;
}

template <int d>
__device__ __forceinline__ void load(const Arguments& in, typename Tiles<d>::Memory& m, int q_tile, int tiles) {
    for (const CUtensorMap* map : {&in.q, &in.k}) prefetch_map(map);
    const int head = blockIdx.y % in.heads, batch = blockIdx.y / in.heads, kv_head = head / (in.heads / in.kv_heads);
    m.query_full.arrive_expect(sizeof m.q);
    load_tile(m.q, &in.q, m.query_full, 0, q_tile * Tiles<d>::block_q, 0, head, batch);
    for (int i = 0; i < tiles; ++i) {
        const int stage = i % Tiles<d>::stages;
        m.key_empty[stage].wait((i / Tiles<d>::stages & 1) ^ 1);
        m.key_full[stage].arrive_expect(sizeof m.k[0]);
        load_tile(m.k[stage], &in.k, m.key_full[stage], 0, i * Tiles<d>::block_k, 0, kv_head, batch);
    }
}

/// Two rows of a thread: g and g + 8 of its warp. With t = log2 p as lse has it, a row's weights are p / z, z = sum p, and its
/// entropy is log z - sum p log p / z: of terms of one sign where lse is what it should be.
template <int d>
__device__ __forceinline__ void sum(const Arguments& in, typename Tiles<d>::Memory& m, int which, int q_tile,
                                    int tiles) {
    constexpr int block_k = Tiles<d>::block_k;
    constexpr float log2_e = 1.44269502162933349609375f;
    const int lane = threadIdx.x % 32, warp_row = q_tile * Tiles<d>::block_q + which * 64 + threadIdx.x / 32 % 4 * 16;
    const int row = warp_row + lane / 4;
    float lse[2], z[2] = {0, 0}, weighted[2] = {0, 0}, largest[2] = {-INFINITY, -INFINITY};
    int seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row + 8 * r;
        seen[r] = i < in.n_q ? visible_keys(in, i) : 0;
        lse[r] = seen[r] > 0 ? in.lse[static_cast<std::int64_t>(blockIdx.y) * in.n_q + i] * log2_e : 0.0f;
    }
    m.query_full.wait(0);
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % Tiles<d>::stages;
        m.key_full[stage].wait(tile / Tiles<d>::stages & 1);
        float s[block_k / 2];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < d / 16; ++i)
            Wgmma<T, block_k>::template ss<0, 0>(
                s, k_major(m.q + (i / 4 * Tiles<d>::block_q + which * 64) * 64) + i % 4 * k_major_step,
                k_major(m.k[stage] + i / 4 * block_k * 64) + i % 4 * k_major_step, i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        keep(s);
        if (lane == 0) m.key_empty[stage].arrive();
#pragma unroll
        for (int e = 0; e < block_k / 2; ++e) {
            const int r = e / 2 % 2, j = tile * block_k + e / 4 * 8 + lane % 4 * 2 + e % 2;
            if (j >= seen[r]) continue;
            const float t = fmaf(s[e], in.exponent, -lse[r]), p = ex2(t);
            z[r] += p;
            if (p > 0) weighted[r] += p * t;
            largest[r] = fmaxf(largest[r], p);
        }
    }
    double saturated = 0, entropy = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int half = 2; half > 0; half /= 2) {
            z[r] += __shfl_xor_sync(~0u, z[r], half);
            weighted[r] += __shfl_xor_sync(~0u, weighted[r], half);
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], half));
        }
        if (lane % 4 != 0 || seen[r] < 2) continue;
        constexpr double log_2 = 0.69314718055994530942;
        saturated += static_cast<double>(largest[r]) / static_cast<double>(z[r]) > 1 - 0x1p-9 ? 1 : 0;
        entropy +=
            log(static_cast<double>(z[r])) - log_2 * static_cast<double>(weighted[r]) / static_cast<double>(z[r]);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        saturated += __shfl_xor_sync(~0u, saturated, step);
        entropy += __shfl_xor_sync(~0u, entropy, step);
    }
    if (lane != 0 || warp_row >= in.n_q) return;
    double* const to = in.out + 2 * (static_cast<std::int64_t>(blockIdx.y) * ((in.n_q + 15) / 16) + warp_row / 16);
    to[0] = saturated;
    to[1] = entropy;
}

/// Grid: query tiles of 128, those with the most keys first; heads of all batch elements.
template <int d>
__global__ void __launch_bounds__(Tiles<d>::threads, 1) row_statistics(const __grid_constant__ Arguments in) {
    extern __shared__ std::uint8_t dynamic[];
    auto& m = *reinterpret_cast<typename Tiles<d>::Memory*>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);
    if (threadIdx.x == 0) {
        m.query_full.init(1);
        for (int i = 0; i < Tiles<d>::stages; ++i) {
            m.key_full[i].init(1);
            m.key_empty[i].init(8);  // one thread of each consuming warp
        }
        fence_barrier_init();
    }
    __syncthreads();
    const int warpgroup = uniform(threadIdx.x / 128);
    const int q_tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    const int keys = visible_keys(in, min(in.n_q, (q_tile + 1) * Tiles<d>::block_q) - 1);
    const int tiles = (keys + Tiles<d>::block_k - 1) / Tiles<d>::block_k;
    if (warpgroup == 0) {
        fewer_registers<Tiles<d>::producer_registers>();
        if (threadIdx.x == 0) load<d>(in, m, q_tile, tiles);
    } else {
        more_registers<Tiles<d>::consumer_registers>();
        sum<d>(in, m, warpgroup - 1, q_tile, tiles);
    }
}

template <int d>
void launch(const RowStatisticsCall& call, cudaStream_t stream) {
    using Of = Tiles<d>;
    Arguments in{};
    in.q = head_map<T>(call.q, call.q_strides, call.batch, call.heads, call.n_q, d, Of::block_q);
    in.k = head_map<T>(call.k, call.k_strides, call.batch, call.kv_heads, call.n_k, d, Of::block_k);
    in.lse = call.lse;
    in.out = call.out;
    in.heads = call.heads;
    in.kv_heads = call.kv_heads;
    in.n_q = call.n_q;
    in.n_k = call.n_k;
    in.causal = call.causal;
    in.exponent = static_cast<float>(call.scale * 1.4426950408889634074);
    check(cudaFuncSetAttribute(row_statistics<d>, cudaFuncAttributeMaxDynamicSharedMemorySize, Of::shared_bytes),
          "setting the shared memory of the row statistics");
    const dim3 grid(static_cast<unsigned>((call.n_q + Of::block_q - 1) / Of::block_q),
                    static_cast<unsigned>(call.batch * call.heads));
    row_statistics<d><<<grid, Of::threads, Of::shared_bytes, stream>>>(in);
    check(cudaGetLastError(), "launching the row statistics");
}

}  // namespace

void launch_row_statistics(const RowStatisticsCall& call, void* stream) {
    const bool positive =
        call.batch > 0 && call.heads > 0 && call.kv_heads > 0 && call.n_q > 0 && call.n_k > 0 && call.scale > 0;
    if (!positive || call.heads % call.kv_heads != 0 || (call.head_dim != 64 && call.head_dim != 128))
        throw std::invalid_argument(
            "tensor_kernel: sizes must be positive, heads a multiple of kv_heads, head_dim 64 or 128");
    expect_device(Unit::wgmma);
    call.head_dim == 64 ? launch<64>(call, static_cast<cudaStream_t>(stream))
                        : launch<128>(call, static_cast<cudaStream_t>(stream));
}

}  // namespace faultline::tensor_kernel
