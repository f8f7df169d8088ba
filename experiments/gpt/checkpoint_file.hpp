// SPDX-License-Identifier: Apache-2.0
// What the checkpoints of both back ends have in common: a checksum, and the settings of the run that they are of.
#pragma once

#include <string>

#include <faultline/gpt/training.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline::gpt {

/// Puts the settings that the state depends on (fingerprint()) into the metadata.
void add_settings(TensorSet& state, const TrainConfig& config);
/// RequestError, with the setting as a command has it, where the state is of a run with others.
void expect_settings(const TensorSet& state, const TrainConfig& config);

/// Writes the state with a checksum over tensors and metadata ("checksum", XXH3-128). WorkError.
void write_checkpoint(const std::string& path, TensorSet state);
/// RequestError where it cannot be read or is not what was written. Checkpoints from before there was a checksum have none, and are
/// taken as they are.
[[nodiscard]] TensorSet read_checkpoint(const std::string& path);
/// RequestError where the checksum is not that of the contents, or the metadata hold what no checkpoint has.
void expect_checksum(const TensorSet& state);

}  // namespace faultline::gpt
