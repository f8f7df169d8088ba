// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <stdexcept>

#include <faultline/tensor_kernel/backward_common.cuh>
#include <faultline/tensor_kernel/backward_mma.cuh>

namespace faultline::tensor_kernel {
namespace {

/// A device may have less shared memory than a block needs: WorkError.
inline void expect_shared_memory(int bytes) {
    int device = 0, most = 0;
    check(cudaGetDevice(&device), "choosing a device");
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "asking the device");
    if (most < bytes)
        throw WorkError("device cuda: a block may have " + std::to_string(most >> 10) +
                        " KiB of shared memory: the tensor-core backward by mma needs " + std::to_string(bytes >> 10));
}

template <class T, int d, class Variant>
void run_mma(const BackwardCall& call, const BackwardWorkspace& at, cudaStream_t stream) {
    using Tiles = MmaBackwardTiles<T, d>;
    MmaBackwardArguments<T> in{};
    in.q = static_cast<const T*>(call.q);
    in.k = static_cast<const T*>(call.k);
    in.v = static_cast<const T*>(call.v);
    in.dout = static_cast<const T*>(call.dout);
    in.dk = static_cast<T*>(call.dk);
    in.dv = static_cast<T*>(call.dv);
    in.q_strides = call.q_strides;
    in.k_strides = call.k_strides;
    in.v_strides = call.v_strides;
    in.dout_strides = call.dout_strides;
    in.dk_strides = call.dk_strides;
    in.dv_strides = call.dv_strides;
    in.lse = at.lse;
    in.delta = at.delta;
    in.dq = at.dq;
    in.zero_sums = call.zero_sums;
    in.turn = call.deterministic ? at.turn : nullptr;
    in.kv_heads = call.kv_heads;
    in.group = call.heads / call.kv_heads;
    in.n_q = call.n_q;
    in.n_k = call.n_k;
    in.n_padded = at.n_padded;
    in.k_tiles = (call.n_k + Tiles::block_k - 1) / Tiles::block_k;
    in.all_heads = call.batch * call.kv_heads;
    const double head_bytes = 8.0 * call.n_q * d * in.group;  // as backward_launch.cuh
    in.heads_at_once = std::clamp(static_cast<int>(21e6 / head_bytes), 1, in.all_heads);
    in.causal = call.causal;
    in.scale = static_cast<float>(call.scale);
    in.exponent = exponent_of(call, Variant::value);
    const auto run = backward_mma<T, d, Variant>;
    constexpr int bytes = sizeof(typename Tiles::Memory);
    expect_shared_memory(bytes);
    check(cudaFuncSetAttribute(run, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "setting the shared memory of the tensor-core backward");
    run<<<in.k_tiles * in.all_heads, Tiles::threads, bytes, stream>>>(in);
    check(cudaGetLastError(), "launching the tensor-core backward");
}

template <class T, int d>
void launch(const BackwardCall& call, const BackwardKernel& kernel, cudaStream_t stream) {
    const BackwardWorkspace at(call);
    if (call.deterministic)
        check(cudaMemsetAsync(at.turn, 0, at.turn_bytes(), stream), "clearing the turns of the tensor-core backward");
    constexpr int lanes = 8;  // preset fa2's delta_threads
    if (kernel.delta_from == DeltaFrom::o_unrounded)
        prepare<T, float, d, lanes>(call, at, call.o_unrounded, kernel.variant, stream);
    else
        prepare<T, T, d, lanes>(call, at, static_cast<const T*>(call.o), kernel.variant, stream);
    const auto run_if = [&]<class Variant>(Variant) {
        if (kernel.variant != Variant::value) return false;
        run_mma<T, d, Variant>(call, at, stream);
        return true;
    };
    bool known = !needs_dp(kernel.delta_from) && (run_if(Fused{}) || run_if(Unfused{}));
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
        known = known || (!needs_dp(kernel.delta_from) && run_if(UnfusedBf16Scores{}));
    if (!known) throw std::invalid_argument("tensor_kernel: not one of the kernels that supported_backward() names");
    finish<T, d>(call, at, kernel.variant, stream);
}

}  // namespace

void launch_mma_backward_of(const BackwardCall& call, const BackwardKernel& kernel, cudaStream_t stream) {
    const bool half = kernel.element == Element::fp16;
    if (call.head_dim == 64)
        return half ? launch<__half, 64>(call, kernel, stream) : launch<__nv_bfloat16, 64>(call, kernel, stream);
    half ? launch<__half, 128>(call, kernel, stream) : launch<__nv_bfloat16, 128>(call, kernel, stream);
}

}  // namespace faultline::tensor_kernel
