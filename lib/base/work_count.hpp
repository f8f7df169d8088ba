// SPDX-License-Identifier: Apache-2.0
// Units of work that several threads do: counted, told to the caller, and ended when the caller asks for it.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <string>

namespace faultline {

/// Thrown between units of work when the caller asked to stop; what the unit belongs to is dropped.
struct Cancelled {};

/// One for a whole command or one of its parts; every member may be called by any thread.
class WorkCount {
  public:
    using Progress = std::function<void(std::size_t done, std::size_t total, const std::string& what)>;

    /// Both functions outlive it; either may be empty. `progress` is called by one thread at a time.
    WorkCount(const Progress& progress, const std::function<bool()>& cancelled, std::size_t total = 0)
        : progress_(progress), cancelled_(cancelled), total_(total) {}

    /// Work that turned up on the way.
    void expect(std::size_t more) {
        const std::lock_guard lock(mutex_);
        total_ += more;
    }
    /// `units` are done. Cancelled where the caller asked to stop.
    void step(const std::string& what, std::size_t units = 1) {
        check();
        const std::lock_guard lock(mutex_);
        done_ += units;
        if (progress_) progress_(done_, total_, what);
    }
    /// Cancelled where the caller asked to stop: before a unit that is long.
    void check() const {
        if (cancelled_ && cancelled_()) throw Cancelled{};
    }

  private:
    const Progress& progress_;
    const std::function<bool()>& cancelled_;
    std::mutex mutex_;
    std::size_t done_ = 0, total_;
};

}  // namespace faultline
