// SPDX-License-Identifier: Apache-2.0
// Where a training run can be watched and changed: attention sites, model sites (<faultline/injectors/model_hook.hpp>),
// updates before they are applied, and the step itself. All optional; none costs anything where it is absent.
//
// Everything that is called from several threads says so. A hook must depend on its arguments alone there, so that a run
// does not depend on the number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/cpu/instrument.hpp>
#include <faultline/injectors/model_hook.hpp>
#include <faultline/tensor/matrix_view.hpp>

namespace faultline::gpt {

/// One head of one sequence of one step.
struct HeadAt {
    std::int64_t step = 0;
    int micro_step = 0;  ///< of gradient accumulation
    int layer = 0;
    int head = 0;
    int sequence = 0;       ///< of the micro-batch
    bool backward = false;  ///< which pass
};

/// Instruments the attention kernels: an Instrument for every head of every sequence.
class AttentionHook {
  public:
    virtual ~AttentionHook() = default;
    /// Whether any head of this layer is instrumented at this step, and at which sites. Decides which kernel runs: the
    /// fast one shows the sites of fast_sites() (fast_attention.hpp), the emulated one every site.
    [[nodiscard]] virtual bool watches(std::int64_t step, int layer, Site site) const = 0;
    /// The instrument of this head for its forward, and in another call for its backward; null: none. Called from several
    /// threads, as are the instruments it returns, never two threads for one head.
    [[nodiscard]] virtual std::unique_ptr<Instrument> instrument(const HeadAt& where) = 0;
};

/// What a parameter is to the model: which channel it belongs to.
enum class Role : unsigned char {
    embedding,  ///< wte (also the head), wpe
    w_q,
    w_k,
    w_v,
    w_o,
    w_gate,  ///< attention output gate
    w_fc,    ///< first product of the feed-forward
    w_proj,  ///< second
    gain,    ///< vectors: norm gains, biases, reparametrisation scales
};

/// A parameter with what is about to be added to it. Weights are [in, out]: y = x W; of W_Q head h has the columns
/// [h head_dim, (h+1) head_dim). Vectors are [1, n].
struct ParameterUpdate {
    std::string_view name;  ///< "layer0.w_q"
    int layer = -1;         ///< -1: none
    Role role = Role::gain;
    MatrixView<const float> weight;
    MatrixView<float> update;  ///< signed, learning rate and weight decay included: weight + update is the next weight
};

/// Changes updates: channel interventions. Called once a step, from one thread, with every parameter.
class UpdateHook {
  public:
    virtual ~UpdateHook() = default;
    virtual void before_apply(std::int64_t step, std::span<const ParameterUpdate> updates) = 0;
};

/// What the monitors saw in a step. Per layer, or [layer, head] row-major.
struct StepReport {
    std::int64_t step = 0;
    double loss = 0;           ///< nats per token, mean over the step's tokens
    double grad_norm = 0;      ///< before clipping
    double learning_rate = 0;  ///< as applied
    int layers = 0;
    int heads = 0;
    std::vector<double> max_logit;        ///< [layer, head]: largest scaled score (softcapped, if there is a cap)
    std::vector<double> qk_rms;           ///< [layer, head]: mean_i rms(q_i) times mean_j rms(k_j), before any QK norm
    std::vector<double> sigma_q;          ///< [layer]: largest singular value of W_Q, after the step; NaN where not due
    std::vector<double> sigma_k;          ///< [layer]
    std::vector<double> singular_q;       ///< [layer, 3]: the three largest of W_Q
    std::vector<double> singular_k;       ///< [layer, 3]
    std::vector<double> singular_qk;      ///< [layer, head, 3]: of W_Q W_K^T of the head
    std::vector<double> zero_sum;         ///< [layer, head]: sum over rows of sum_j ds_ij, 0 in exact arithmetic
    std::vector<double> zero_sum_abs;     ///< [layer, head]: the same of |ds_ij|
    std::vector<double> zero_sum_total;   ///< [layer, head]: zero_sum added up over the steps
    std::vector<double> saturated;        ///< [layer, head]: fraction of rows with p_max > 1 - 2^-9; NaN where not due
    std::vector<double> entropy;          ///< [layer, head]: mean over rows, nats; NaN where not due
    std::vector<std::uint8_t> qk_normed;  ///< [layer]: whether QK norm was on
    double validation_loss = 0;           ///< nats per token, no hooks, same plan and switches; NaN where not due
    /// Numbers of hooks for the record, in a fixed order and with fixed names over the run.
    struct Extra {
        std::string name;            ///< "injected_rms"
        std::vector<double> values;  ///< one, or one per layer, or [layer, head]
        std::string about = {};      ///< what it is, in words, for the file; the name where empty
        std::string unit = "1";
    };
    std::vector<Extra> extras;
    /// Not empty: the spectra are NaN for now; it puts them in, in any thread, and waits until they are worked out.
    std::function<void(StepReport&)> finish = {};
};

/// What may be changed before a step.
class StepControl {
  public:
    virtual ~StepControl() = default;
    [[nodiscard]] virtual int layers() const = 0;
    [[nodiscard]] virtual int heads() const = 0;
    [[nodiscard]] virtual int head_dim() const = 0;
    /// Parameter-free QK norm from this step on: s = logit_scale[head] (q/rms q).(k/rms k). One scale per head. With
    /// qk_rms / sqrt(head_dim) of the last report the size of the logits is continuous at the switch; an empty span gives
    /// the scale of always-on norm, 1/sqrt(head_dim).
    virtual void enable_qk_norm(int layer, std::span<const double> logit_scale) = 0;
    [[nodiscard]] virtual bool qk_norm_enabled(int layer) const = 0;
    /// Moments and step count of the optimizer to zero.
    virtual void reset_optimizer() = 0;
    /// Factors on the schedule's learning rate and on the clip threshold from this step on.
    virtual void set_learning_rate_factor(double factor) = 0;
    virtual void set_clip_factor(double factor) = 0;
    /// The feed-forward's products with FP32 inputs and outputs from this step on, in a bf16 run.
    virtual void set_fp32_ffn(bool on) = 0;
    /// QK-clip from this step on: W_Q and W_K of a head are scaled down after a step where its largest logit passes tau.
    virtual void set_qk_clip(double tau) = 0;
    /// A weight as it is now; throws std::out_of_range for a name that is none.
    [[nodiscard]] virtual MatrixView<const float> weight(std::string_view name) const = 0;
};

/// What a step hook makes use of. A trainer may leave out the rest: the device's does, where it costs time.
struct StepHookUse {
    bool heads = true;    ///< of the reports what is seen inside attention (max_logit, qk_rms, …)
    bool spectra = true;  ///< the spectra, in the report of the step that they are of
    bool control = true;  ///< it may change something before a step
};

/// Called by the trainer around each step, from one thread.
class StepHook {
  public:
    virtual ~StepHook() = default;
    /// The same over a run.
    [[nodiscard]] virtual StepHookUse uses() const { return {}; }
    /// `last`: the report of the step before (after a resume too, without extras), or null at the first.
    virtual void before_step(std::int64_t step, const StepReport* last, StepControl& control) = 0;
    /// May add to report.extras. At step 0 the names that the run's record will have are taken from here.
    virtual void after_step(StepReport& report) { (void)report; }
    /// Where several ranks work on the step: what this rank's part of it left behind (what was seen by sequence, say), and then
    /// all ranks' in their order, before after_step; what join() leaves is to be what a single rank would have. The default is
    /// for hooks that are called for nothing but whole steps.
    [[nodiscard]] virtual std::string part() const { return {}; }
    virtual void join(std::span<const std::string> parts) { (void)parts; }
    /// State for a checkpoint, and back. The default is for hooks without state.
    [[nodiscard]] virtual std::string save() const { return {}; }
    virtual void load(std::string_view state) { (void)state; }
};

/// The hooks of a run; all may be null. They outlive it.
struct Hooks {
    AttentionHook* attention = nullptr;
    ModelHook* model = nullptr;
    UpdateHook* update = nullptr;
    StepHook* step = nullptr;
};

}  // namespace faultline::gpt
