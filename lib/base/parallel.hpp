// SPDX-License-Identifier: Apache-2.0
// Independent tasks over a few threads. Each task writes only its own slot, so results do not depend on the thread count.
#pragma once

#include <cstddef>
#include <functional>

namespace faultline {

/// Runs task(0) … task(count-1), each exactly once, on `threads` threads (0: one per hardware thread), or on fewer
/// where the system gives no more. Tasks start in index order. The first exception (by task index among those that ran) is rethrown after all threads have stopped;
/// tasks not yet started are then skipped.
void parallel_for(std::size_t count, int threads, const std::function<void(std::size_t)>& task);

/// What 0 threads stands for: the number of hardware threads, at least 1.
[[nodiscard]] int hardware_threads();

}  // namespace faultline
