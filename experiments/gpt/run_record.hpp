// SPDX-License-Identifier: Apache-2.0
// A run as HDF5, step by step: docs/training.md has the layout.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <faultline/gpt/hooks.hpp>
#include <faultline/record/run_file.hpp>

namespace faultline::gpt {

class RunRecord {
  public:
    /// A new file; it appears under its name with the first step. RequestError or WorkError of RunFile::create.
    static RunRecord create(const std::string& path, const Manifest& manifest);
    /// RequestError where the file is not the record that was written with a checkpoint: no run, without the checkpoint's last
    /// step or with another loss there than `last` (after a restore), or with another value of a setting that both it and `now`
    /// name in their configuration and that is not one of those that `may_differ`. The file is only read.
    static void expect_record_of(const std::string& path, const StepReport& last, const Manifest& now,
                                 const std::set<std::string, std::less<>>& may_differ);
    /// Goes on behind step `last_step`. RequestError where the file has no such step; it is then as it was.
    /// `steps`: of the run, where it may be another than when it began; it is written into the configuration that the file has.
    /// `now`: who goes on with it: the file's `ranks` become its own, and its `reductions`, where they are others, stand behind
    /// those of before with the step from which they hold.
    static RunRecord resume(const std::string& path, std::int64_t last_step,
                            std::optional<std::int64_t> steps = std::nullopt, const Manifest* now = nullptr);

    /// Appends the step and flushes. The first one declares the series, those of report.extras too;
    /// a monitor without values in it has none. WorkError when the disk
    /// refuses.
    void write(const StepReport& report);
    /// Where no step was written the file that was to be made is not; one that was resumed stays as it was.
    void close();

  private:
    explicit RunRecord(RunFile file) : file_(std::move(file)) {}
    void declare(const StepReport& report);
    RunFile file_;
    std::vector<RunFile::Series> series_;
    bool declared_ = false;
};

}  // namespace faultline::gpt
