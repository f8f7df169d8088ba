// SPDX-License-Identifier: Apache-2.0
// Training step by step: batch, gradient, clip, update, monitors. The state after a step is a function of configuration,
// data and hooks, whatever the number of threads, and can be saved and taken up again bit for bit.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <faultline/gpt/data.hpp>
#include <faultline/gpt/hooks.hpp>
#include <faultline/gpt/model.hpp>
#include <faultline/gpt/optimizer.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline::gpt {

struct TrainConfig {
    ModelConfig model;
    OptimizerConfig optimizer;
    ScheduleConfig schedule;
    std::int64_t steps = 750;
    int batch = 16;              ///< sequences of a micro-batch
    int accumulate = 1;          ///< micro-batches of a step
    double clip = 1;             ///< of the gradient's norm; 0: none
    double qk_clip = 0;          ///< tau of QK-clip (arXiv 2507.20534): 0: none
    std::uint64_t seed = 0;      ///< of weights and windows
    int monitor_every = 10;      ///< steps between spectra, entropies and saturated fractions; 0: never
    int validate_every = 250;    ///< steps between validations; 0: never. The last step is always validated
    int validation_batches = 8;  ///< of `batch` windows, the same ones each time
    int threads = 1;
    /// (key, value) of what else a later step depends on, and a run may not go on without: the data by hash, the faults.
    std::vector<std::pair<std::string, std::string>> also;
};

/// RequestError, one sentence that begins with the field, where the numbers make no training: what a model needs is
/// check(ModelConfig)'s.
void check(const TrainConfig& config);

/// The value that first stopped being a number, and in which step.
struct NonFinite {
    std::int64_t step = 0;
    std::string site;  ///< "layer1.ffn output", "update of layer0.w_q"
    std::ptrdiff_t row = 0, column = 0;
};

class Trainer {
  public:
    /// `data` and the hooks must outlive it. RequestError where configuration or data are no good.
    Trainer(const TrainConfig& config, const TokenData& data, const WindowOrder& windows, const Hooks& hooks = {});
    ~Trainer();
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;

    /// The step that comes next, from 0.
    [[nodiscard]] std::int64_t next_step() const { return next_; }
    [[nodiscard]] bool finished() const { return next_ >= config_.steps || failure_.has_value(); }
    /// One step. Where loss, gradient or update is not finite, nothing is applied, failure() says where it came up, and
    /// the state is that of before the step.
    const StepReport& step();
    [[nodiscard]] const std::optional<NonFinite>& failure() const { return failure_; }
    /// Of the last step.
    [[nodiscard]] const StepReport& report() const { return report_; }
    [[nodiscard]] double validation_loss();

    [[nodiscard]] const Gpt<float>& model() const { return model_; }
    [[nodiscard]] const TrainConfig& config() const { return config_; }
    /// Operands of attention of the steps for which `wanted` is true are given to `take` after the step.
    using Captured = std::vector<Gpt<float>::Operands>;
    void capture(std::function<bool(std::int64_t)> wanted,
                 std::function<void(std::int64_t, int micro_step, const Captured&)> take);

    /// Everything that the next step depends on, as the tensors of a checkpoint.
    [[nodiscard]] TensorSet state() const;
    /// RequestError where it is not the state of a run of this configuration.
    void restore(const TensorSet& state);
    /// The state in a file, which appears whole or not at all. WorkError.
    void save(const std::string& path) const;
    void restore(const std::string& path);

  private:
    class Control;
    Batch micro_batch(int micro_step, Windows& windows) const;
    StepContext context(int micro_step) const;
    double accumulate(BatchStatistics& statistics);
    double clip(double norm);
    void propose(double rate);
    bool stop_where_not_finite(double loss, double norm);
    void stop(const std::string& site, std::ptrdiff_t row, std::ptrdiff_t column);
    void apply();
    void qk_clip();
    void fill_report(const BatchStatistics& statistics, double loss, double norm, double rate);
    void fill_spectra();
    [[nodiscard]] bool due(int every) const { return every > 0 && next_ % every == 0; }

    TrainConfig config_;
    const TokenData& data_;
    const WindowOrder& windows_;
    Hooks hooks_;
    Gpt<float> model_;
    Optimizer optimizer_;
    std::vector<float> update_;
    std::vector<QkSwitch> qk_switch_;
    double rate_factor_ = 1, clip_factor_ = 1, qk_clip_;
    bool fp32_ffn_ = false;
    std::int64_t next_ = 0;
    StepReport report_;
    std::optional<NonFinite> failure_;
    std::function<bool(std::int64_t)> capture_wanted_;
    std::function<void(std::int64_t, int, const Captured&)> capture_take_;
};

}  // namespace faultline::gpt
