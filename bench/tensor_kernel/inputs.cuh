// SPDX-License-Identifier: Apache-2.0
// Calls of the tensor-core kernels on standard normal inputs, for their benchmarks.
#pragma once

#include <cmath>
#include <cstddef>
#include <optional>
#include <type_traits>

#include <faultline/random/random_stream.hpp>
#include <faultline/tensor_kernel/backward.hpp>
#include <faultline/tensor_kernel/forward.hpp>

#include "timing.cuh"

namespace faultline::tensor_kernel {

/// Standard normal numbers, rounded.
template <class T>
__global__ void fill(T* x, std::size_t count, RandomStream stream) {
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        x[i] = static_cast<T>(static_cast<float>(stream.normal(i)));
}

/// q, k, v of element type T, what a forward returns (o: 16 bits an element, whatever T) and how to call it.
template <class T>
class ForwardInputs {
  public:
    explicit ForwardInputs(const Shape& shape)
        : q_rows(std::size_t{1} * shape.batch * shape.heads * shape.n),
          q_count(q_rows * shape.d),
          k_count(q_count / shape.heads * shape.kv_heads),
          q_(q_count),
          k_(k_count),
          v_(k_count),
          o_(q_count),
          lse_(q_rows) {
        draw(q_, q_count, 0);
        draw(k_, k_count, 1);
        draw(v_, k_count, 2);
        call = ForwardCall{.batch = shape.batch,
                           .heads = shape.heads,
                           .kv_heads = shape.kv_heads,
                           .n_q = shape.n,
                           .n_k = shape.n,
                           .head_dim = shape.d,
                           .causal = shape.causal,
                           .scale = 1 / std::sqrt(static_cast<double>(shape.d)),
                           .q = q_.data(),
                           .k = k_.data(),
                           .v = v_.data(),
                           .o = o_.data(),
                           .lse = lse_.data()};
        call.q_strides = call.o_strides = contiguous(shape.heads, shape.n, shape.d);
        call.k_strides = call.v_strides = contiguous(shape.kv_heads, shape.n, shape.d);
    }

    const std::size_t q_rows, q_count, k_count;
    ForwardCall call;

    template <class E>
    static void draw(const DeviceMemory<E>& x, std::size_t count, std::uint64_t child) {
        fill<<<2048, 256>>>(x.data(), count, RandomStream(1, 2).child(child));
    }

  private:
    const DeviceMemory<T> q_, k_, v_;
    const DeviceMemory<__nv_bfloat16> o_;
    const DeviceMemory<float> lse_;
};

/// And of a backward. o, lse and o before its cast are those of whoever runs `forward` before.
template <class T>
class BackwardInputs {
  public:
    explicit BackwardInputs(const Shape& shape)
        : forward(shape),
          dout_(forward.q_count),
          dq_(forward.q_count),
          dk_(forward.k_count),
          dv_(forward.k_count),
          o_unrounded_(forward.q_count) {
        ForwardInputs<T>::draw(dout_, forward.q_count, 3);
        ForwardCall& f = forward.call;
        f.o_unrounded = o_unrounded_.data();
        call = BackwardCall{.batch = f.batch,
                            .heads = f.heads,
                            .kv_heads = f.kv_heads,
                            .n_q = f.n_q,
                            .n_k = f.n_k,
                            .head_dim = f.head_dim,
                            .causal = f.causal,
                            .scale = f.scale,
                            .q = f.q,
                            .k = f.k,
                            .v = f.v,
                            .o = f.o,
                            .o_unrounded = f.o_unrounded,
                            .dout = dout_.data(),
                            .lse = f.lse,
                            .dq = dq_.data(),
                            .dk = dk_.data(),
                            .dv = dv_.data()};
        call.q_strides = call.o_strides = call.dout_strides = call.dq_strides = f.q_strides;
        call.k_strides = call.v_strides = call.dk_strides = call.dv_strides = f.k_strides;
        workspace_.emplace(backward_workspace(call, std::is_same_v<T, Other> ? Element::bf16 : Element::e4m3));
        call.workspace = workspace_->data();
    }

    ForwardInputs<T> forward;
    BackwardCall call;

  private:
    using Other = std::conditional_t<std::is_same_v<T, __nv_fp8_e4m3>, __nv_bfloat16, T>;
    const DeviceMemory<Other> dout_, dq_, dk_, dv_;
    const DeviceMemory<float> o_unrounded_;
    std::optional<DeviceMemory<unsigned char>> workspace_;
};

}  // namespace faultline::tensor_kernel
