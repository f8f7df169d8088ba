// SPDX-License-Identifier: Apache-2.0
// One run of the matrix: the trainer with the hooks of its source and intervention, its record, and what it can take over
// from the run without intervention. Private to this folder.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <faultline/dissociation/channel.hpp>
#include <faultline/dissociation/collect.hpp>
#include <faultline/dissociation/matrix.hpp>
#include <faultline/dissociation/source.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline {

/// Everything that one run is made of. Not copied: the hooks refer to it.
class MatrixRun {
  public:
    MatrixRun(const MatrixConfig& matrix, const RunPlan& plan, const gpt::TokenData& data);
    MatrixRun(const MatrixRun&) = delete;
    MatrixRun& operator=(const MatrixRun&) = delete;

    /// Of the trainer, before it is first asked for; one where nothing is said. No bit depends on it.
    void use_threads(int threads) { config_.threads = threads; }
    [[nodiscard]] gpt::Training& trainer();
    /// Of config.trainers, where there is nothing to hook; the caller's.
    [[nodiscard]] std::unique_ptr<gpt::Training> trainer_without_hooks();
    [[nodiscard]] const gpt::TrainConfig& config() const { return config_; }
    /// Whether its source or its intervention needs hooks in the trainer.
    [[nodiscard]] bool hooked() const { return !source_.faults.empty() || channel_acts(); }
    [[nodiscard]] Channel& channel() { return *channel_; }
    /// What a record must have been made with to be this run's: all settings, the source, the intervention and the data.
    [[nodiscard]] std::string identity() const;

  private:
    [[nodiscard]] bool channel_acts() const {
        return intervention_.kind != Intervention::Kind::none && intervention_.kind != Intervention::Kind::qk_norm;
    }
    gpt::TrainConfig config_;
    Intervention intervention_;
    Source source_;
    gpt::WindowOrder windows_;
    const gpt::TokenData& data_;
    RoundingPlan fast_;
    std::unique_ptr<FaultHooks> faults_;
    std::unique_ptr<Channel> channel_;
    const TrainerSource* trainers_;
    std::unique_ptr<gpt::Training> trainer_;
};

/// Models of more parameters leave their guards nothing: states are kept in memory until the guard's turn comes.
inline constexpr std::int64_t parameters_for_guards = 4'000'000;

/// A guard that has not been triggered changes nothing: up to and with the step of its trigger, or to the end, its run is
/// the run without intervention. That run leaves here what the guard's then need not do again.
struct Dormant {
    explicit Dormant(Channel guard) : watching(std::move(guard)) {}
    Channel watching;                      ///< of the guard, shown every step
    TensorSet state;                       ///< of the trainer after the last of `steps`
    std::int64_t steps = 0;                ///< that both have in common
    bool ready = false;                    ///< all of it stands here
    std::vector<gpt::StepReport> reports;  ///< of these steps; where there are records
    std::vector<StepSample> samples;       ///< of these steps
};

/// Where the record of a run stands; empty where none is wanted.
[[nodiscard]] std::string record_path(const MatrixFiles& files, const RunPlan& plan);

/// What stands in the folder of a run.
enum class Found { nothing, part, whole };
/// RequestError where a record is of another configuration and files.replace is not given. `samples` are filled from a
/// record that is whole.
[[nodiscard]] Found find_record(const std::string& path, const std::string& identity, const MatrixFiles& files,
                                std::int64_t steps, std::vector<StepSample>& samples);

/// How a run is made, beside what it is.
struct Making {
    std::string path;              ///< of its record; empty: none
    Found found = Found::nothing;  ///< there
    std::string command_line;
    std::int64_t checkpoint_every = default_checkpoint_every;
    Dormant* taken_over = nullptr;    ///< steps that need not be made; used up. May be null
    std::vector<Dormant*> guards;     ///< for which this run, without intervention, leaves what they have in common
    std::function<bool()> cancelled;  ///< asked between steps and during one, which is given up then
    std::function<void(std::int64_t)> skipped;  ///< told once how many steps need not be made
    std::function<void()> stepped;              ///< told of every step made
};

/// Steps to the end, an interruption, or a value that is no number; gpt::run for several at a time.
void train(MatrixRun& run, const Making& how, RunResult& result, std::vector<StepSample>& samples);

}  // namespace faultline
