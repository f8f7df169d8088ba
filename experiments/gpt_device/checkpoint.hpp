// SPDX-License-Identifier: Apache-2.0
// A checkpoint of a run on the device: as the CPU's, but under a schema of its own, because sums there have another order and a
// run that changed sides would not be the run that it says it is. Private to this folder.
#pragma once

#include <string>
#include <vector>

#include <faultline/gpt/training.hpp>

namespace faultline::gpt {

struct DeviceArrays {
    std::vector<float> weights, first, second;
};
/// What hooks have changed since the run began, and how far the optimizer is.
struct DeviceSwitches {
    double rate_factor = 1, clip_factor = 1;
    double qk_clip = 0;  ///< tau
    std::int64_t optimizer_steps = 0;
    std::vector<std::vector<double>> qk_scales;  ///< of each layer, as switched on; empty: not
};
struct DeviceCheckpoint {
    std::int64_t next_step = 0;
    StepReport report;
    DeviceSwitches switches;
    DeviceArrays arrays;
    std::string hook;  ///< what the step's hook saved
};

/// WorkError.
void save_device_checkpoint(const std::string& path, const TrainConfig& config, std::int64_t next_step,
                            const StepReport& report, const DeviceSwitches& switches, const DeviceArrays& arrays,
                            const std::string& hook);
/// RequestError where it is not of a run of this configuration, of `count` weights and `seconds` second moments, on the device.
[[nodiscard]] DeviceCheckpoint load_device_checkpoint(const std::string& path, const TrainConfig& config,
                                                      std::size_t count, std::size_t seconds);

/// To bf16, nearest even.
[[nodiscard]] float round_to_bf16(float value);

}  // namespace faultline::gpt
