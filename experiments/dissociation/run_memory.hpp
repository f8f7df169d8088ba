// SPDX-License-Identifier: Apache-2.0
// The memory of runs on the CPU with faults and interventions, before there is one (gpt/host_memory.hpp).
#pragma once

#include <vector>

#include <faultline/dissociation/matrix.hpp>
#include <faultline/gpt/host_memory.hpp>
#include <faultline/injectors/fault.hpp>

namespace faultline {

/// What these faults make a run need.
[[nodiscard]] gpt::HostNeeds host_needs(const std::vector<Fault>& faults);

/// Of one of runs_of(config), on `threads` threads; `recorded`: it writes a record and checkpoints. config.train has passed
/// gpt::check.
[[nodiscard]] gpt::HostMemory run_memory(const MatrixConfig& config, const RunPlan& plan, int threads, bool recorded);
/// Of the largest of them; empty where there is none.
[[nodiscard]] gpt::HostMemory largest_run(const MatrixConfig& config, const std::vector<RunPlan>& plans, int threads,
                                          bool recorded);

/// Bytes of the states that are kept for guards until their turn comes, of one seed's.
[[nodiscard]] std::uint64_t kept_for_guards(const MatrixConfig& config, const std::vector<RunPlan>& plans);

}  // namespace faultline
