// SPDX-License-Identifier: Apache-2.0
// Spectra of W_Q and W_K worked out while training goes on: a copy engine brings the weights of a step to the host beside the next
// step's passes, threads of the host take their leading values. No multiprocessor has a part in it. Private to this folder.
//
// On the device, Lanczos took more than a step at widths 256 and 384, and the products of the training twice as long while it held
// some multiprocessors (docs/results/gpt-device.md, what was tried).
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include <faultline/gpt/training.hpp>
#include <faultline/gpt_device/crew.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>

struct CUevent_st;

namespace faultline::gpt {

class LateSpectra {
  public:
    /// `training`: the stream that changes the weights.
    LateSpectra(const ModelConfig& model, on_device::Stream training);
    /// Ends what was begun.
    ~LateSpectra();
    LateSpectra(const LateSpectra&) = delete;
    LateSpectra& operator=(const LateSpectra&) = delete;

    /// Of the weights as the training stream leaves them by now: W_Q of layer l begins at weights + l step, W_K beside it, rows
    /// `row` elements apart. What it returns puts the spectra into a report, in any thread, and waits until they are there.
    /// Waits itself where as many are outstanding as there are slots. at_once: somebody waits for them.
    [[nodiscard]] std::function<void(StepReport&)> begin(const float* weights, std::ptrdiff_t step, std::ptrdiff_t row,
                                                         bool at_once);
    /// What comes on the training stream waits for the copies; called before what changes the weights.
    void before_weights_change();
    /// The training stream was waited for: what before_weights_change() made it wait for has been copied.
    void step_is_done();
    /// What it took so far; steps_waited is of begin().
    [[nodiscard]] SpectraTimes times() const;

  private:
    static constexpr std::size_t slots = 2;
    struct Work {
        std::size_t number;  ///< from 0; slot number % slots
        bool at_once;
        double since_the_last;  ///< seconds from the last begin() to this one; 0: it is the first
        std::promise<StepReport> result;
    };
    void work();
    /// Until the host has the weights: told so by a step that ends, so that no thread asks the driver to be woken.
    void wait_for_copies(std::unique_lock<std::mutex>& lock, const Work& work);
    [[nodiscard]] StepReport spectra_of(std::size_t slot, int threads);
    /// For the next, by what this one took: as few as are done in time, so that the host is free for steps.
    [[nodiscard]] int threads_after(double seconds, double since_the_last, bool behind) const;
    /// Bytes of a slot: [layers, width, 2 width], W_Q's columns, then W_K's.
    [[nodiscard]] std::size_t bytes() const;

    ModelConfig model_;
    int most_threads_, threads_;
    Crew crew_;
    on_device::Stream training_, aside_ = nullptr;
    on_device::Mark changed_weights_, read_;
    std::array<CUevent_st*, slots> ready_{};
    std::vector<on_device::PinnedMemory> fetched_;
    int device_ = 0;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Work> queue_;
    std::size_t begun_ = 0, done_ = 0;
    std::size_t waited_for_ = 0, copied_ = 0;  ///< by the training stream; and known to be with the host
    double seconds_ = 0, waited_ = 0;
    std::chrono::steady_clock::time_point begun_at_;
    bool ending_ = false;
    std::thread thread_;
};

}  // namespace faultline::gpt
