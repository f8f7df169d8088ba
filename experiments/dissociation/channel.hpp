// SPDX-License-Identifier: Apache-2.0
// An intervention at work in a run: the update hook that projects, the guard, the actions; and the faults' step, which
// belongs to the same record.
#pragma once

#include <string>
#include <vector>

#include <faultline/dissociation/fault_hooks.hpp>
#include <faultline/dissociation/intervention.hpp>
#include <faultline/gpt/hooks.hpp>
#include <faultline/gpt/planted_projection.hpp>
#include <faultline/probes/leading.hpp>

namespace faultline {

class Channel final : public gpt::UpdateHook, public gpt::StepHook, public gpt::PlantedProjection {
  public:
    /// `seed` names the random directions of the controls. `faults` may be null; it outlives this. Kind qk_norm is a
    /// matter of the model's configuration and does nothing here.
    Channel(const Intervention& intervention, int layers, int heads, std::uint64_t seed, FaultHooks* faults);

    /// W_Q and W_K (and no other parameter), as they are before the update is added.
    void before_apply(std::int64_t step, std::span<const gpt::ParameterUpdate> updates) override;
    /// A guard watches its monitor, and scales with qk_rms; a guard and QK-clip change something.
    [[nodiscard]] gpt::StepHookUse uses() const override;
    void before_step(std::int64_t step, const gpt::StepReport* last, gpt::StepControl& control) override;
    /// Adds per layer, W_Q and W_K together, removed_energy (|D|^2 - |D'|^2), removed_fraction of |D|^2, leading_fraction
    /// (what lies along the leading directions, also where something else was removed) and missing_fraction; and
    /// intervention_active (0 or 1: the guard has acted) and what the faults did.
    void after_step(gpt::StepReport& report) override;
    // PlantedProjection: for a trainer that projects by itself, in place of before_apply().
    [[nodiscard]] gpt::Projection projection() const override;
    [[nodiscard]] std::vector<double> blocks(int columns) const override;
    void keep_blocks(std::span<const double> blocks, int columns) override;
    void projected(std::span<const RemovedEnergy> energies) override;
    [[nodiscard]] std::string save() const override;
    void load(std::string_view state) override;

    /// Latches where the guard's monitor is above the threshold at the end of this step; part of after_step(). Until then
    /// a guard changes nothing, and the run is the one without intervention.
    void watch(const gpt::StepReport& report);
    /// First step at whose end the guard's monitor was above the threshold; -1: not yet, or no guard. The action is in
    /// force from the step after.
    [[nodiscard]] std::int64_t triggered_at() const { return triggered_at_; }

  private:
    [[nodiscard]] double monitored(const gpt::StepReport& report) const;

    Intervention intervention_;
    int layers_, heads_;
    std::uint64_t seed_;
    FaultHooks* faults_;
    std::vector<LeadingDirections> followed_;  ///< [layer, W_Q then W_K]
    std::vector<RemovedEnergy> removed_;       ///< [layer], of the step
    std::int64_t triggered_at_ = -1;
    bool acted_ = false;
    std::vector<double> qk_rms_;  ///< of the step of the trigger, [layer, head]
};

}  // namespace faultline
