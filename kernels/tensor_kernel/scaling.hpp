// SPDX-License-Identifier: Apache-2.0
// Faults that one multiplication makes: variants of the forward and the backward that multiply and do nothing else, where
// altering.hpp's kernels draw, round and add up for each element.
#pragma once

#include <faultline/tensor_kernel/altering.hpp>

namespace faultline::tensor_kernel {

/// Whether a kernel that multiplies the site's numbers, of fp32, by one of their head changes them as this fault does, bit for bit,
/// with either sign: its size is that of the value, with one sign for a head, held in fp32 to nearest or not at all, and 1 + magnitude
/// is positive and of fp32 (so that x (1 + magnitude) has 48 bits, which binary64 holds: it is rounded once).
[[nodiscard]] bool is_scaling(const Alteration& change);
/// The same of numbers of bf16 that are held in it, to nearest: 1 + magnitude has 16 bits, so that fp32 holds x (1 + magnitude) and
/// the cast is its one rounding.
[[nodiscard]] bool is_scaling_of_bf16(const Alteration& change);

/// launch_altered_forward with such alterations, in bf16, at most one at each of p_cast, row_sum, row_max and
/// pv_accumulate, else std::invalid_argument. What
/// was done is added up of the first sequence alone: sums are altered_sums() of a call with that one.
void launch_scaled_forward(const ForwardCall& call, const ForwardKernel& kernel, const Alterations& alterations,
                           void* stream);
/// launch_altered_backward with such alterations, at most one at each of dp_accumulate, ds, bwd_p_cast and
/// ds_cast, else std::invalid_argument. What was
/// done is added up of the first sequence alone: sums are altered_sums() of a call with that one.
void launch_scaled_backward(const BackwardCall& call, const BackwardKernel& kernel, const Alterations& alterations,
                            void* stream);

}  // namespace faultline::tensor_kernel
