// SPDX-License-Identifier: Apache-2.0
// Reports on their way into a run's record, in order, by a thread of its own: a step that is faster than the disk, or has numbers
// that are still being worked out, does not wait for either.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include <faultline/gpt/run_record.hpp>

namespace faultline::gpt {

class RecordWriter {
  public:
    /// `record` must outlive it. meanwhile: by a thread; else write() has written when it returns.
    RecordWriter(RunRecord& record, bool meanwhile);
    /// Writes what is left, and says nothing of a failure.
    ~RecordWriter();
    RecordWriter(const RecordWriter&) = delete;
    RecordWriter& operator=(const RecordWriter&) = delete;

    /// Throws what an earlier write threw. Waits where some thousand reports are waiting.
    void write(const StepReport& report);
    /// Until everything is in the file. Throws as write().
    void drain();

  private:
    void work();
    void rethrow();  ///< with the lock

    RunRecord& record_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<StepReport> waiting_;
    bool writing_ = false, ending_ = false;
    std::exception_ptr failure_;
    std::thread thread_;
};

}  // namespace faultline::gpt
