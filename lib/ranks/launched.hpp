// SPDX-License-Identifier: Apache-2.0
// The ranks that whoever started this process has asked for.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <faultline/ranks/ranks.hpp>

namespace faultline {

/// What a launcher says in the environment: mpirun (OMPI_COMM_WORLD_*, PMI_*) or a step of srun (SLURM_STEP_NUM_TASKS,
/// SLURM_PROCID).
struct Launch {
    std::string variable;  ///< that has the number of ranks
    int size = 1, rank = 0;
};
/// Of more than one rank; else nothing.
[[nodiscard]] std::optional<Launch> launch_of_environment();

/// Joins the ranks of start_local_ranks() or of an MPI launcher; null where this process is alone. RequestError where a
/// launcher has started several and this build has no MPI, or MPI knows of another number of them.
[[nodiscard]] std::unique_ptr<Ranks> join_launched_ranks();

}  // namespace faultline
