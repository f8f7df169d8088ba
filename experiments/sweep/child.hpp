// SPDX-License-Identifier: Apache-2.0
// Processes that a sweep starts.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace faultline::sweep {

/// A program at work, its standard output and error appended to a file. In a process group of its own, so that a terminal's
/// Ctrl-C reaches it once, through stop(); and asked to end (SIGTERM) when the process that started it is gone.
class Child {
  public:
    /// `environment` is added to ours. WorkError where there can be no process.
    static Child start(const std::vector<std::string>& words, const std::string& log,
                       const std::vector<std::pair<std::string, std::string>>& environment);
    /// The exit status, or -signal, once it has ended.
    [[nodiscard]] std::optional<int> ended();
    /// SIGTERM.
    void stop() const;

  private:
    explicit Child(int pid) : pid_(pid) {}
    int pid_ = -1;
};

struct Said {
    int status = 0;  ///< exit status, -signal, or 127 where there is no such program
    std::string out, err;
};
/// Runs a program to its end.
[[nodiscard]] Said run_to_end(const std::vector<std::string>& words);

}  // namespace faultline::sweep
