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
struct DeviceCheckpoint {
    std::int64_t next_step = 0;
    StepReport report;
    DeviceArrays arrays;
};

/// WorkError.
void save_device_checkpoint(const std::string& path, const TrainConfig& config, std::int64_t next_step,
                            const StepReport& report, const DeviceArrays& arrays);
/// RequestError where it is not of a run of this configuration, of `count` weights, on the device.
[[nodiscard]] DeviceCheckpoint load_device_checkpoint(const std::string& path, const TrainConfig& config,
                                                      std::size_t count);

/// To bf16, nearest even.
[[nodiscard]] float round_to_bf16(float value);

}  // namespace faultline::gpt
