// SPDX-License-Identifier: Apache-2.0
// attention_truth on a CUDA device: the same values and bounds as lib/truth's, bit for bit. In a build without the
// device back end the function is there and says so.
#pragma once

#include <cstddef>

#include <faultline/truth/truth.hpp>

namespace faultline::device {

/// faultline::attention_truth with the fast path on the device; what that leaves undecided, and problems that it is not
/// for (inputs outside 2^[-180, 180], no key or query), the processor computes as ever: GroupTruth counts them. May be
/// called from several threads: the device takes one head group at a time, what the host does before and after runs
/// side by side. RequestError as attention_truth, and for keep_matrices; WorkError, one sentence: no back end in this
/// build, no device, a device that fails; NoRoom where it has not the memory for one row. `memory_limit`: bytes of device memory that
/// it may use, where that is less than what is free.
[[nodiscard]] GroupTruth attention_truth(const TruthProblem& problem, const TruthOptions& options = {},
                                         std::size_t memory_limit = static_cast<std::size_t>(-1));

/// Before work that begins with something else: NoRoom where the device has not the memory for one row of the problem, as
/// attention_truth would say. It reads which path the values take.
void expect_room_for_truth(const TruthProblem& problem);

}  // namespace faultline::device
