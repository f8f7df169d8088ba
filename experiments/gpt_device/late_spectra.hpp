// SPDX-License-Identifier: Apache-2.0
// Spectra of W_Q and W_K worked out while training goes on: the weights of a step are copied on the device, a stream of low
// priority makes bidiagonal matrices of them, a thread of the host takes the singular values of those. Private to this folder.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include <faultline/gpt/training.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>
#include <faultline/gpt_device/memory_plan.hpp>

struct CUevent_st;

namespace faultline::gpt {

/// The leading `count` singular values, falling; NaN where an element is. Good to what the last beta leaves: below 2^-40 of the
/// largest for weights as training makes them. A value that is there twice to the last bit counts once.
[[nodiscard]] std::vector<double> leading_values(const on_device::Bidiagonal& b, int count);

class LateSpectra {
  public:
    /// Pointers to device memory of SpectraMemory's sizes; `training`: the stream that changes the weights.
    LateSpectra(const ModelConfig& model, float* snapshot, char* scratch, on_device::Bidiagonal* results,
                on_device::Stream training);
    /// Ends what was begun.
    ~LateSpectra();
    LateSpectra(const LateSpectra&) = delete;
    LateSpectra& operator=(const LateSpectra&) = delete;

    /// Of the weights as the training stream leaves them by now: W_Q of layer l begins at weights + l step, W_K beside it, rows
    /// `row` elements apart. What it returns puts the spectra into a report, in any thread, and waits until they are there.
    /// Waits itself where four are outstanding.
    [[nodiscard]] std::function<void(StepReport&)> begin(const float* weights, std::ptrdiff_t step, std::ptrdiff_t row);

  private:
    static constexpr std::size_t slots = 4;
    struct Work {
        std::size_t slot;
        std::promise<StepReport> result;
    };
    void work();
    [[nodiscard]] StepReport spectra_of(std::size_t slot) const;

    ModelConfig model_;
    on_device::QkSnapshot snapshot_;
    float* copy_;
    char* scratch_;
    on_device::Bidiagonal* results_;
    on_device::Stream training_, aside_ = nullptr;
    CUevent_st *copied_ = nullptr, *read_ = nullptr;
    std::array<CUevent_st*, slots> ready_{};
    std::vector<on_device::PinnedMemory> fetched_;
    int device_ = 0;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Work> queue_;
    std::size_t begun_ = 0, done_ = 0;
    bool ending_ = false;
    std::thread thread_;
};

}  // namespace faultline::gpt
