// SPDX-License-Identifier: Apache-2.0
// Training step by step: batch, gradient, clip, update, monitors. The state after a step is a function of configuration,
// data and hooks, whatever the number of threads, and can be saved and taken up again bit for bit.
#pragma once

#include <faultline/gpt/cancelled.hpp>
#include <faultline/gpt/step_context.hpp>
#include <faultline/gpt/training.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline::gpt {

class Trainer final : public Training {
  public:
    /// `data`, hooks and ranks must outlive it. With ranks, every one of them makes one with the same arguments, and calls
    /// step(), validation_loss() and capture() when the others do; its state and reports are then those of a single rank, bit
    /// for bit. RequestError where configuration or data are no good, or there is not a part of the work for every rank.
    Trainer(const TrainConfig& config, const TokenData& data, const WindowOrder& windows, const Hooks& hooks = {},
            Ranks* ranks = nullptr);
    ~Trainer() override;
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;

    [[nodiscard]] std::int64_t next_step() const override { return next_; }
    [[nodiscard]] bool finished() const override { return next_ >= config_.steps || failure_.has_value(); }
    const StepReport& step() override;
    [[nodiscard]] const std::optional<NonFinite>& failure() const override { return failure_; }
    [[nodiscard]] const StepReport& report() const override { return report_; }
    void cancel_when(std::function<bool()> cancelled, bool to_save) override;
    [[nodiscard]] bool abandoned() const override { return abandoned_; }
    [[nodiscard]] double validation_loss();

    [[nodiscard]] const Gpt<float>& model() const { return model_; }
    [[nodiscard]] const TrainConfig& config() const override { return config_; }
    [[nodiscard]] std::ptrdiff_t parameters() const override { return model_.layout().size(); }
    [[nodiscard]] std::string reductions() const override;
    void capture(std::function<bool(std::int64_t)> wanted,
                 std::function<void(std::int64_t, int micro_step, const Captured&)> take) override;

    /// Everything that the next step depends on, as the tensors of a checkpoint.
    [[nodiscard]] TensorSet state() const;
    /// RequestError where it is not the state of a run of this configuration.
    void restore(const TensorSet& state);
    void save(const std::string& path) const override;
    void restore(const std::string& path) override;

  private:
    class Control;
    /// What a step changes before its update, as it was.
    struct Before {
        std::vector<QkSwitch> qk_switch;
        double rate_factor = 1, clip_factor = 1, qk_clip = 0;
        bool fp32_ffn = false;
        std::optional<Optimizer::State> optimizer;  ///< where a hook has reset it
        StepReport report;
        std::string hook;
    };
    const StepReport& whole_step();
    void remember();
    void put_back();
    void expect_not_cancelled() const;
    Batch micro_batch(int micro_step, Windows& windows) const;
    StepContext context(int micro_step) const;
    double accumulate(BatchStatistics& statistics);
    double clip(double norm);
    void propose(double rate);
    bool stop_where_not_finite(double loss, double norm);
    void stop(const std::string& site, std::ptrdiff_t row, std::ptrdiff_t column);
    void apply();
    void qk_clip();
    void expect_same_update(double norm) const;
    void share_hooks_parts();
    void find_first_of_ranks(int micro_step, FiniteWatch& first) const;
    void hand_over(int round, Captured& layers);
    void fill_report(const BatchStatistics& statistics, double loss, double norm, double rate);
    [[nodiscard]] bool due(int every) const { return every > 0 && next_ % every == 0; }

    TrainConfig config_;
    const TokenData& data_;
    const WindowOrder& windows_;
    Hooks hooks_;
    Gpt<float> model_;
    Share share_;
    Optimizer optimizer_;
    std::vector<float> update_;
    std::vector<QkSwitch> qk_switch_;
    double rate_factor_ = 1, clip_factor_ = 1, qk_clip_;
    bool fp32_ffn_ = false;
    std::int64_t next_ = 0;
    StepReport report_;
    std::optional<NonFinite> failure_;
    Cancelled cancelled_;
    bool keeps_state_ = false, abandoned_ = false;
    Before before_;  // of the step that is under way, where it may be given up
    std::function<bool(std::int64_t)> capture_wanted_;
    std::function<void(std::int64_t, int, const Captured&)> capture_take_;
};

}  // namespace faultline::gpt
