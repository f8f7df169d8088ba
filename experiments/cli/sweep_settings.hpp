// SPDX-License-Identifier: Apache-2.0
// The options of faultline sweep, and which of them make no sense together.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/cli/settings.hpp>
#include <faultline/cli/sweep_file.hpp>

namespace faultline::cli {

struct SweepSettings {
    std::vector<std::string> words;  // [run|status|merge|one] FILE
    std::int64_t jobs = 0;
    std::vector<std::string> devices;
    bool slurm = false, every = false, mps = false;
    std::optional<bool> submit;
    std::string partition, gres, time;
    std::vector<std::string> lines;

    void declare(Settings& settings);
};

/// RequestError, before anything of the sweep is read: an option of Slurm's without --slurm, values that Slurm or CUDA does not
/// know, one that means nothing for what is to be done: `verb` is run, status, merge or one. What the sweep's file says may be meant
/// for the other way of running it, and is looked at for its form alone.
void check_options(const SweepSettings& own, const Settings& settings, std::string_view verb);

/// RequestError where this sweep is not run in that way: cards for runs on the CPU, runs on cards in a build without.
void check_launch(const SweepSettings& own, const Settings& settings, const SweepFile& file);

}  // namespace faultline::cli
