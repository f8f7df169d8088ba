// SPDX-License-Identifier: Apache-2.0
// Threads of the host that stay, for work that comes back every few steps: making and ending threads for each of it unmaps their
// stacks, for which the system interrupts every processor of the process, that of the thread which launches steps too. Private to
// this folder.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace faultline::gpt {

class Crew {
  public:
    Crew() = default;
    ~Crew();
    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;

    /// task(0) … task(count - 1), each once, on `threads` threads, the caller's among them; begun in order. The first exception is
    /// thrown again when all threads have stopped; tasks not yet begun are left out then. One call at a time.
    void run(std::size_t count, int threads, const std::function<void(std::size_t)>& task);

    /// The calling thread gives way to the process's others where there are too few processors, as those of a crew do (Linux:
    /// niceness 10).
    static void yield_to_others();

  private:
    void help(std::size_t number);
    void take_tasks(std::unique_lock<std::mutex>& lock);

    std::mutex mutex_;
    std::condition_variable changed_, left_;
    std::vector<std::thread> threads_;
    const std::function<void(std::size_t)>* task_ = nullptr;
    std::size_t count_ = 0, next_ = 0, helping_ = 0;  ///< helping_: threads that may take tasks
    std::size_t at_work_ = 0;                         ///< tasks begun and not done
    std::exception_ptr failure_;
    bool ending_ = false;
};

}  // namespace faultline::gpt
