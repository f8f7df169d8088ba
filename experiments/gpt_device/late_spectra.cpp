// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/late_spectra.hpp>

#include <algorithm>
#include <cmath>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>

namespace faultline::gpt {
namespace {

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw WorkError(fmt::format("device cuda: {}: {}", what, cudaGetErrorString(error)));
}

/// Of the host's for a run: at most half, and no more than eight, which keep up with a step of any size.
int most_threads_of_a_run() { return std::clamp(hardware_threads() / 2, 1, 8); }

double seconds_from(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

std::size_t LateSpectra::bytes() const {
    const auto width = static_cast<std::size_t>(model_.width);
    return static_cast<std::size_t>(model_.layers) * 2 * width * width * sizeof(float);
}

LateSpectra::LateSpectra(const ModelConfig& model, on_device::Stream training)
    : model_(model), most_threads_(most_threads_of_a_run()), threads_(most_threads_), training_(training) {
    for (std::size_t i = 0; i < slots; ++i) fetched_.emplace_back(bytes());
    check(cudaGetDevice(&device_), "choosing a device");
    check(cudaStreamCreateWithFlags(&aside_, cudaStreamNonBlocking), "making a stream");
    for (CUevent_st*& ready : ready_)
        check(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming | cudaEventBlockingSync), "making an event");
    thread_ = std::thread([this] { work(); });
}

LateSpectra::~LateSpectra() {
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
    for (CUevent_st* event : ready_) (void)cudaEventDestroy(event);
    (void)cudaStreamDestroy(aside_);
}

std::function<void(StepReport&)> LateSpectra::begin(const float* weights, std::ptrdiff_t step, std::ptrdiff_t row,
                                                    bool at_once) {
    const auto now = std::chrono::steady_clock::now();
    {
        std::unique_lock lock(mutex_);
        if (begun_ - done_ == slots) {
            changed_.wait(lock, [this] { return begun_ - done_ < slots; });
            waited_ += seconds_from(now);
        }
    }
    const double since_the_last = begun_ == 0 ? 0.0 : std::chrono::duration<double>(now - begun_at_).count();
    begun_at_ = now;
    const std::size_t slot = begun_ % slots;
    changed_weights_.set(training_);
    changed_weights_.wait(aside_);
    const auto rows = static_cast<std::size_t>(model_.width), columns = 2 * rows * sizeof(float);
    for (int l = 0; l < model_.layers; ++l)
        on_device::download_rows_later(fetched_[slot].data() + static_cast<std::size_t>(l) * rows * columns,
                                       weights + l * step, rows, columns, static_cast<std::size_t>(row) * sizeof(float),
                                       aside_);
    read_.set(aside_);
    check(cudaEventRecord(ready_[slot], aside_), "copying weights");
    Work next{begun_, at_once, since_the_last, {}};
    std::shared_future<StepReport> result = next.result.get_future().share();
    {
        const std::lock_guard lock(mutex_);
        queue_.push_back(std::move(next));
        ++begun_;
    }
    changed_.notify_all();
    return [result](StepReport& report) { copy_spectra(result.get(), report); };
}

void LateSpectra::before_weights_change() {
    read_.wait(training_);
    waited_for_ = begun_;
}

void LateSpectra::step_is_done() {
    if (copied_ == waited_for_) return;  // only the thread of the steps changes either
    {
        const std::lock_guard lock(mutex_);
        copied_ = waited_for_;
    }
    changed_.notify_all();
}

void LateSpectra::wait_for_copies(std::unique_lock<std::mutex>& lock, const Work& work) {
    using std::chrono_literals::operator""ms;
    const auto known = [&] { return ending_ || copied_ > work.number; };
    // The last step's are followed by no other step, and a long step's are there long before its end.
    if (!work.at_once && changed_.wait_for(lock, 20ms, known) && copied_ > work.number) return;
    lock.unlock();
    const cudaError_t error = cudaEventSynchronize(ready_[work.number % slots]);
    lock.lock();
    check(error, "copying weights");
}

void LateSpectra::work() {
    Crew::yield_to_others();
    (void)cudaSetDevice(device_);
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
        if (queue_.empty()) return;
        Work next = std::move(queue_.front());
        queue_.pop_front();
        const int threads = threads_;
        double seconds = 0;
        try {
            wait_for_copies(lock, next);
            lock.unlock();
            const auto begin = std::chrono::steady_clock::now();
            StepReport found = spectra_of(next.number % slots, threads);
            seconds = seconds_from(begin);
            next.result.set_value(std::move(found));
        } catch (...) {
            next.result.set_exception(std::current_exception());
        }
        if (!lock.owns_lock()) lock.lock();
        ++done_;
        seconds_ += seconds;
        threads_ = threads_after(seconds, next.since_the_last, !queue_.empty());
        changed_.notify_all();
    }
}

int LateSpectra::threads_after(double seconds, double since_the_last, bool behind) const {
    if (behind) return most_threads_;
    if (since_the_last == 0) return threads_;
    constexpr double share = 0.6;  // of the time between two: what is left is for a host that is busy for a while
    const double enough = std::ceil(threads_ * seconds / (share * since_the_last));
    // Half as many at most are taken away at a time: a validation between two makes no longer time of the next.
    return static_cast<int>(std::clamp(enough, std::ceil(threads_ / 2.0), static_cast<double>(most_threads_)));
}

SpectraTimes LateSpectra::times() const {
    const std::lock_guard lock(mutex_);
    const double count = std::max<double>(1, static_cast<double>(done_));
    return {static_cast<std::int64_t>(done_), seconds_ / count, threads_, waited_};
}

StepReport LateSpectra::spectra_of(std::size_t slot, int threads) {
    const auto* of = reinterpret_cast<const float*>(fetched_[slot].data());
    StepReport r;
    r.layers = model_.layers;
    r.heads = model_.heads;
    const std::ptrdiff_t width = model_.width, stride = 2 * width;
    report_leading_spectra(
        model_,
        [&](int l) {
            const float* q = of + l * width * stride;
            return QkWeights{{q, width, width, stride}, {q + width, width, width, stride}};
        },
        [&](std::size_t count, const std::function<void(std::size_t)>& task) { crew_.run(count, threads, task); }, r);
    return r;
}

}  // namespace faultline::gpt
