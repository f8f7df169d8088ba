// SPDX-License-Identifier: Apache-2.0
// One run of a matrix by itself, for a process of its own: on the CPU, or by config.trainers, with the hooks of its source and
// intervention.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <faultline/dissociation/matrix.hpp>

namespace faultline {

struct SingleRun {
    RunPlan plan;
    std::string record;  ///< HDF5 file; its checkpoint stands beside it
    std::string command_line;
    std::int64_t checkpoint_every = default_checkpoint_every;  ///< steps
    int threads = 1;
    std::function<void(std::int64_t)> stepped;  ///< told of how many steps are done: first where it takes up
    std::function<bool()> cancelled;            ///< asked after every step; the state is saved then
};

struct SingleOutcome {
    bool finished = false;         ///< to the last step, or to a value that is no number
    std::string not_finite_where;  ///< "step 41, loss"; empty: none was met
    std::int64_t first_step = 0;   ///< where it was taken up
    std::int64_t steps = 0;        ///< done
};

/// What the run is made of, as text: all settings, source, intervention, the hash of the data, and the device where
/// config.trainers is one. RequestError, one sentence, where there is no such run.
[[nodiscard]] std::string identity_of(const MatrixConfig& config, const RunPlan& plan, const gpt::TokenData& data);

/// Makes the run, or what is missing of it: from its checkpoint where there is one, nothing where the record is whole.
/// RequestError where the record is of another configuration, WorkError where disk or device refuse.
[[nodiscard]] SingleOutcome make_single_run(const MatrixConfig& config, const gpt::TokenData& data,
                                            const SingleRun& run);

/// The result of a run from its record alone; `finished` where `outcome` says so.
[[nodiscard]] RunResult result_of(const RunPlan& plan, const std::string& record, const SingleOutcome& outcome);

}  // namespace faultline
