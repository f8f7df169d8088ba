// SPDX-License-Identifier: Apache-2.0
// Faults in a training run: the hooks that put them in the attention kernels and in the model, and what they did in each
// step, by layer and head.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <faultline/gpt/hooks.hpp>
#include <faultline/gpt/planted_faults.hpp>
#include <faultline/injectors/fault.hpp>
#include <faultline/injectors/model_injector.hpp>
#include <faultline/injectors/realised.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline {

/// Faults of one run. Values and sums depend on places, not on threads.
class FaultHooks final : public gpt::AttentionHook, public ModelHook, public gpt::PlantedFaults {
  public:
    /// The plan of a head, for the formats that values are held in; null: never asked.
    using PlanOf = std::function<const RoundingPlan*(int layer, int head)>;
    FaultHooks(std::vector<Fault> faults, int layers, int heads, PlanOf plan_of);
    ~FaultHooks() override;

    // AttentionHook
    [[nodiscard]] bool watches(std::int64_t step, int layer, Site site) const override;
    [[nodiscard]] std::unique_ptr<Instrument> instrument(const gpt::HeadAt& where) override;
    // ModelHook
    [[nodiscard]] bool watches(ModelSite site, int layer) const override;
    void at(ModelSite site, const ModelAt& where, MatrixView<float> value,
            std::span<const MatrixView<const float>> operands) override;

    [[nodiscard]] bool any_attention() const { return any_attention_; }
    [[nodiscard]] bool any_model() const { return !model_.empty(); }
    /// Correction at the source: from now on no fault acts.
    void stop() { stopped_ = true; }
    // PlantedFaults
    [[nodiscard]] const std::vector<Fault>& faults() const override { return faults_; }
    [[nodiscard]] bool stopped() const override { return stopped_; }
    [[nodiscard]] gpt::AttentionHook* in_emulated_attention() override { return any_attention_ ? this : nullptr; }
    void did(std::span<const Realised> by_head) override;

    /// What was done since the last call, [layer, head] row-major (model sites: the whole layer's, under its head 0; what
    /// belongs to no layer under layer 0), and the running coherence over steps.
    struct Step {
        std::vector<Realised> realised;
        /// |mean of the sign of the mean error| so far, over the steps in which the head got an error: a fault that begins
        /// late, or ends, is as coherent as it was while it acted. NaN until there is one.
        std::vector<double> step_coherence;
    };
    [[nodiscard]] Step take_step();
    /// Adds to the report, [layer, head]: injected_rms, injected_asked_rms (both relative to the values' rms),
    /// injected_mean (over the same), injected_sign_coherence (in the step), injected_step_coherence (over steps).
    void report(gpt::StepReport& report);

    /// What was done since the last take_step() in this rank's part of a step, and all ranks' parts put together (StepHook).
    [[nodiscard]] std::string part() const;
    void join(std::span<const std::string> parts);

    [[nodiscard]] std::string save() const;
    void load(std::string_view state);

  private:
    class HeadInstrument;
    using Place = std::tuple<int, int, int, int, std::size_t>;  // layer, head, micro step, sequence, fault

    std::vector<Fault> faults_;
    std::vector<std::unique_ptr<ModelInjector>> model_;
    int layers_, heads_;
    PlanOf plan_of_;
    bool any_attention_ = false;
    std::atomic<bool> stopped_{false};
    std::mutex mutex_;
    std::map<Place, Realised> attention_;
    std::vector<Realised> planted_;  // what a trainer did that plants the faults itself, since the last take_step()
    // For the coherence over steps, [layer, head]: steps with an error, and the sum of its mean's signs over them.
    std::vector<double> steps_, signs_;
};

}  // namespace faultline
