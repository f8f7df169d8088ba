// SPDX-License-Identifier: Apache-2.0
// Runs of a matrix on a card: what dissociate and sweep make them with.
#pragma once

#include <faultline/dissociation/matrix.hpp>

namespace faultline::cli {

/// The device's trainer, with the faults of its source planted and the hooks of its intervention. In a build without device
/// code check() says what a card could not run as far as that is known there (gpt::refusal: not the faults), so that a sweep can be
/// laid out where there is no card, and make() is a WorkError.
class DeviceTrainers final : public TrainerSource {
  public:
    void check(const gpt::TrainConfig& config, const std::vector<Fault>& faults,
               const Intervention& intervention) const override;
    [[nodiscard]] std::unique_ptr<gpt::Training> make(const gpt::TrainConfig& config, const gpt::TokenData& data,
                                                      const gpt::WindowOrder& windows, gpt::PlantedFaults& faults,
                                                      gpt::PlantedProjection* projection,
                                                      const gpt::Hooks& hooks) const override;
    [[nodiscard]] bool projects(const gpt::Projection& wanted, int width) const override;
};

}  // namespace faultline::cli
