// SPDX-License-Identifier: Apache-2.0
// NVIDIA's multi-process service, under which the processes on a card run beside each other in place of taking turns.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <faultline/sweep/cell_state.hpp>

namespace faultline::sweep {

/// Services of one's own, one for each card, begun here and ended with the object. Those that a launcher left which was killed outright
/// are ended first.
class MultiProcessService {
  public:
    /// devices: as CUDA_VISIBLE_DEVICES has them. WorkError where `nvidia-cuda-mps-control` is not there or does not begin.
    explicit MultiProcessService(const std::vector<std::string>& devices);
    ~MultiProcessService();
    MultiProcessService(const MultiProcessService&) = delete;
    MultiProcessService& operator=(const MultiProcessService&) = delete;

    /// What a process on the device of this number is to have in its environment.
    [[nodiscard]] std::vector<std::pair<std::string, std::string>> environment(std::size_t device) const;

  private:
    void end();

    std::optional<FileLock> lock_;  ///< of the folder: whose launcher lives
    std::string folder_;  ///< of sockets and logs, on this machine: a socket's name has at most 108 characters
    std::vector<std::string> pipes_;
};

}  // namespace faultline::sweep
