// SPDX-License-Identifier: Apache-2.0
// A launcher may start ranks with other settings, or on machines with other files: they would train a model that is none of theirs.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <faultline/cli/command.hpp>
#include <faultline/gpt/training.hpp>

namespace faultline::cli {

/// Keys of the settings that say where a rank finds its files, and of what does not change the run.
[[nodiscard]] std::span<const std::string_view> settings_of_a_rank();

/// (key, value) of all that the ranks of a run have to agree on: "--seed", "1". Of settings all but those that may be each
/// rank's own (names of files, threads, what is printed); then what is in the files that they name: plans whole, data by hash.
using AgreedOn = std::vector<std::pair<std::string, std::string>>;
[[nodiscard]] AgreedOn agreed_on(const Invocation& call, const gpt::TrainConfig& config);

/// All ranks come here, each with its own. RequestError, the same on all of them, that names the first key in which one differs from
/// the first rank; SharedFailure where one of them has failed before it came here.
void expect_same(Ranks* ranks, const AgreedOn& mine);

}  // namespace faultline::cli
