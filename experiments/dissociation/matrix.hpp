// SPDX-License-Identifier: Apache-2.0
// The matrix: sources x interventions x seeds, each a training run, several at once; runs that are done are not done again.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <faultline/dissociation/intervention.hpp>
#include <faultline/dissociation/outcome.hpp>
#include <faultline/gpt/data.hpp>
#include <faultline/gpt/planted_faults.hpp>
#include <faultline/gpt/planted_projection.hpp>
#include <faultline/gpt/trainer.hpp>
#include <faultline/record/manifest.hpp>

namespace faultline {

/// What makes the trainers of a matrix, where that is not the CPU.
class TrainerSource {
  public:
    virtual ~TrainerSource() = default;
    /// RequestError, one sentence, where it has no such run.
    virtual void check(const gpt::TrainConfig& config, const std::vector<Fault>& faults,
                       const Intervention& intervention) const = 0;
    /// `faults`, `projection` (null: none) and what the hooks point to outlive it. Called from several threads.
    [[nodiscard]] virtual std::unique_ptr<gpt::Training> make(
        const gpt::TrainConfig& config, const gpt::TokenData& data, const gpt::WindowOrder& windows,
        gpt::PlantedFaults& faults, gpt::PlantedProjection* projection, const gpt::Hooks& hooks) const = 0;
    /// Whether its trainers make a projection by themselves, for a model of this width; else an update hook does.
    [[nodiscard]] virtual bool projects(const gpt::Projection& wanted, int width) const = 0;
};

struct MatrixConfig {
    gpt::TrainConfig train;                  ///< of every run but for seed, QK norm and attention
    std::vector<std::string> sources;        ///< faults and plans (source.hpp)
    std::string folder;                      ///< from which the sources' plans are named; empty: the current one
    std::vector<std::string> interventions;  ///< intervention.hpp
    std::vector<std::string> controls;       ///< interventions that are also run without a fault; "none" is always
    std::vector<std::uint64_t> seeds;
    JudgingRule rule;
    const TrainerSource* trainers = nullptr;  ///< null: the CPU
};

/// The interventions that change a healthy run by themselves, of those asked for: a run under them is judged by theirs.
[[nodiscard]] std::vector<std::string> default_controls(const std::vector<std::string>& interventions);

/// One run to be made.
struct RunPlan {
    std::string source, intervention;
    std::uint64_t seed = 0;
};

/// All runs: by seed, the controls first. RequestError where a source or an intervention cannot be read, or the model
/// cannot have both.
[[nodiscard]] std::vector<RunPlan> runs_of(const MatrixConfig& config);

/// Steps between the checkpoints of a run of a matrix or a sweep, where nobody says otherwise.
inline constexpr std::int64_t default_checkpoint_every = 100;

struct MatrixFiles {
    std::string folder;    ///< where the runs' records and checkpoints stand; empty: nothing is written
    bool replace = false;  ///< records of another configuration are written anew; else they are a RequestError
    std::string command_line;
    std::int64_t checkpoint_every =
        default_checkpoint_every;  ///< steps, 1 or more; the bits of a run do not depend on it
};

struct RunMatrix {
    MatrixConfig config;
    std::vector<RunResult> runs;  ///< in the order of runs_of; not all finished where it was interrupted
    [[nodiscard]] bool complete() const;
};

/// Makes the runs, `threads` at a time (0: one for each hardware thread), each on one thread. A run whose record is whole
/// and of the same configuration is read; one that was interrupted goes on from its checkpoint. `progress(steps made, of
/// those to be made, what)` is called from the threads, one at a time; after `cancelled()` the runs at work save their state and stop.
/// WorkError when the disk refuses; runs that are done then are kept.
[[nodiscard]] RunMatrix run_matrix(const MatrixConfig& config, const gpt::TokenData& data, const MatrixFiles& files,
                                   int threads,
                                   const std::function<void(std::int64_t, std::int64_t, const std::string&)>& progress,
                                   const std::function<bool()>& cancelled);

}  // namespace faultline
