// SPDX-License-Identifier: Apache-2.0
// The forward with p and the row sums multiplied by a number of their head: faults that one multiplication makes. The first sequence
// is a launch of its own, which adds up what it does; that of the others begins beside it.
#include <faultline/tensor_kernel/forward_altered_launch.cuh>
#include <faultline/tensor_kernel/forward_scaling.cuh>
#include <faultline/tensor_kernel/request.cuh>
#include <faultline/tensor_kernel/scaling.hpp>

namespace faultline::tensor_kernel {
namespace {

using T = __nv_bfloat16;

template <int d>
void run(const ForwardCall& first, const ForwardCall& others, const ForwardKernel& kernel, const ForwardScalings& in,
         cudaStream_t stream) {
    using Tiles = ForwardTiles<T, d>;
    launch<T, Tiles, Compiled<>, ForwardScaler<T, true>>(first, kernel, in, stream);
    if (others.batch > 0) launch<T, Tiles, Compiled<>, ForwardScaler<T, false>>(others, kernel, in, stream);
}

/// All sequences but the first.
ForwardCall without_the_first(const ForwardCall& call) {
    const auto next = [](const void* from, const Strides& strides) {
        return static_cast<const T*>(from) + strides.batch;
    };
    ForwardCall rest = call;
    --rest.batch;
    rest.q = next(call.q, call.q_strides);
    rest.k = next(call.k, call.k_strides);
    rest.v = next(call.v, call.v_strides);
    rest.o = static_cast<T*>(call.o) + call.o_strides.batch;
    if (call.o_unrounded != nullptr) rest.o_unrounded += call.o_strides.batch;
    rest.lse += std::ptrdiff_t{1} * call.heads * call.n_q;
    if (call.largest != nullptr) rest.largest += std::ptrdiff_t{1} * call.heads * row_groups(call.n_q);
    return rest;
}

}  // namespace

void launch_scaled_forward(const ForwardCall& call, const ForwardKernel& kernel, const Alterations& alterations,
                           void* stream) {
    expect_altered(call, kernel, false);
    expect_device(kernel.unit);
    ForwardScalings in{};
    for (int f = 0; f < alterations.count; ++f) {
        const AlteredAt& at = alterations.at[f];
        const bool at_p = at.site == AlteredSite::p_cast;
        const HeadAlteration*& to = at_p ? in.p_cast : in.row_sum;
        if ((!at_p && at.site != AlteredSite::row_sum) || to != nullptr)
            throw std::invalid_argument(
                "tensor_kernel: the scaled forward has one factor at p_cast and one at row_sum");
        to = at.heads;
        (at_p ? in.p_sums : in.row_sums) = at.sums;
    }
    ForwardCall first = call;
    first.batch = 1;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    call.head_dim == 64 ? run<64>(first, without_the_first(call), kernel, in, cuda_stream)
                        : run<128>(first, without_the_first(call), kernel, in, cuda_stream);
}

}  // namespace faultline::tensor_kernel
