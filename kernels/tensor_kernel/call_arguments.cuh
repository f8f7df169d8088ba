// SPDX-License-Identifier: Apache-2.0
// A call as its kernel takes it.
#pragma once

#include <algorithm>

#include <faultline/tensor_kernel/forward.hpp>
#include <faultline/tensor_kernel/forward_common.cuh>

namespace faultline::tensor_kernel {

/// What the kernels of both generations have in common. block_q: rows of a query tile.
template <class Arguments>
void set_call(Arguments& in, const ForwardCall& call, const ForwardKernel& kernel, int block_q) {
    in.o = static_cast<decltype(in.o)>(call.o);
    in.o_unrounded = call.o_unrounded;
    in.lse = call.lse;
    in.largest = call.largest;
    in.o_row = call.o_strides.row;
    in.o_head = call.o_strides.head;
    in.o_batch = call.o_strides.batch;
    in.heads = call.heads;
    in.kv_heads = call.kv_heads;
    in.n_q = call.n_q;
    in.n_k = call.n_k;
    in.causal = call.causal;
    in.natural = static_cast<float>(call.scale);
    in.scales.exponent = exponent_of(in.natural);
    in.scales.stable_beta = static_cast<float>(kernel.stable_beta);
    in.scales.stable_tolerance = static_cast<float>(kernel.stable_tolerance / static_cast<double>(in.natural));
    in.scales.state = kernel.state;
    in.q_tiles = (call.n_q + block_q - 1) / block_q;
    const int all_heads = call.batch * call.heads;
    in.tiles = in.q_tiles * all_heads;
    // Keys and values of the heads in work at once stay in half of an H100's second-level cache of 50 MB.
    const double head_bytes =
        (kernel.element == Element::e4m3 ? 2.0 : 4.0) * call.n_k * call.head_dim * call.kv_heads / call.heads;
    in.heads_at_once = std::clamp(static_cast<int>(25e6 / head_bytes), 1, all_heads);
}

}  // namespace faultline::tensor_kernel
