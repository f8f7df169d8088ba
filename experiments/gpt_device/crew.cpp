// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/crew.hpp>

#include <algorithm>
#include <system_error>
#include <utility>

#ifdef __linux__
#include <sys/resource.h>
#endif

namespace faultline::gpt {

Crew::~Crew() {
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Crew::yield_to_others() {
#ifdef __linux__
    constexpr int niceness = 10;
    (void)setpriority(PRIO_PROCESS, 0, niceness);  // Linux: of the calling thread alone
#endif
}

void Crew::run(std::size_t count, int threads, const std::function<void(std::size_t)>& task) {
    const std::size_t helpers = std::min(count, static_cast<std::size_t>(std::max(threads, 1))) - (count > 0 ? 1 : 0);
    std::unique_lock lock(mutex_);
    try {
        while (threads_.size() < helpers) {
            const std::size_t number = threads_.size();
            threads_.emplace_back([this, number] { help(number); });
        }
    } catch (const std::system_error&) {  // the system gives no more: those that there are do it
    }
    task_ = &task;
    count_ = count;
    next_ = 0;
    helping_ = helpers;
    failure_ = nullptr;
    changed_.notify_all();
    take_tasks(lock);
    left_.wait(lock, [this] { return at_work_ == 0; });
    task_ = nullptr;
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Crew::take_tasks(std::unique_lock<std::mutex>& lock) {
    while (task_ != nullptr && next_ < count_) {
        const std::size_t at = next_++;
        const auto& task = *task_;
        ++at_work_;
        lock.unlock();
        std::exception_ptr failure;
        try {
            task(at);
        } catch (...) {
            failure = std::current_exception();
        }
        lock.lock();
        --at_work_;
        if (failure && !failure_) {
            failure_ = failure;
            next_ = count_;
        }
    }
    if (at_work_ == 0) left_.notify_all();
}

void Crew::help(std::size_t number) {
    yield_to_others();
    std::unique_lock lock(mutex_);
    while (!ending_) {
        changed_.wait(lock, [&] { return ending_ || (task_ != nullptr && next_ < count_ && number < helping_); });
        if (ending_) return;
        take_tasks(lock);
    }
}

}  // namespace faultline::gpt
