// SPDX-License-Identifier: Apache-2.0
// What a run on the device consists of, and the parts of a step. Private to this folder: device_trainer.cpp is what others see.
// Set up in device_state.cpp; a step in device_step.cpp, its update in device_update.cpp, a projection of it in
// device_projection.cpp, its report in device_report.cpp; what a step hook may do in step_control.cpp; where a value is not finite
// in non_finite.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <faultline/gpt_device/checkpoint.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>
#include <faultline/gpt_device/device_faults.hpp>
#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/gpt_device/exchange.hpp>
#include <faultline/gpt_device/late_spectra.hpp>
#include <faultline/gpt_device/pass.hpp>
#include <faultline/gpt_device/projection.hpp>

namespace faultline::gpt {

/// The configuration, where the device runs it; RequestError where not.
const TrainConfig& checked_for_device(const TrainConfig& config);
/// Kind of each octet of the flat weights.
[[nodiscard]] std::vector<std::uint8_t> kinds_of(const ParameterLayout& layout);
/// Those of a run's faults that DeviceFaults plants: where attention is emulated, none at its sites. RequestError where it has not
/// what one of them asks for.
[[nodiscard]] std::vector<Fault> on_the_card(const AttentionOnDevice& attention, std::vector<Fault> faults);

struct DeviceTrainer::State {
    TrainConfig config;
    const TokenData& data;
    const WindowOrder& windows;
    ParameterLayout layout;
    StepHookUse hook_uses;
    bool monitors,
        may_norm;  ///< a hook's control may switch QK-clip on, which has its totals from the monitors, and QK norm
    AttentionOnDevice attention;
    PlantedFaults* planted;
    DeviceFaults faults;
    PlantedProjection* projecting;
    std::optional<on_device::ProjectionMemory> projected;  ///< where its parts are
    bool update_apart;                                     ///< it stands in memory before it is added
    on_device::Device device;
    Exchange exchange;
    RunMemory memory;
    InputLayout input;
    on_device::OwnedStream stream;
    /// Inputs of this step and of the next, for each micro-batch; and where the step's result comes.
    std::array<on_device::PinnedMemory, 2> staged;
    std::array<std::int64_t, 2> staged_step{-1, -1};
    on_device::PinnedMemory result, injected, removed;  ///< the result with the totals behind it
    std::optional<on_device::Memory> base;
    std::unique_ptr<Pass> pass;
    /// A micro-batch, and the last one of a step, which adds up over ranks; of each also one in which the rows are looked at.
    struct Recorded {
        on_device::Graph plain, detailed;
    };
    Recorded micro_batch, last_micro_batch;
    on_device::Graph update, application;
    /// What an update hook sees, flat; of it W_Q, W_K and W_V alone are filled.
    std::vector<float> shown_weights, shown_update;
    Hooks hooks;
    std::unique_ptr<LateSpectra> late_spectra;
    std::function<void(StepReport&)> pending_spectra;
    double waited_for_spectra = 0;  ///< seconds, of steps whose hook has to see them
    DeviceSwitches switches;
    std::function<bool(std::int64_t)> capture_wanted;
    std::function<void(std::int64_t, int, const Training::Captured&)> capture_take;
    std::int64_t next = 0;
    StepReport report;
    std::optional<NonFinite> failure;
    State(const TrainConfig& wanted, const TokenData& tokens, const WindowOrder& order, const DeviceOptions& options,
          const Hooks& hooked);

    /// On all ranks; SharedFailure.
    void set_up(const DeviceOptions& options);
    /// Memory, pass and inputs for once through everything, so that kernels are loaded and products chosen before graphs are made
    /// of them; what that does to the weights is undone by start().
    void prepare(bool deterministic);
    [[nodiscard]] std::size_t muon_scratch() const;
    /// Of the second moments.
    [[nodiscard]] std::size_t seconds() const { return config.optimizer.kind == OptimizerKind::sgd ? 0 : count(); }
    void record_graphs();
    /// In every step.
    [[nodiscard]] Pass::Watch watched() const { return monitors ? Pass::Watch::every_step : Pass::Watch::nothing; }
    [[nodiscard]] Pass::Watch most_watched() const {
        if (!monitors) return Pass::Watch::nothing;
        return config.monitor_every > 0 ? Pass::Watch::rows : Pass::Watch::every_step;
    }
    [[nodiscard]] bool rows_are_due() const {
        return most_watched() == Pass::Watch::rows && next % config.monitor_every == 0;
    }

    /// Of all layers.
    [[nodiscard]] std::size_t heads() const {
        return static_cast<std::size_t>(config.model.layers * config.model.heads);
    }
    [[nodiscard]] std::size_t count() const { return static_cast<std::size_t>(layout.size()); }

    /// Initial weights, moments of zero.
    void start();
    void clear_moments();
    void set_weights(std::span<const float> weights);
    [[nodiscard]] std::vector<float> host(std::size_t region) const;
    [[nodiscard]] bool rounds() const { return config.model.bf16; }
    /// Where rounding of a weight's gradient is left to those who read it: with one micro-batch.
    [[nodiscard]] bool rounds_late() const { return rounds() && config.accumulate == 1; }

    /// The micro-batch's gradient joins the step's, where that is another.
    void accumulate(const GradientRange& of);
    void run_micro_batch(Pass::Watch watch, bool last);
    /// Of the ranks' gradients, where they come as parts, the sum; its norm, and what the step leaves.
    void finish_gradient(on_device::StepResult* left);
    void run_update();
    [[nodiscard]] on_device::Bf16* operands() const {
        return rounds() ? pass->at<on_device::Bf16>(memory.operands) : nullptr;
    }
    /// From the optimizer's proposal, where it stands apart, to the next weights.
    void finish_update();
    /// W_Q and W_K of the proposal through the hook, and all of it onto the weights.
    void show_update();
    /// Null where there is none; RequestError where the kernel has it not.
    [[nodiscard]] std::optional<on_device::ProjectionMemory> memory_of_projection() const;
    [[nodiscard]] char* projection_part(std::size_t offset) const { return pass->at<char>(memory.projection) + offset; }
    /// The directions that the projection goes on from, to the device and back.
    void take_directions();
    void leave_directions() const;
    /// W_Q and W_K of the proposal, in memory; then what was removed, which fetch_energies() brought.
    void project();
    void fetch_energies();
    void report_energies() const;
    [[nodiscard]] on_device::StepScalars scalars_of(std::int64_t step, int micro_step) const;
    [[nodiscard]] double rate_of(std::int64_t step) const {
        return learning_rate(config.schedule, step, config.steps) * switches.rate_factor;
    }
    /// Tokens, targets, and the tokens' places sorted by id (a counting sort: ascending within an id).
    void write_input(const Windows& of, char* to) const;
    void stage(std::int64_t step);
    /// The step's scalars are of now: a hook may have changed them since the tokens were staged.
    void copy_input(std::int64_t step, int micro_step);
    class Control;
    const StepReport& step();
    const StepReport& run_step();
    void plant(int round) {
        const int micro_step = exchange.micro_batch(round);
        faults.prepare(next, micro_step, planted != nullptr && planted->stopped());
        if (attention.emulated() != nullptr)
            attention.emulated()->begin(next, micro_step,
                                        planted != nullptr ? planted->in_emulated_attention() : nullptr);
    }
    /// What the faults of the step did, of all ranks, to who planted them.
    void report_faults() const;
    /// Waits for it.
    [[nodiscard]] bool step_is_finite() const;
    /// A micro-batch launched one by one, with its operands kept: the same kernels, and bits, as the recorded one.
    void capture(int round);
    void fill_report(const on_device::StepResult& of);
    [[nodiscard]] bool spectra_are_due() const {
        return late_spectra && (next % config.monitor_every == 0 || next + 1 == config.steps);
    }
    void finish_report() {
        if (report.finish) std::exchange(report.finish, nullptr)(report);
    }
    /// Of W_Q and W_K as the update leaves them.
    void begin_spectra();
    /// Weights from one layer to the next.
    [[nodiscard]] std::ptrdiff_t layer_step() const {
        return config.model.layers > 1 ? layout.layer(1).w_in - layout.layer(0).w_in : 0;
    }

    /// As Trainer::fill_report.
    void fill_monitors();
    double validation_loss();

    /// The pass is a function of its inputs: going through it again finds the value that went first; of several ranks', that of the
    /// earliest micro-batch.
    void find_non_finite();
    void find_non_finite_gradient();
};

}  // namespace faultline::gpt
