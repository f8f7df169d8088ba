// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/altering.cuh>
#include <faultline/tensor_kernel/forward_launch.cuh>
#include <faultline/tensor_kernel/request.cuh>

namespace faultline::tensor_kernel {
namespace {

/// In a recorder's place: what changes the elements of P after their cast.
struct ForwardAlterer {
    static constexpr bool records = false, alters = true;
    struct Arguments {
        Alterations all;
        int batches;
    };
    struct Memory {};
    struct Place {
        AlteredOfThread sums;  ///< of a query tile
    };
    static constexpr int kept_scores = 1;
    const Arguments& in;
    int warp;

    __device__ __forceinline__ ForwardAlterer(const Arguments& arguments, Memory&, int consuming_warp)
        : in(arguments), warp(consuming_warp) {}

    /// p of keys [128 key_tile, …) of rows `row` and `row` + 8, in the wgmma's accumulator layout.
    template <class Call, int count>
    __device__ __forceinline__ void probabilities(Place& to, const Call& call, const TilePlace& at, int first_row,
                                                  int row, int key_tile, float (&p)[count]) const {
        constexpr int keys = 2 * count;
        const int t = threadIdx.x % 4, key0 = key_tile * keys;
#pragma unroll
        for (float& x : p) x = rounded<__nv_bfloat16>(x);
        alter(
            in.all, AlteredSite::p_cast, at.head, at.batch,
            static_cast<std::uint64_t>(first_row) << 32 | static_cast<std::uint64_t>(key0), min(keys, call.n_k - key0),
            p,
            [&](int k, int& e, int& i, int& j) {
                // The eight elements that are 16 keys apart share their random numbers, so they come one after another.
                const int r = k / (count / 2), parity = k / 8 % 4, octet = k % 8 * 2 + parity / 2;
                e = 4 * octet + 2 * r + parity % 2;
                j = 8 * octet + 2 * t + parity % 2;
                i = row + 8 * r - first_row;
                return row + 8 * r < call.n_q && key0 + j < call.visible(row + 8 * r);
            },
            to.sums);
    }
    __device__ __forceinline__ void keep(const Place& of, const TilePlace& at, int q_tiles) const {
        const std::size_t block = (static_cast<std::size_t>(at.head) * in.batches + at.batch) * q_tiles + at.q_tile;
        keep_sums(in.all, of.sums, block * 8 + warp);
    }
};

}  // namespace

void launch_altered_forward(const ForwardCall& call, const ForwardKernel& kernel, const Alterations& alterations,
                            void* stream) {
    using T = __nv_bfloat16;
    if (kernel.unit != Unit::wgmma || kernel.element != Element::bf16 || kernel.variant != Compiled<>::value ||
        call.heads != call.kv_heads)
        throw std::invalid_argument(
            "tensor_kernel: the forward is altered by wgmma in bf16, with a fused argument, as many heads of keys as of "
            "queries");
    expect_device(kernel.unit);
    const ForwardAlterer::Arguments in{alterations, call.batch};
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    if (call.head_dim == 64)
        launch<T, ForwardTiles<T, 64>, Compiled<>, ForwardAlterer>(call, kernel, in, cuda_stream);
    else
        launch<T, ForwardTiles<T, 128>, Compiled<>, ForwardAlterer>(call, kernel, in, cuda_stream);
}

}  // namespace faultline::tensor_kernel
