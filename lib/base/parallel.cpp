// SPDX-License-Identifier: Apache-2.0
#include <faultline/base/parallel.hpp>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace faultline {

int hardware_threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

void parallel_for(std::size_t count, int threads, const std::function<void(std::size_t)>& task) {
    const auto wanted = static_cast<std::size_t>(threads > 0 ? threads : hardware_threads());
    std::atomic<std::size_t> next{0};
    std::atomic<bool> failed{false};
    std::mutex error_mutex;
    std::exception_ptr error;
    std::size_t error_index = std::numeric_limits<std::size_t>::max();

    const auto work = [&] {
        while (!failed.load(std::memory_order_relaxed)) {
            const std::size_t i = next.fetch_add(1);
            if (i >= count) return;
            try {
                task(i);
            } catch (...) {
                const std::lock_guard lock(error_mutex);
                if (i < error_index) {
                    error_index = i;
                    error = std::current_exception();
                }
                failed = true;
            }
        }
    };
    {
        std::vector<std::jthread> pool;
        try {
            for (std::size_t t = 1; t < std::min(wanted, count); ++t) pool.emplace_back(work);
        } catch (const std::system_error&) {
            // The system gives no more threads: those there are, this one at least, do all tasks.
        }
        work();
    }
    if (error) std::rethrow_exception(error);
}

}  // namespace faultline
