// SPDX-License-Identifier: Apache-2.0
// The backward of preset fa3-fp8: q, k and v in e4m3, everything else in bf16. They are brought to bf16, which holds every number
// of e4m3 exactly, in one pass; the kernels behind it are the backward's in bf16. Descale factors of the inputs do not touch the
// elements, which would round them: they multiply the scale, dP and the gradients.
#include <faultline/tensor_kernel/backward_launch.cuh>
#include <faultline/tensor_kernel/softmax.cuh>

#include <cuda_fp8.h>

namespace faultline::tensor_kernel {

// backward_bf16.cu
extern template void launch_backward_of<__nv_bfloat16, 64>(const BackwardCall&, const BackwardKernel&, cudaStream_t);
extern template void launch_backward_of<__nv_bfloat16, 128>(const BackwardCall&, const BackwardKernel&, cudaStream_t);

namespace {

/// A tensor [batch, heads, rows, d] of e4m3 by strides in elements, and where it goes in bf16, contiguous.
struct WidenedTensor {
    const std::uint8_t* from;
    std::uint8_t* to;
    std::int64_t row, head, batch;
    int heads, rows;
    std::int64_t sixteens;  ///< of elements, in all of it
};
struct WidenArguments {
    WidenedTensor tensors[3];
};

constexpr int widen_threads = 256;

/// 16 elements a thread; gridDim.y: the tensors.
template <int d>
__global__ void __launch_bounds__(widen_threads) widen_inputs(const __grid_constant__ WidenArguments in) {
    const WidenedTensor& t = in.tensors[blockIdx.y];
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * widen_threads + threadIdx.x;
    if (i >= t.sixteens) return;
    constexpr int each = d / 16;
    const std::int64_t row = i / each, head = row / t.rows;
    const uint4 sixteen = *reinterpret_cast<const uint4*>(t.from + head / t.heads * t.batch + head % t.heads * t.head +
                                                          (row - head * t.rows) * t.row + i % each * 16);
    const std::uint32_t words[4] = {sixteen.x, sixteen.y, sixteen.z, sixteen.w};
    std::uint32_t wide[8];
#pragma unroll
    for (int w = 0; w < 8; ++w) {
        const auto two = static_cast<__nv_fp8x2_storage_t>(words[w / 2] >> w % 2 * 16);
        const float2 floats = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
        wide[w] = pack<__nv_bfloat16>(floats.x, floats.y);
    }
    auto* const to = reinterpret_cast<uint4*>(t.to + i * 32);
    to[0] = {wide[0], wide[1], wide[2], wide[3]};
    to[1] = {wide[4], wide[5], wide[6], wide[7]};
}

/// BackwardCall's factors.
struct InputFactors {
    const float *q, *k, *v;
};

/// In a recorder's place: the factors of the block's key head. Without a branch between the products and the waits for them.
struct Descaler {
    static constexpr bool records = false, alters = true, descales = true;
    using Arguments = InputFactors;
    struct Place {};
    struct Sums {
        float exponent, dk_scale, dp;
    };

    template <class Elements, class Tile>
    static __device__ __forceinline__ void begin(Elements& self, const Tile& tile) {
        const auto factor = [&](const float* of) { return of == nullptr ? 1.0f : of[tile.head]; };
        const InputFactors& by = self.recording_;
        const float q = factor(by.q);
        self.sums_ = {exponent_of(self.in_.scale * (q * factor(by.k))), self.in_.scale * q, factor(by.v)};
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void before_gradients(Elements& self, const Tile&, const Step&, float (&dp)[32]) {
#pragma unroll
        for (float& x : dp) x *= self.sums_.dp;
    }
    template <class Elements, class Tile, class Step>
    static __device__ __forceinline__ void after_gradients(Elements&, const Tile&, const Step&, float (&)[32],
                                                           float (&)[32]) {}
    template <class Elements, class Tile>
    static __device__ __forceinline__ void keep(Elements&, const Tile&) {}
};

static_assert(Descaler::descales && Descales<Descaler>);

/// The call with q, k and v in bf16.
template <int d>
BackwardCall widened(const BackwardCall& call, cudaStream_t stream) {
    const WidenedInputs at(call);
    auto* const workspace = static_cast<std::uint8_t*>(call.workspace);
    BackwardCall wide = call;
    wide.q = workspace + at.q;
    wide.k = workspace + at.k;
    wide.v = workspace + at.v;
    wide.q_strides = contiguous(call.heads, call.n_q, d);
    wide.k_strides = wide.v_strides = contiguous(call.kv_heads, call.n_k, d);
    const auto tensor = [&](const void* from, std::size_t to, const Strides& s, int heads, int rows) {
        return WidenedTensor{
            static_cast<const std::uint8_t*>(from),          workspace + to, s.row, s.head, s.batch, heads, rows,
            std::int64_t{d / 16} * call.batch * heads * rows};
    };
    const WidenArguments in{{tensor(call.q, at.q, call.q_strides, call.heads, call.n_q),
                             tensor(call.k, at.k, call.k_strides, call.kv_heads, call.n_k),
                             tensor(call.v, at.v, call.v_strides, call.kv_heads, call.n_k)}};
    const std::int64_t most = std::max(in.tensors[0].sixteens, in.tensors[1].sixteens);
    widen_inputs<d><<<dim3(blocks_of(most, widen_threads), 3), widen_threads, 0, stream>>>(in);
    check(cudaGetLastError(), "launching the widening of e4m3");
    return wide;
}

template <int d>
void launch_of(const BackwardCall& call, BackwardKernel kernel, cudaStream_t stream) {
    kernel.element = Element::bf16;
    const BackwardCall wide = widened<d>(call, stream);
    const InputFactors factors{call.q_descale, call.k_descale, call.v_descale};
    if (factors.q == nullptr && factors.k == nullptr && factors.v == nullptr)
        return launch_backward_of<__nv_bfloat16, d>(wide, kernel, stream);
    launch_steps<__nv_bfloat16, d>(wide, kernel, stream, [&](const BackwardWorkspace& at) {
        run_backward<__nv_bfloat16, d, Fused, Descaler>(wide, at, kernel.zero_sum, factors, stream);
    });
}

}  // namespace

void launch_e4m3_backward(const BackwardCall& call, const BackwardKernel& kernel, cudaStream_t stream) {
    call.head_dim == 64 ? launch_of<64>(call, kernel, stream) : launch_of<128>(call, kernel, stream);
}

}  // namespace faultline::tensor_kernel
