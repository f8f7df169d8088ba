// SPDX-License-Identifier: Apache-2.0
// Faults as data, for a trainer that plants them itself because its values are not in the host's memory.
#pragma once

#include <span>
#include <vector>

#include <faultline/injectors/fault.hpp>
#include <faultline/injectors/realised.hpp>

namespace faultline::gpt {

class AttentionHook;

class PlantedFaults {
  public:
    virtual ~PlantedFaults() = default;
    [[nodiscard]] virtual const std::vector<Fault>& faults() const = 0;
    /// Whether they have ended; asked before each step.
    [[nodiscard]] virtual bool stopped() const = 0;
    /// The faults at sites of the attention kernel as instruments, for a trainer that has that kernel emulated; null: there are
    /// none. What these did is theirs to count, and not in did().
    [[nodiscard]] virtual AttentionHook* in_emulated_attention() { return nullptr; }
    /// Told after each step, before StepHook::after_step, what they did in it: [layer, head] row-major; what stands at a site
    /// of the model under head 0 of its layer, what belongs to no layer under layer 0.
    virtual void did(std::span<const Realised> by_head) = 0;
};

}  // namespace faultline::gpt
