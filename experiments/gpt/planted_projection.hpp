// SPDX-License-Identifier: Apache-2.0
// A projection of the updates of W_Q and W_K as data, for a trainer that makes it itself because its updates are not in the
// host's memory.
#pragma once

#include <span>
#include <vector>

#include <faultline/gpt/removed_energy.hpp>

namespace faultline::gpt {

/// Off the current leading k singular directions of the weight (probes/leading.hpp), from every update before it is added.
struct Projection {
    int k = 3, extra = 3;  ///< directions; and how many more the iteration follows
    Sides sides = Sides::both;
    bool shrinks = false;  ///< the whole update is made smaller by the energy of that part instead
};

class PlantedProjection {
  public:
    virtual ~PlantedProjection() = default;
    [[nodiscard]] virtual Projection projection() const = 0;
    /// The blocks that the iteration goes on from, [layer, W_Q then W_K, k + extra, columns]: of a checkpoint, or those of a cold
    /// start. Asked at the start of a run and after StepHook::load.
    [[nodiscard]] virtual std::vector<double> blocks(int columns) const = 0;
    /// The same as they are now, before StepHook::save.
    virtual void keep_blocks(std::span<const double> blocks, int columns) = 0;
    /// Told after each step, before StepHook::after_step, what was done in it: [layer, W_Q then W_K].
    virtual void projected(std::span<const RemovedEnergy> energies) = 0;
};

}  // namespace faultline::gpt
