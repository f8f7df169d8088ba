// SPDX-License-Identifier: Apache-2.0
// A whole run: steps, record, checkpoints, captures; ended, interrupted, diverged, killed, resumed.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <faultline/gpt/training.hpp>
#include <faultline/record/manifest.hpp>

namespace faultline::gpt {

struct RunFiles {
    std::string output;                   ///< HDF5; empty: nothing is written, no checkpoint either
    bool resume = false;                  ///< go on from the output's checkpoint
    std::int64_t checkpoint_every = 250;  ///< steps; 0: at the end, at an interruption and at a failure alone
    std::set<std::int64_t> capture;       ///< steps whose attention operands are written beside the output
    int capture_sequences = 4;            ///< of the micro-batch: how many of them a capture has
    Manifest manifest;
    /// Keys of the manifest's configuration that a resumed run may have otherwise than its file.
    std::set<std::string, std::less<>> may_differ;
    Ranks* ranks = nullptr;             ///< of the trainer; the first alone writes, and all end together
    std::function<void()> begins = {};  ///< called when nothing is left to refuse, before the first step
};

/// FILE.h5's checkpoint: FILE.checkpoint.safetensors beside it.
[[nodiscard]] std::string checkpoint_path(const std::string& output);
/// FILE.step000100.safetensors: what `faultline attribute` reads. Of micro-batch m > 0: FILE.step000100-m.safetensors.
[[nodiscard]] std::string capture_path(const std::string& output, std::int64_t step, int micro_step);
/// Of what a run leaves beside its record, the files (or folders) that are there already: its checkpoint, and captures of `steps` of its
/// first `micro_steps` micro-batches a step.
[[nodiscard]] std::vector<std::string> there_beside(const std::string& output, const std::set<std::int64_t>& steps,
                                                    std::int64_t micro_steps);

enum class RunEnd : unsigned char {
    finished,
    interrupted,  ///< the state is saved; resume goes on
    not_finite,   ///< trainer.failure() says where; the state before the step is saved
};

struct RunOutcome {
    RunEnd end = RunEnd::finished;
    std::int64_t first_step = 0;  ///< 0, or where a resumed run took up
    double seconds = 0;
};

/// Runs the trainer from where it stands (or from the checkpoint) to its end. `progress(report)` after each step;
/// `cancelled()` is asked after each and during it (Training::cancel_when), from several threads. What a resumed run leaves in the file is what one that was never stopped leaves.
/// RequestError before the first step, WorkError when the disk refuses. With ranks, a SharedFailure of both kinds on all of
/// them; an interruption of any is one of all.
RunOutcome run(Training& trainer, const RunFiles& files, const std::function<void(const StepReport&)>& progress,
               const std::function<bool()>& cancelled);

}  // namespace faultline::gpt
