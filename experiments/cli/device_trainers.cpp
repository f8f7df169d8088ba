// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/device_trainers.hpp>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/device_trainer.hpp>

namespace faultline::cli {

void DeviceTrainers::check(const gpt::TrainConfig& config, const std::vector<Fault>& faults,
                           const Intervention& intervention) const {
    if (intervention.kind == Intervention::Kind::guard && intervention.action == GuardAction::fp32_ffn)
        throw RequestError("device cuda: the feed-forward is not switched to fp32 in a run: expected another action");
    if (gpt::device_trainer_is_built()) return gpt::check_for_device(config, faults);
    if (const std::string why = gpt::refusal(config); !why.empty()) throw RequestError(why);
}

std::unique_ptr<gpt::Training> DeviceTrainers::make(const gpt::TrainConfig& config, const gpt::TokenData& data,
                                                    const gpt::WindowOrder& windows, gpt::PlantedFaults& faults,
                                                    gpt::PlantedProjection* projection, const gpt::Hooks& hooks) const {
    gpt::DeviceOptions options;
    options.faults = &faults;
    options.projection = projection;
    return std::make_unique<gpt::DeviceTrainer>(config, data, windows, options, hooks);
}

bool DeviceTrainers::projects(const gpt::Projection& wanted, int width) const {
    return gpt::device_projects(wanted, width);
}

}  // namespace faultline::cli
