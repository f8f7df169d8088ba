// SPDX-License-Identifier: Apache-2.0
#include <faultline/ranks/ending.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>

#include <unistd.h>

namespace faultline {

void end_at_once(Ranks& ranks, const std::string& line, int status, bool last) noexcept {
    if (ranks.take_word()) {
        const std::string text = line + "\n";
        (void)!::write(STDERR_FILENO, text.data(), text.size());
    }
    if (last) ranks.see_off(std::chrono::seconds(5));
    ranks.abandon();
    std::_Exit(status);
}

void watched(Ranks& ranks, const std::function<void()>& work) {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::thread watch([&] {
        std::unique_lock lock(mutex);
        while (!changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return done; }))
            if (ranks.lost())
                end_at_once(ranks, "faultline: another rank is gone: expected all of them to stay until the run ends",
                            1);
    });
    std::exception_ptr failed;
    try {
        work();
    } catch (...) {
        failed = std::current_exception();
    }
    {
        const std::lock_guard lock(mutex);
        done = true;
    }
    changed.notify_all();
    watch.join();
    if (failed) std::rethrow_exception(failed);
}

}  // namespace faultline
