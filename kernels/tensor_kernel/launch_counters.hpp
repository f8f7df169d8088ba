// SPDX-License-Identifier: Apache-2.0
// Which counter a launch of the forward draws its query tiles from. Two launches that run at one time must not have the same: each
// would take the other's tiles, and both would leave rows of o unwritten.
#pragma once

#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace faultline::tensor_kernel {

/// Counters by stream. Launches of a stream run one after another, but for neighbours that begin beside the last, and so take
/// turns at a few; no two streams have one in common, also where launches are recorded into graphs and run again and again, as
/// long as a graph runs on the stream that it was recorded on. After `streams` streams the first one's are given once more.
class LaunchCounters {
  public:
    static constexpr int streams = 1024;
    static constexpr int turns = 8;
    static constexpr int count = streams * turns;

    /// 0 to count - 1. `stream`: what tells streams apart; `thread`: of a stream that each thread has its own of under one name.
    [[nodiscard]] int next(const void* stream, std::thread::id thread = {}) {
        const std::scoped_lock lock(mutex_);
        const auto [at, is_new] = taken_.try_emplace({stream, thread}, 0);
        if (is_new) at->second = static_cast<int>((taken_.size() - 1) % streams) * turns;
        const int given = at->second;
        at->second = given / turns * turns + (given + 1) % turns;
        return given;
    }

  private:
    std::mutex mutex_;
    std::map<std::pair<const void*, std::thread::id>, int> taken_;  ///< the counter that the stream has next
};

}  // namespace faultline::tensor_kernel
