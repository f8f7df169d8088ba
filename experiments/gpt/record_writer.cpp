// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/record_writer.hpp>

namespace faultline::gpt {
namespace {

constexpr std::size_t most_waiting = 4096;

void write_now(RunRecord& record, StepReport& report) {
    if (report.finish) report.finish(report);
    record.write(report);
}

}  // namespace

RecordWriter::RecordWriter(RunRecord& record, bool meanwhile) : record_(record) {
    if (meanwhile) thread_ = std::thread([this] { work(); });
}

RecordWriter::~RecordWriter() {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void RecordWriter::rethrow() {
    if (failure_) std::rethrow_exception(failure_);
}

void RecordWriter::write(const StepReport& report) {
    StepReport copy = report;
    if (!thread_.joinable()) return write_now(record_, copy);
    {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return failure_ || waiting_.size() < most_waiting; });
        rethrow();
        waiting_.push_back(std::move(copy));
    }
    changed_.notify_all();
}

void RecordWriter::drain() {
    if (!thread_.joinable()) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return failure_ || (waiting_.empty() && !writing_); });
    rethrow();
}

void RecordWriter::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
        if (waiting_.empty() || failure_) return;
        StepReport next = std::move(waiting_.front());
        waiting_.pop_front();
        writing_ = true;
        lock.unlock();
        std::exception_ptr failure;
        try {
            write_now(record_, next);
        } catch (...) {
            failure = std::current_exception();
        }
        lock.lock();
        writing_ = false;
        if (failure) failure_ = failure;
        changed_.notify_all();
    }
}

}  // namespace faultline::gpt
