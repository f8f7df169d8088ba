// SPDX-License-Identifier: Apache-2.0
// The backward with dP and dS multiplied by a number of their head: faults that one multiplication makes. Between the issue of a
// wgmma and the wait for it there is no branch, so the kernel runs as the one without faults does; that of backward_altered.cu has
// its products one after the other (nvcc's C7514) and some 40 instructions for an element.
#include <faultline/tensor_kernel/backward_launch.cuh>
#include <faultline/tensor_kernel/request.cuh>
#include <faultline/tensor_kernel/scaling.hpp>

namespace faultline::tensor_kernel {
namespace {

/// In a recorder's place.
struct BackwardScaler {
    static constexpr bool records = false, alters = true;
    struct Arguments {
        const HeadAlteration *dp_accumulate, *ds;  ///< [heads]; null: 1
    };
    struct Place {};
    struct Sums {
        float dp, ds;  ///< of the block's head
    };

    static __device__ __forceinline__ float factor(const HeadAlteration* heads, int head) {
        if (heads == nullptr || !heads[head].touched) return 1;
        return static_cast<float>(1 + heads[head].change.magnitude * heads[head].change.sign);
    }
    template <class Elements, class Tile>
    static __device__ __forceinline__ void begin(Elements& self, const Tile& tile) {
        const int head = tile.head % self.in_.kv_heads;
        self.sums_ = {factor(self.recording_.dp_accumulate, head), factor(self.recording_.ds, head)};
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

}  // namespace

void launch_scaled_backward(const BackwardCall& call, const BackwardKernel& kernel, const Alterations& alterations,
                            void* stream) {
    expect_altered(call, kernel, false);
    expect_device(kernel.unit);
    BackwardScaler::Arguments in{};
    for (int f = 0; f < alterations.count; ++f) {
        const AlteredAt& at = alterations.at[f];
        const HeadAlteration*& to = at.site == AlteredSite::ds ? in.ds : in.dp_accumulate;
        if ((at.site != AlteredSite::ds && at.site != AlteredSite::dp_accumulate) || to != nullptr)
            throw std::invalid_argument(
                "tensor_kernel: the scaled backward has one factor at dp_accumulate and one at ds");
        to = at.heads;
    }
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const auto run = [&]<int d>(std::integral_constant<int, d>) {
        launch_steps<__nv_bfloat16, d>(call, kernel, cuda_stream, [&](const BackwardWorkspace& at) {
            run_backward<__nv_bfloat16, d, Fused, BackwardScaler>(call, at, kernel.zero_sum, in, cuda_stream);
        });
    };
    call.head_dim == 64 ? run(std::integral_constant<int, 64>()) : run(std::integral_constant<int, 128>());
}

}  // namespace faultline::tensor_kernel
