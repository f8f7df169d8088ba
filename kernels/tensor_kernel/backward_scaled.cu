// SPDX-License-Identifier: Apache-2.0
// The backward with dP, dS and the casts of P and dS multiplied by a number of their head: faults that one multiplication makes. Between the issue of a
// wgmma and the wait for it there is no branch, so the kernel runs as the one without faults does; that of backward_altered.cu has
// its products one after the other (nvcc's C7514) and some 40 instructions for an element.
#include <faultline/tensor_kernel/backward_launch.cuh>
#include <faultline/tensor_kernel/factor.cuh>
#include <faultline/tensor_kernel/request.cuh>
#include <faultline/tensor_kernel/scaling.hpp>

namespace faultline::tensor_kernel {
namespace {

struct Scalings {
    struct At {
        const HeadAlteration* heads;  ///< [heads]; null: 1
        AlteredSums* sums;            ///< [head, key tile, warp], of the first sequence
    };
    At dp_accumulate, ds, p_cast, ds_cast;
};
struct Factors {
    float dp, ds, p_cast, ds_cast;  ///< of the block's head
};
__device__ __forceinline__ Factors factors_of(const Scalings& in, int head) {
    return {factor_of(in.dp_accumulate.heads, head), factor_of(in.ds.heads, head), factor_of(in.p_cast.heads, head),
            factor_of(in.ds_cast.heads, head)};
}

/// What is multiplied: a factor of 1 would take its multiplication, and a cast's its cast.
enum class Scaled { scores, p_cast, ds_cast, all };
template <Scaled what>
constexpr bool has_scores = what == Scaled::scores || what == Scaled::all;
template <Scaled what>
constexpr bool has_p_cast = what == Scaled::p_cast || what == Scaled::all;
template <Scaled what>
constexpr bool has_ds_cast = what == Scaled::ds_cast || what == Scaled::all;

using T = __nv_bfloat16;

/// Elements as they are cast.
__device__ __forceinline__ void cast_all(float (&x)[32]) {
#pragma unroll
    for (int e = 0; e < 32; e += 2) {
        const float2 two = unpack<T>(pack<T>(x[e], x[e + 1]));
        x[e] = two.x;
        x[e + 1] = two.y;
    }
}

/// In a recorder's place.
template <Scaled what>
struct BackwardScaler {
    static constexpr bool records = false, alters = true;
    using Arguments = Scalings;
    struct Place {};
    using Sums = Factors;

    template <class Elements, class Tile>
    static __device__ __forceinline__ void begin(Elements& self, const Tile& tile) {
        self.sums_ = factors_of(self.recording_, tile.head % self.in_.kv_heads);
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void before_gradients(Elements& self, const Tile&, const Step&, float (&dp)[32]) {
        if constexpr (has_scores<what>) scale(dp, self.sums_.dp);
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void after_gradients(Elements& self, const Tile&, const Step&, float (&p)[32],
                                                           float (&ds)[32]) {
        if constexpr (has_scores<what>) scale(ds, self.sums_.ds);
        if constexpr (has_p_cast<what>) {
            cast_all(p);
            scale(p, self.sums_.p_cast);
        }
        if constexpr (has_ds_cast<what>) {
            cast_all(ds);
            scale(ds, self.sums_.ds_cast);
        }
    }
    template <class Elements, class Tile>
    static __device__ __forceinline__ void keep(Elements&, const Tile&) {}

  private:
    static __device__ __forceinline__ void scale(float (&x)[32], float factor) {
#pragma unroll
        for (float& element : x) element *= factor;
    }
};

/// The same in the tiles of the first sequence, and what it did.
template <Scaled what>
struct RecordedScaler {
    static constexpr bool records = false, alters = true;
    using Arguments = Scalings;
    using Elsewhere = BackwardScaler<what>;
    struct Place {};
    struct Sums : Factors {
        AlteredSums of_dp, of_ds, of_p_cast, of_ds_cast;
    };

    template <class Tile>
    static __device__ __forceinline__ bool looks_at(const BackwardArguments& in, const Tile& tile) {
        return tile.head < in.kv_heads;
    }
    template <class Elements, class Tile>
    static __device__ __forceinline__ void begin(Elements& self, const Tile& tile) {
        self.sums_ = {};
        static_cast<Factors&>(self.sums_) = factors_of(self.recording_, tile.head % self.in_.kv_heads);
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void before_gradients(Elements& self, const Tile& tile, const Step& step,
                                                            float (&dp)[32]) {
        if constexpr (has_scores<what>) scale<false>(self, tile, step, dp, self.sums_.dp, self.sums_.of_dp);
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void after_gradients(Elements& self, const Tile& tile, const Step& step,
                                                           float (&p)[32], float (&ds)[32]) {
        if constexpr (has_scores<what>) scale<false>(self, tile, step, ds, self.sums_.ds, self.sums_.of_ds);
        if constexpr (has_p_cast<what>) scale<true>(self, tile, step, p, self.sums_.p_cast, self.sums_.of_p_cast);
        if constexpr (has_ds_cast<what>) scale<true>(self, tile, step, ds, self.sums_.ds_cast, self.sums_.of_ds_cast);
    }
    template <class Elements, class Tile>
    static __device__ __forceinline__ void keep(Elements& self, const Tile& tile) {
        const BackwardArguments& in = self.in_;
        const Scalings& to = self.recording_;
        const std::size_t slot = (static_cast<std::size_t>(tile.head) * in.k_tiles +
                                  static_cast<std::size_t>(tile.first_key / Elements::block_k)) *
                                     8 +
                                 self.which_ * 4 + threadIdx.x / 32 % 4;
        // Where a fault does not act now, nothing was counted of it.
        const auto store = [&](const Scalings::At& at, const AlteredSums& sums) {
            store_sums(at.sums, acts(at.heads, tile.head), sums, slot);
        };
        if constexpr (has_scores<what>) {
            store(to.dp_accumulate, self.sums_.of_dp);
            store(to.ds, self.sums_.of_ds);
        }
        if constexpr (has_p_cast<what>) store(to.p_cast, self.sums_.of_p_cast);
        if constexpr (has_ds_cast<what>) store(to.ds_cast, self.sums_.of_ds_cast);
    }

  private:
    /// cast: of elements as they are cast, and what comes of them is as its cast will be. No path of its own for an element that the
    /// mask hides or that is not finite: nvcc makes wgmma wait for those.
    template <bool cast, class Elements, class Tile, class Step>
    static __device__ __forceinline__ void scale(Elements& self, const Tile& tile, const Step& step, float (&x)[32],
                                                 float factor, AlteredSums& to) {
        const BackwardArguments& in = self.in_;
        const int lane = threadIdx.x % 32, offset = in.n_k - in.n_q;
        if constexpr (cast) cast_all(x);
#pragma unroll
        for (int e = 0; e < 32; e += 2) {
            const float scaled[2] = {x[e] * factor, x[e + 1] * factor};
            float2 held{scaled[0], scaled[1]};
            if constexpr (cast) held = unpack<T>(pack<T>(held.x, held.y));
            const int key = tile.first_key + self.first_row() + lane / 4 + e / 2 % 2 * 8;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int query = step.first_query + e / 4 * 8 + lane % 4 * 2 + i;
                const bool counts = query < in.n_q && key < in.n_k && (!in.causal || key <= query + offset) &&
                                    fabsf(x[e + i]) <= 3.402823466e38f;
                add_scaled(to, counts, x[e + i], i == 0 ? held.x : held.y, factor);
                x[e + i] = scaled[i];
            }
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
        Scalings::At* const to = at.site == AlteredSite::dp_accumulate ? &in.dp_accumulate
                                 : at.site == AlteredSite::ds          ? &in.ds
                                 : at.site == AlteredSite::bwd_p_cast  ? &in.p_cast
                                 : at.site == AlteredSite::ds_cast     ? &in.ds_cast
                                                                       : nullptr;
        if (to == nullptr || to->heads != nullptr)
            throw std::invalid_argument(
                "tensor_kernel: the scaled backward has one factor at each of dp_accumulate, ds, bwd_p_cast and ds_cast");
        *to = {at.heads, at.sums};
    }
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const auto run = [&]<int d, Scaled what>(std::integral_constant<int, d>, std::integral_constant<Scaled, what>) {
        launch_steps<T, d>(call, kernel, cuda_stream, [&](const BackwardWorkspace& at) {
            run_backward<T, d, Fused, RecordedScaler<what>>(call, at, kernel.zero_sum, in, cuda_stream);
        });
    };
    const auto of_size = [&](auto what) {
        call.head_dim == 64 ? run(std::integral_constant<int, 64>(), what)
                            : run(std::integral_constant<int, 128>(), what);
    };
    const bool scores = in.dp_accumulate.heads != nullptr || in.ds.heads != nullptr, p = in.p_cast.heads != nullptr,
               ds = in.ds_cast.heads != nullptr;
    if (!p && !ds) return of_size(std::integral_constant<Scaled, Scaled::scores>());
    if (p && !ds && !scores) return of_size(std::integral_constant<Scaled, Scaled::p_cast>());
    if (ds && !p && !scores) return of_size(std::integral_constant<Scaled, Scaled::ds_cast>());
    of_size(std::integral_constant<Scaled, Scaled::all>());
}

}  // namespace faultline::tensor_kernel
