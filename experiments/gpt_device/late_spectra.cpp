// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/late_spectra.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <Eigen/Eigenvalues>

#include <faultline/base/error.hpp>

namespace faultline::gpt {
namespace {

using on_device::Bidiagonal;
using on_device::most_lanczos_steps;

constexpr int spectrum = 3;  // singular values that are recorded

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw WorkError(fmt::format("device cuda: {}: {}", what, cudaGetErrorString(error)));
}

on_device::QkSnapshot snapshot_of(const ModelConfig& m, const float* weights) {
    return {weights, m.layers, m.width, m.heads};
}

}  // namespace

std::vector<double> leading_values(const Bidiagonal& b, int count) {
    std::vector<double> values(static_cast<std::size_t>(count), 0.0);
    int n = 0;
    while (n < most_lanczos_steps && b.alpha[n] != 0) ++n;  // NaN is not 0
    for (int j = 0; j < n; ++j)
        if (!std::isfinite(b.alpha[j]) || !std::isfinite(b.beta[j])) {
            values.assign(values.size(), std::numeric_limits<double>::quiet_NaN());
            return values;
        }
    if (n == 0) return values;
    // B B^T, of B with alpha on the diagonal and beta above it, the last beta in a column of its own: U^T W = B V^T holds with it.
    Eigen::VectorXd diagonal(n), beside(std::max(0, n - 1));
    for (int j = 0; j < n; ++j) {
        diagonal(j) = b.alpha[j] * b.alpha[j] + b.beta[j] * b.beta[j];
        if (j + 1 < n) beside(j) = b.beta[j] * b.alpha[j + 1];
    }
    Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver;
    solver.computeFromTridiagonal(diagonal, beside, Eigen::EigenvaluesOnly);
    for (int i = 0; i < std::min(count, n); ++i)
        values[static_cast<std::size_t>(i)] = std::sqrt(std::max(0.0, solver.eigenvalues()(n - 1 - i)));
    return values;
}

LateSpectra::LateSpectra(const ModelConfig& model, float* snapshot, char* scratch, Bidiagonal* results,
                         on_device::Stream training)
    : model_(model),
      snapshot_(snapshot_of(model_, snapshot)),
      copy_(snapshot),
      scratch_(scratch),
      results_(results),
      training_(training) {
    for (std::size_t i = 0; i < slots; ++i) fetched_.emplace_back(SpectraMemory(model_).results);
    check(cudaGetDevice(&device_), "choosing a device");
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking the device");
    check(cudaStreamCreateWithPriority(&aside_, cudaStreamNonBlocking, least), "making a stream");
    const auto event = [](CUevent_st*& to) {
        check(cudaEventCreateWithFlags(&to, cudaEventDisableTiming | cudaEventBlockingSync), "making an event");
    };
    event(copied_);
    event(read_);
    for (CUevent_st*& ready : ready_) event(ready);
    thread_ = std::thread([this] { work(); });
}

LateSpectra::~LateSpectra() {
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
    for (CUevent_st* event : {copied_, read_, ready_[0], ready_[1], ready_[2], ready_[3]})
        (void)cudaEventDestroy(event);
    (void)cudaStreamDestroy(aside_);
}

std::function<void(StepReport&)> LateSpectra::begin(const float* weights, std::ptrdiff_t step, std::ptrdiff_t row) {
    {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return begun_ - done_ < slots; });
    }
    const std::size_t slot = begun_ % slots;
    // The weights that were copied last may still be read: the device waits, not the host.
    check(cudaStreamWaitEvent(training_, read_, 0), "waiting for the spectra");
    on_device::take_snapshot(weights, step, row, model_.layers, model_.width, copy_, training_);
    check(cudaEventRecord(copied_, training_), "copying weights");
    check(cudaStreamWaitEvent(aside_, copied_, 0), "copying weights");
    on_device::lanczos(snapshot_, scratch_, results_, aside_);
    check(cudaEventRecord(read_, aside_), "working out spectra");
    on_device::download_later(fetched_[slot].data(), results_, SpectraMemory(model_).results, aside_);
    check(cudaEventRecord(ready_[slot], aside_), "working out spectra");
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
            check(cudaEventSynchronize(ready_[next.slot]), "working out spectra");
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
    const auto* found = reinterpret_cast<const Bidiagonal*>(fetched_[slot].data());
    StepReport r;
    r.layers = model_.layers;
    r.heads = model_.heads;
    clear_spectra(r);
    for (int l = 0; l < r.layers; ++l) {
        const auto put = [&](std::vector<double>& to, int at, int matrix) {
            std::ranges::copy(leading_values(found[l * (2 + r.heads) + matrix], spectrum), to.begin() + at * spectrum);
        };
        put(r.singular_q, l, 0);
        put(r.singular_k, l, 1);
        for (int h = 0; h < r.heads; ++h) put(r.singular_qk, l * r.heads + h, 2 + h);
        r.sigma_q[static_cast<std::size_t>(l)] = r.singular_q[static_cast<std::size_t>(l * spectrum)];
        r.sigma_k[static_cast<std::size_t>(l)] = r.singular_k[static_cast<std::size_t>(l * spectrum)];
    }
    return r;
}

}  // namespace faultline::gpt
