// SPDX-License-Identifier: Apache-2.0
// What the ranks of a device run add up, and when: the gradient of the last of a rank's micro-batches layer by layer, on a
// stream of its own while the backward goes on below, then what is left. Private to this folder.
//
// Rank r of R takes micro-batches r, r + R, … of the step's `accumulate`, which R divides. It adds its own in ascending order,
// each rounded as one rank rounds it; then the ranks' sums are added by NCCL in fp32 (or, as an option, rounded to bf16 and
// added in it). Of two ranks with one micro-batch each that is the one addition that a single rank makes of two micro-batches,
// so the bits are the same.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <faultline/gpt/training.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>
#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/gpt_device/monitors.hpp>
#include <faultline/gpt_device/nccl.hpp>

namespace faultline::gpt {

/// Micro-batches of a step that each rank goes through; RequestError where the ranks do not divide config.accumulate.
[[nodiscard]] int rounds_of(const Ranks* ranks, const TrainConfig& config);

/// Elements [first, first + count) of the flat gradient; both are multiples of 8.
struct GradientRange {
    std::size_t first = 0, count = 0;
};
/// Of a layer; of what lies before and behind the layers.
[[nodiscard]] GradientRange range_of_layer(const ParameterLayout& layout, int layer);
[[nodiscard]] std::vector<GradientRange> ranges_beside_layers(const ParameterLayout& layout);

class Exchange {
  public:
    /// `ranks` null: one rank, and every function below does nothing. RequestError where they do not divide config.accumulate, or
    /// there is no NCCL; WorkError where there is no room for a gradient in bf16.
    Exchange(Ranks* ranks, const TrainConfig& config, const ParameterLayout& layout, const ExchangeOptions& options);

    [[nodiscard]] bool active() const { return ranks_ != nullptr; }
    [[nodiscard]] Ranks* ranks() const { return ranks_; }
    /// Micro-batches that this rank goes through in a step, and the number of its i-th.
    [[nodiscard]] int rounds() const { return rounds_; }
    [[nodiscard]] int micro_batch(int round) const {
        return active() ? round * ranks_->size() + ranks_->rank() : round;
    }
    /// For the record, and for the screen.
    [[nodiscard]] std::string text() const;

    /// Called while the last micro-batch's launches are recorded. A layer's gradient is whole: it is added up beside `main`.
    void layer_done(int layer, float* gradient, on_device::Stream main);
    /// All is whole: the rest, the sum of the losses, and, where `totals` is not null, what the heads saw; what follows on `main` has
    /// the sums.
    void finish(float* gradient, double* loss, on_device::HeadTotals* totals, on_device::Stream main);
    /// What this rank kept of its micro-batch of the round goes to the first, where `take` is called for those of all ranks, one
    /// after the other with their numbers, with each in `layers`.
    void hand_over(int round, Training::Captured& layers, const std::function<void(int micro_step)>& take) const;
    /// The value that is not finite which the rank with the earliest micro-batch came upon; of equals the first rank's.
    void first_of_ranks(int micro_batch, NonFinite& found) const;
    /// As on_device::wait, and heeds the other ranks.
    void wait(on_device::Stream main);
    /// As Communicator::call_off.
    void call_off() noexcept;

  private:
    void add(float* gradient, const GradientRange& of, on_device::Stream stream);
    void add(on_device::HeadTotals* totals, on_device::Stream stream);
    Ranks* ranks_;
    const ParameterLayout& layout_;
    int rounds_;
    ExchangeOptions options_;
    std::optional<on_device::Communicator> nccl_;
    std::optional<on_device::SideStream> side_;
    std::size_t heads_;                         // of all layers
    std::optional<on_device::Memory> seen_;     // totals of the heads, of which the largest is asked for
    std::optional<on_device::Memory> rounded_;  // a gradient in bf16, where that is what is added up
};

}  // namespace faultline::gpt
