// SPDX-License-Identifier: Apache-2.0
// dq, and dk and dv, of plans whose products are those of bf16 by a matrix unit, in one kernel each: a tile of scores stays in
// registers from its products to the cast score gradient. Bits are those of kernels/emulated, which has what this leaves out.
#pragma once

#include <vector>

#include <cuda_runtime.h>

#include <faultline/emulated/jobs.hpp>

namespace faultline::device {

/// Whether this part of a backward of such heads is for these kernels: compute capability 9.0, head size 64 or 128, no bias, no
/// dropout, no softcap, no projection; every cast to nearest, P and ds in numbers of bf16.
[[nodiscard]] bool has_gradients(const emulated::FlatPlan& plan, const emulated::HeadProblem& head,
                                 emulated::BackwardPart part);

/// Starts it for all heads of the job. open: [2, head], zeros at the call's first part. Returns this part's [head]: not 0 for
/// heads that have something no kernel here is for (operands that are no finite numbers of bf16, sums that are not finite),
/// whose results are not to be used.
const int* start_gradients(const emulated::BackwardJob& job, const emulated::FlatPlan& plan,
                           const std::vector<emulated::HeadProblem>& problems, int* open, cudaStream_t stream);

}  // namespace faultline::device
