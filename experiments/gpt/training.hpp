// SPDX-License-Identifier: Apache-2.0
// A run step by step, whatever computes it: the CPU (Trainer) or the device (gpt_device).
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

    [[nodiscard]] double tokens_of_step() const {
        return static_cast<double>(batch) * accumulate * static_cast<double>(model.context);
    }
};

/// RequestError, one sentence that begins with the field, where the numbers make no training: what a model needs is
/// check(ModelConfig)'s.
void check(const TrainConfig& config);

/// Windows of a micro-batch of a step; of validation batch b, the same ones in every validation.
[[nodiscard]] Windows training_windows(const TrainConfig& config, const TokenData& data, const WindowOrder& order,
                                       std::int64_t step, int micro_step);
[[nodiscard]] Windows validation_windows(const TrainConfig& config, const TokenData& data, int b);

/// Spectra of W_Q and W_K into the report; NaN where they are not due.
void report_spectra(const ModelConfig& model, const ParameterLayout& layout, std::span<const float> weights, bool due,
                    StepReport& report);
/// W_Q and W_K of a layer, [width, width].
struct QkWeights {
    MatrixView<const float> q, k;
};
/// Does task(0) … task(count - 1), each once, in any order and on any threads, and comes back when all are done.
using DoTasks = std::function<void(std::size_t count, const std::function<void(std::size_t)>& task)>;
/// The same of weights that lie elsewhere, by Lanczos: each value within lanczos_error (probes/lanczos.hpp) of the largest. A task
/// is a matrix; the numbers do not depend on who does it.
void report_leading_spectra(const ModelConfig& model, const std::function<QkWeights(int layer)>& weights_of,
                            const DoTasks& do_tasks, StepReport& report);
/// NaN, of the report's layers and heads.
void clear_spectra(StepReport& report);
/// The spectra of one report into another.
void copy_spectra(const StepReport& from, StepReport& to);

/// The value that first stopped being a number, and in which step.
struct NonFinite {
    std::int64_t step = 0;
    std::string site;  ///< "layer1.ffn output", "update of layer0.w_q"
    std::ptrdiff_t row = 0, column = 0;
};

/// What finding spectra beside the steps took.
struct SpectraTimes {
    std::int64_t found = 0;   ///< times
    double seconds = 0;       ///< of one time, on average, by the clock
    int threads = 0;          ///< of the last one
    double steps_waited = 0;  ///< seconds that steps waited for spectra, in all
};

class Training {
  public:
    virtual ~Training() = default;

    [[nodiscard]] virtual const TrainConfig& config() const = 0;
    [[nodiscard]] virtual std::ptrdiff_t parameters() const = 0;
    /// What is added up over ranks, by what and in which order: for the record.
    [[nodiscard]] virtual std::string reductions() const = 0;
    /// The step that comes next, from 0.
    [[nodiscard]] virtual std::int64_t next_step() const = 0;
    [[nodiscard]] virtual bool finished() const = 0;
    /// One step. Where loss, gradient or update is not finite, nothing is applied, failure() says where it came up, and
    /// the state is that of before the step. (On a device an update that is not finite has been applied when that is seen;
    /// the last checkpoint is from before.)
    virtual const StepReport& step() = 0;
    [[nodiscard]] virtual const std::optional<NonFinite>& failure() const = 0;
    /// Of the last step, whole: waits for what step() has left to be finished.
    [[nodiscard]] virtual const StepReport& report() const = 0;
    /// Whether a step is done by others, so that the thread that asked for it has better to do than to write its record.
    [[nodiscard]] virtual bool runs_elsewhere() const { return false; }
    /// The process is about to end without the other ranks: closes what it has open of theirs, and true. False where there is
    /// nothing of the kind, or its device is at work on it. Nothing may be called afterwards.
    virtual bool let_go() noexcept { return false; }

    /// `cancelled` is asked during a step too, from several threads, so that a long one need not be waited for: where it is true the
    /// step may be given up, and abandoned() says that it was. The state is that of before the step then, with `to_save`; else it
    /// is of no more use. The default asks nobody and gives nothing up. With ranks all of them do it alike.
    virtual void cancel_when(std::function<bool()> cancelled, bool to_save) { (void)cancelled, (void)to_save; }
    [[nodiscard]] virtual bool abandoned() const { return false; }

    /// Operands of attention of the steps for which `wanted` is true are given to `take` after the step; of several ranks'
    /// trainers the first one's `take` gets those of all.
    using Captured = std::vector<Gpt<float>::Operands>;
    virtual void capture(std::function<bool(std::int64_t)> wanted,
                         std::function<void(std::int64_t, int micro_step, const Captured&)> take) = 0;

    /// The state in a file, which appears whole or not at all. WorkError.
    virtual void save(const std::string& path) const = 0;
    /// RequestError where it is not the state of a run of this configuration.
    virtual void restore(const std::string& path) = 0;

    /// Where spectra are found beside the steps.
    [[nodiscard]] virtual std::optional<SpectraTimes> spectra_times() const { return std::nullopt; }
};

}  // namespace faultline::gpt
