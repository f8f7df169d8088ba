// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/late_spectra.hpp>

#include <algorithm>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>

namespace faultline::gpt {
namespace {

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw WorkError(fmt::format("device cuda: {}: {}", what, cudaGetErrorString(error)));
}

/// Of the host's for a run: half, and no more than eight, which keep up with a step of any size.
int threads_of_a_run() { return std::clamp(hardware_threads() / 2, 1, 8); }

}  // namespace

std::size_t LateSpectra::bytes() const {
    const auto width = static_cast<std::size_t>(model_.width);
    return static_cast<std::size_t>(model_.layers) * 2 * width * width * sizeof(float);
}

LateSpectra::LateSpectra(const ModelConfig& model, on_device::Stream training)
    : model_(model), threads_(threads_of_a_run()), training_(training) {
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

std::function<void(StepReport&)> LateSpectra::begin(const float* weights, std::ptrdiff_t step, std::ptrdiff_t row) {
    {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return begun_ - done_ < slots; });
    }
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
    Work next{slot, {}};
    std::shared_future<StepReport> result = next.result.get_future().share();
    {
        const std::lock_guard lock(mutex_);
        queue_.push_back(std::move(next));
        ++begun_;
    }
    changed_.notify_all();
    return [result](StepReport& report) { copy_spectra(result.get(), report); };
}

void LateSpectra::before_weights_change() { read_.wait(training_); }

void LateSpectra::work() {
    (void)cudaSetDevice(device_);
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
        if (queue_.empty()) return;
        Work next = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        try {
            check(cudaEventSynchronize(ready_[next.slot]), "copying weights");
            next.result.set_value(spectra_of(next.slot));
        } catch (...) {
            next.result.set_exception(std::current_exception());
        }
        lock.lock();
        ++done_;
        changed_.notify_all();
    }
}

StepReport LateSpectra::spectra_of(std::size_t slot) const {
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
        threads_, r);
    return r;
}

}  // namespace faultline::gpt
