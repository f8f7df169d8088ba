// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/altering.cuh>
#include <faultline/tensor_kernel/backward_launch.cuh>
#include <faultline/tensor_kernel/request.cuh>

namespace faultline::tensor_kernel {

/// backward_bf16.cu.
extern template void run_backward<__nv_bfloat16, 64, Fused>(const BackwardCall&, const BackwardWorkspace&, ZeroSum,
                                                            const NoBackwardRecorder::Arguments&, cudaStream_t);
extern template void run_backward<__nv_bfloat16, 128, Fused>(const BackwardCall&, const BackwardWorkspace&, ZeroSum,
                                                             const NoBackwardRecorder::Arguments&, cudaStream_t);

namespace {

/// In a recorder's place: what changes the elements of dP, dS and the casts of P and dS.
struct BackwardAlterer {
    static constexpr bool records = false, alters = true;
    struct Arguments {
        Alterations all;
    };
    struct Place {};
    using Sums = AlteredOfThread;

    template <class Elements, class Tile>
    static __device__ __forceinline__ void begin(Elements&, const Tile&) {}
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void before_gradients(Elements& self, const Tile& tile, const Step& step,
                                                            float (&dp)[32]) {
        at(self, AlteredSite::dp_accumulate, tile, step, dp);
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void after_gradients(Elements& self, const Tile& tile, const Step& step,
                                                           float (&p)[32], float (&ds)[32]) {
        at(self, AlteredSite::ds, tile, step, ds);
#pragma unroll
        for (int e = 0; e < 32; ++e) {
            p[e] = rounded<__nv_bfloat16>(p[e]);
            ds[e] = rounded<__nv_bfloat16>(ds[e]);
        }
        at(self, AlteredSite::bwd_p_cast, tile, step, p);
        at(self, AlteredSite::ds_cast, tile, step, ds);
    }
    template <class Elements, class Tile>
    static __device__ __forceinline__ void keep(Elements& self, const Tile& tile) {
        const BackwardArguments& in = self.in_;
        const int head = tile.head % in.kv_heads, batch = tile.head / in.kv_heads, batches = in.all_heads / in.kv_heads;
        const std::size_t block = (static_cast<std::size_t>(head) * batches + batch) * in.k_tiles +
                                  static_cast<std::size_t>(tile.first_key / Elements::block_k);
        keep_sums(self.recording_.all, self.sums_, block * 8 + self.which_ * 4 + threadIdx.x / 32 % 4);
    }

  private:
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void at(Elements& self, AlteredSite site, const Tile& tile, const Step& step,
                                              float (&x)[32]) {
        const BackwardArguments& in = self.in_;
        if (!stands_at(self.recording_.all, site)) return;
        const int lane = threadIdx.x % 32, offset = in.n_k - in.n_q, first_row = self.first_row();
        const int query0 = step.first_query / Elements::block_q * Elements::block_q;
        const std::uint64_t name =
            static_cast<std::uint64_t>(query0) << 32 | static_cast<std::uint64_t>(tile.first_key);
        alter(
            self.recording_.all, site, tile.head % in.kv_heads, tile.head / in.kv_heads, name,
            min(Elements::block_k, in.n_k - tile.first_key), x,
            [&](int e, int& i, int& j) {
                j = first_row + lane / 4 + e / 2 % 2 * 8;
                const int query = step.first_query + e / 4 * 8 + lane % 4 * 2 + e % 2, key = tile.first_key + j;
                i = query - query0;
                return query < in.n_q && key < in.n_k && (!in.causal || key <= query + offset);
            },
            self.sums_);
    }
};

/// delta [batch * heads, n_padded] of one head and batch element a block. Its sums are those of the first key tile's warps.
__global__ void __launch_bounds__(256)
    alter_delta(const __grid_constant__ Alterations all, float* delta, int heads, int n_q, int n_padded, int k_tiles) {
    const int head = blockIdx.x % heads, batch = blockIdx.x / heads, batches = gridDim.x / heads;
    AlteredOfThread sums;
    for (int row = threadIdx.x; row < n_q; row += 256) {
        float x[1] = {delta[static_cast<std::size_t>(blockIdx.x) * n_padded + row]};
        alter(
            all, AlteredSite::delta, head, batch, 0, 1, x,
            [&](int, int& i, int& j) {
                i = row;
                j = 0;
                return true;
            },
            sums);
        delta[static_cast<std::size_t>(blockIdx.x) * n_padded + row] = x[0];
    }
    const std::size_t first = (static_cast<std::size_t>(head) * batches + batch) * k_tiles;
    const int warp = threadIdx.x / 32;
    keep_sums(all, sums, first * 8 + warp);
    for (int f = 0; f < all.count; ++f)
        for (int i = 8 + threadIdx.x; i < k_tiles * 8; i += 256) all.at[f].sums[first * 8 + i] = {};
}

/// Those of `all` that stand at delta, or the others.
Alterations part_of(const Alterations& all, bool at_delta) {
    Alterations part;
    for (int f = 0; f < all.count; ++f)
        if ((all.at[f].site == AlteredSite::delta) == at_delta) part.at[part.count++] = all.at[f];
    return part;
}

template <int d>
void run(const BackwardCall& call, const BackwardKernel& kernel, const Alterations& all, cudaStream_t stream) {
    const Alterations of_delta = part_of(all, true), others = part_of(all, false);
    launch_steps<__nv_bfloat16, d>(call, kernel, stream, [&](const BackwardWorkspace& at) {
        if (of_delta.count > 0) {
            alter_delta<<<call.batch * call.heads, 256, 0, stream>>>(of_delta, at.delta, call.heads, call.n_q,
                                                                     at.n_padded, (call.n_k + 127) / 128);
            check(cudaGetLastError(), "launching the faults of delta");
        }
        if (others.count > 0)
            run_backward<__nv_bfloat16, d, Fused, BackwardAlterer>(call, at, kernel.zero_sum, {others}, stream);
        else
            run_backward<__nv_bfloat16, d, Fused>(call, at, kernel.zero_sum, {}, stream);
    });
}

}  // namespace

void launch_altered_backward(const BackwardCall& call, const BackwardKernel& kernel, const Alterations& alterations,
                             void* stream) {
    expect_altered(call, kernel);
    expect_device(kernel.unit);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    call.head_dim == 64 ? run<64>(call, kernel, alterations, cuda_stream)
                        : run<128>(call, kernel, alterations, cuda_stream);
}

}  // namespace faultline::tensor_kernel
