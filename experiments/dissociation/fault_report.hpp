// SPDX-License-Identifier: Apache-2.0
// What a run's faults did, as a hook of its steps.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include <faultline/dissociation/fault_hooks.hpp>
#include <faultline/gpt/hooks.hpp>

namespace faultline {

/// What the faults did in a step goes into its report (FaultHooks::report) and, for a run that goes on, into the checkpoint.
/// `faults` outlives it.
class FaultReport final : public gpt::StepHook {
  public:
    explicit FaultReport(FaultHooks& faults) : faults_(faults) {}
    [[nodiscard]] gpt::StepHookUse uses() const override { return {false, false, false}; }
    void before_step(std::int64_t, const gpt::StepReport*, gpt::StepControl&) override {}
    void after_step(gpt::StepReport& report) override { faults_.report(report); }
    [[nodiscard]] std::string part() const override { return faults_.part(); }
    void join(std::span<const std::string> parts) override { faults_.join(parts); }
    [[nodiscard]] std::string save() const override { return faults_.save(); }
    void load(std::string_view state) override { faults_.load(state); }

  private:
    FaultHooks& faults_;
};

}  // namespace faultline
