// SPDX-License-Identifier: Apache-2.0
// The forward with p, row maxima, row sums and the output multiplied by a number of their head: faults that one multiplication
// makes. The first sequence
// is a launch of its own, which adds up what it does; that of the others begins beside it.
#include <faultline/tensor_kernel/forward_altered_launch.cuh>
#include <faultline/tensor_kernel/forward_scaling.cuh>
#include <faultline/tensor_kernel/request.cuh>
#include <faultline/tensor_kernel/scaling.hpp>

namespace faultline::tensor_kernel {
namespace {

using T = __nv_bfloat16;

template <int d, bool whole_state>
void run(const ForwardCall& first, const ForwardCall& others, const ForwardKernel& kernel, const ForwardScalings& in,
         cudaStream_t stream) {
    using Tiles = ForwardTiles<T, d>;
    launch<T, Tiles, Compiled<>, ForwardScaler<T, true, whole_state>>(first, kernel, in, stream);
    if (others.batch > 0)
        launch<T, Tiles, Compiled<>, ForwardScaler<T, false, whole_state>>(others, kernel, in, stream);
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
        ForwardScalings::At* const to = at.site == AlteredSite::p_cast          ? &in.p_cast
                                        : at.site == AlteredSite::row_sum       ? &in.row_sum
                                        : at.site == AlteredSite::row_max       ? &in.row_max
                                        : at.site == AlteredSite::pv_accumulate ? &in.pv_accumulate
                                                                                : nullptr;
        if (to == nullptr || to->heads != nullptr)
            throw std::invalid_argument(
                "tensor_kernel: the scaled forward has one factor at each of p_cast, row_sum, row_max and pv_accumulate");
        *to = {at.heads, at.sums};
    }
    ForwardCall first = call;
    first.batch = 1;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const ForwardCall others = without_the_first(call);
    const bool small = call.head_dim == 64;
    if (in.row_max.heads != nullptr || in.pv_accumulate.heads != nullptr)
        small ? run<64, true>(first, others, kernel, in, cuda_stream)
              : run<128, true>(first, others, kernel, in, cuda_stream);
    else
        small ? run<64, false>(first, others, kernel, in, cuda_stream)
              : run<128, false>(first, others, kernel, in, cuda_stream);
}

}  // namespace faultline::tensor_kernel
