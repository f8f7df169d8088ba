// SPDX-License-Identifier: Apache-2.0
// What the backwards by wgmma and by mma.sync launch alike: the first and the last step.
#pragma once

#include <faultline/tensor_kernel/backward_steps.cuh>
#include <faultline/tensor_kernel/backward_workspace.hpp>
#include <faultline/tensor_kernel/tensor_map.cuh>

namespace faultline::tensor_kernel {

inline unsigned blocks_of(std::int64_t work, int each) { return static_cast<unsigned>((work + each - 1) / each); }

template <class T, class O, int d, int lanes = d / 8>
void prepare(const BackwardCall& call, const BackwardWorkspace& at, const O* o, const BackwardVariant& variant,
             cudaStream_t stream) {
    const std::int64_t rows = static_cast<std::int64_t>(call.batch) * call.heads * at.n_padded;
    const float unit = variant.base == ExpBase::e ? 1.0f : 1.44269502162933349609375f;  // log2(e) in fp32
    const PrepareArguments<T, O> in{static_cast<const T*>(call.dout),
                                    o,
                                    call.lse,
                                    at.lse,
                                    at.delta,
                                    reinterpret_cast<float4*>(at.dq),
                                    call.dout_strides.row,
                                    call.dout_strides.head,
                                    call.dout_strides.batch,
                                    call.o_strides.row,
                                    call.o_strides.head,
                                    call.o_strides.batch,
                                    call.heads,
                                    call.n_q,
                                    at.n_padded,
                                    rows,
                                    unit};
    const auto run = variant.delta_order == DeltaOrder::octet_pairs
                         ? prepare_backward<T, O, d, DeltaOrder::octet_pairs, lanes>
                         : prepare_backward<T, O, d, DeltaOrder::octets, lanes>;
    run<<<blocks_of(rows * lanes, prepare_threads), prepare_threads, 0, stream>>>(in);
    check(cudaGetLastError(), "launching the backward's first step");
}

template <class T, int d>
void finish(const BackwardCall& call, const BackwardWorkspace& at, const BackwardVariant& variant,
            cudaStream_t stream) {
    const FinishArguments<T> in{at.dq,
                                static_cast<T*>(call.dq),
                                call.dq_strides.row,
                                call.dq_strides.head,
                                call.dq_strides.batch,
                                call.heads,
                                call.n_q,
                                at.q_tiles,
                                variant.ds_scale == DsScale::before ? 1.0f : static_cast<float>(call.scale),
                                call.k_descale,
                                call.heads / call.kv_heads};
    finish_backward<T, d><<<dim3(2 * at.q_tiles, call.batch * call.heads), 128, 0, stream>>>(in);
    check(cudaGetLastError(), "launching the backward's last step");
}

inline float exponent_of(const BackwardCall& call, const BackwardVariant& variant) {
    const auto scale = static_cast<float>(call.scale);
    return variant.base == ExpBase::e ? scale : static_cast<float>(static_cast<double>(scale) * 1.4426950408889634074);
}

}  // namespace faultline::tensor_kernel
