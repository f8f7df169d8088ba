// SPDX-License-Identifier: Apache-2.0
// The runs of a sweep as local processes, several at a time, each with a core or a share of a card.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <faultline/sweep/cell.hpp>

namespace faultline::sweep {

struct Local {
    std::vector<std::string> program;  ///< to which the file of a run's settings is added
    int jobs = 1;                      ///< processes at a time
    /// As CUDA_VISIBLE_DEVICES has them: each process sees one, the one with the fewest at work. Empty: they see what we do.
    std::vector<std::string> devices;
    /// The processes on a card run under NVIDIA's multi-process service, which is begun for it. Asks for devices.
    bool mps = false;
};

/// How far the sweep is, in steps of the runs that were not done when it began.
struct Progress {
    std::int64_t steps = 0, of = 0;
    std::size_t at_work = 0, failed = 0, left = 0;  ///< runs
};

struct Launched {
    std::size_t made = 0, failed = 0;
    std::size_t elsewhere = 0;  ///< at work in a process of somebody else
    bool interrupted = false;
};

/// Makes every run that is not done and at which nobody is at work. A run that fails leaves its reason and stops no other.
/// After `cancelled()` the processes at work are asked to end; they save their state. WorkError when the disk refuses, or where there
/// is no multi-process service.
[[nodiscard]] Launched launch(const std::string& folder, const std::vector<Cell>& cells, const Local& local,
                              const std::function<void(const Progress&)>& progress,
                              const std::function<bool()>& cancelled);

}  // namespace faultline::sweep
