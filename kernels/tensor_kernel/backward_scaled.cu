// SPDX-License-Identifier: Apache-2.0
// The backward with dP and dS multiplied by a number of their head: faults that one multiplication makes. Between the issue of a
// wgmma and the wait for it there is no branch, so the kernel runs as the one without faults does; that of backward_altered.cu has
// its products one after the other (nvcc's C7514) and some 40 instructions for an element.
#include <faultline/tensor_kernel/backward_launch.cuh>
#include <faultline/tensor_kernel/factor.cuh>
#include <faultline/tensor_kernel/request.cuh>
#include <faultline/tensor_kernel/scaling.hpp>

namespace faultline::tensor_kernel {
namespace {

struct Scalings {
    const HeadAlteration *dp_accumulate, *ds;  ///< [heads]; null: 1
    AlteredSums *dp_sums, *ds_sums;            ///< [head, key tile, warp], of the first sequence
};

/// In a recorder's place.
struct BackwardScaler {
    static constexpr bool records = false, alters = true;
    using Arguments = Scalings;
    struct Place {};
    struct Sums {
        float dp, ds;  ///< of the block's head
    };

    template <class Elements, class Tile>
    static __device__ __forceinline__ void begin(Elements& self, const Tile& tile) {
        const int head = tile.head % self.in_.kv_heads;
        self.sums_.dp = factor_of(self.recording_.dp_accumulate, head);
        self.sums_.ds = factor_of(self.recording_.ds, head);
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void before_gradients(Elements& self, const Tile&, const Step&, float (&dp)[32]) {
#pragma unroll
        for (float& x : dp) x *= self.sums_.dp;
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void after_gradients(Elements& self, const Tile&, const Step&, float (&)[32],
                                                           float (&ds)[32]) {
#pragma unroll
        for (float& x : ds) x *= self.sums_.ds;
    }
    template <class Elements, class Tile>
    static __device__ __forceinline__ void keep(Elements&, const Tile&) {}
};

/// The same in the tiles of the first sequence, and what it did.
struct RecordedScaler {
    static constexpr bool records = false, alters = true;
    using Arguments = Scalings;
    using Elsewhere = BackwardScaler;
    struct Place {};
    struct Sums {
        float dp, ds;
        AlteredSums of_dp, of_ds;
    };

    template <class Tile>
    static __device__ __forceinline__ bool looks_at(const BackwardArguments& in, const Tile& tile) {
        return tile.head < in.kv_heads;
    }
    template <class Elements, class Tile>
    static __device__ __forceinline__ void begin(Elements& self, const Tile& tile) {
        self.sums_ = {};
        const int head = tile.head % self.in_.kv_heads;
        self.sums_.dp = factor_of(self.recording_.dp_accumulate, head);
        self.sums_.ds = factor_of(self.recording_.ds, head);
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void before_gradients(Elements& self, const Tile& tile, const Step& step,
                                                            float (&dp)[32]) {
        scale(self, tile, step, dp, self.sums_.dp, self.sums_.of_dp);
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void after_gradients(Elements& self, const Tile& tile, const Step& step,
                                                           float (&)[32], float (&ds)[32]) {
        scale(self, tile, step, ds, self.sums_.ds, self.sums_.of_ds);
    }
    template <class Elements, class Tile>
    static __device__ __forceinline__ void keep(Elements& self, const Tile& tile) {
        const BackwardArguments& in = self.in_;
        const std::size_t slot = (static_cast<std::size_t>(tile.head) * in.k_tiles +
                                  static_cast<std::size_t>(tile.first_key / Elements::block_k)) *
                                     8 +
                                 self.which_ * 4 + threadIdx.x / 32 % 4;
        // Where a fault does not act now, nothing was counted of it.
        store_sums(self.recording_.dp_sums, acts(self.recording_.dp_accumulate, tile.head), self.sums_.of_dp, slot);
        store_sums(self.recording_.ds_sums, acts(self.recording_.ds, tile.head), self.sums_.of_ds, slot);
    }

  private:
    /// No path of its own for an element that the mask hides or that is not finite: nvcc makes wgmma wait for those.
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void scale(Elements& self, const Tile& tile, const Step& step, float (&x)[32],
                                                 float factor, AlteredSums& to) {
        const BackwardArguments& in = self.in_;
        const int lane = threadIdx.x % 32, offset = in.n_k - in.n_q;
#pragma unroll
        for (int e = 0; e < 32; ++e) {
            const int key = tile.first_key + self.first_row() + lane / 4 + e / 2 % 2 * 8;
            const int query = step.first_query + e / 4 * 8 + lane % 4 * 2 + e % 2;
            const bool counts = query < in.n_q && key < in.n_k && (!in.causal || key <= query + offset) &&
                                fabsf(x[e]) <= 3.402823466e38f;
            const float scaled = x[e] * factor;
            add_scaled(to, counts, x[e], scaled, factor);
            x[e] = scaled;
        }
    }
};

}  // namespace

void launch_scaled_backward(const BackwardCall& call, const BackwardKernel& kernel, const Alterations& alterations,
                            void* stream) {
    expect_altered(call, kernel, false);
    expect_device(kernel.unit);
    Scalings in{};
    for (int f = 0; f < alterations.count; ++f) {
        const AlteredAt& at = alterations.at[f];
        const bool at_ds = at.site == AlteredSite::ds;
        const HeadAlteration*& to = at_ds ? in.ds : in.dp_accumulate;
        if ((at.site != AlteredSite::ds && at.site != AlteredSite::dp_accumulate) || to != nullptr)
            throw std::invalid_argument(
                "tensor_kernel: the scaled backward has one factor at dp_accumulate and one at ds");
        to = at.heads;
        (at_ds ? in.ds_sums : in.dp_sums) = at.sums;
    }
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const auto run = [&]<int d>(std::integral_constant<int, d>) {
        launch_steps<__nv_bfloat16, d>(call, kernel, cuda_stream, [&](const BackwardWorkspace& at) {
            run_backward<__nv_bfloat16, d, Fused, RecordedScaler>(call, at, kernel.zero_sum, in, cuda_stream);
        });
    };
    call.head_dim == 64 ? run(std::integral_constant<int, 64>()) : run(std::integral_constant<int, 128>());
}

}  // namespace faultline::tensor_kernel
