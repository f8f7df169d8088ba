// SPDX-License-Identifier: Apache-2.0
// Trainer on a CUDA device: the same model, data order, optimizer, casts and monitors. What it does not have it refuses in a
// sentence: refusal() says what.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <faultline/gpt/planted_faults.hpp>
#include <faultline/gpt/planted_projection.hpp>
#include <faultline/gpt/training.hpp>

namespace faultline::gpt {

/// How gradients are added up over ranks: copied from card to card and added in the order of ranks, which moves (R - 1) n values
/// to each of R ranks; or by NCCL, in an order of its own, which moves 2 (R - 1)/R n: in fp32, or rounded to bf16 and in it,
/// half the bytes and another gradient.
/// `automatic`: gathered by two ranks whose cards reach each other, and by ranks that share one, else by NCCL in fp32; of two ranks
/// that is the same sum.
enum class Reduce : unsigned char { automatic, gather, nccl, nccl_bf16 };
struct ExchangeOptions {
    bool overlapped = true;  ///< layer by layer during the backward; else all at its end
    Reduce reduce = Reduce::automatic;
    /// Several ranks may have one card, where they take turns: to try what is meant for more cards. NCCL refuses it, so they gather.
    bool share_card = false;
};

struct DeviceOptions {
    /// The same machine gives the same bits each time: products by cuBLASLt's first choice instead of the fastest of its
    /// candidates, dQ of the tensor cores' kernel summed in order.
    bool deterministic = true;
    /// The processes that share the run, a card each; null: one. They outlive the trainer, and all of them make one and call step()
    /// and validation_loss() at the same time. accumulate is to be a multiple of their number (exchange.hpp says who takes what and
    /// how sums are made).
    Ranks* ranks = nullptr;
    ExchangeOptions exchange = {};
    /// Whether its reports have what is seen inside attention (max_logit, qk_rms, zero_sum, …); QK-clip has it seen anyway.
    bool monitors = true;
    /// Faults that the device plants; null: none.
    PlantedFaults* faults = nullptr;
    /// A projection that the device makes, after the faults of the update; null: none. RequestError where has_projection()
    /// says no.
    PlantedProjection* projection = nullptr;
};

class DeviceTrainer final : public Training {
  public:
    /// `data`, `windows` and the hooks must outlive it. RequestError where configuration or data are no good, or the device
    /// has no such thing; WorkError where there is no device, no room on it, or it fails, also in every other function.
    /// Of the hooks it has the update's, which is shown W_Q and W_K of each layer and no other parameter, in the host's memory
    /// (two copies and a wait a step), and the step's; its control refuses set_fp32_ffn (RequestError), with the step hook's QK norm the run
    /// has room for that.
    DeviceTrainer(const TrainConfig& config, const TokenData& data, const WindowOrder& windows,
                  const DeviceOptions& options = {}, const Hooks& hooks = {});
    ~DeviceTrainer() override;
    DeviceTrainer(const DeviceTrainer&) = delete;
    DeviceTrainer& operator=(const DeviceTrainer&) = delete;

    /// Which device, which attention kernel, what the memory is for: a line each.
    [[nodiscard]] std::vector<std::string> description() const;
    /// Name of the card.
    [[nodiscard]] std::string device_name() const;

    [[nodiscard]] const TrainConfig& config() const override;
    [[nodiscard]] std::ptrdiff_t parameters() const override;
    [[nodiscard]] std::string reductions() const override;
    [[nodiscard]] std::int64_t next_step() const override;
    [[nodiscard]] bool finished() const override;
    const StepReport& step() override;
    [[nodiscard]] const std::optional<NonFinite>& failure() const override;
    [[nodiscard]] const StepReport& report() const override;
    [[nodiscard]] bool runs_elsewhere() const override { return true; }
    bool let_go() noexcept override;
    [[nodiscard]] std::optional<SpectraTimes> spectra_times() const override;
    /// A step that is captured takes longer: the operands come to the host layer by layer.
    void capture(std::function<bool(std::int64_t)> wanted,
                 std::function<void(std::int64_t, int micro_step, const Captured&)> take) override;
    void save(const std::string& path) const override;
    void restore(const std::string& path) override;

    [[nodiscard]] double validation_loss();
    /// The flat weights, as ParameterLayout has them.
    [[nodiscard]] std::vector<float> weights() const;
    void set_weights(std::span<const float> weights);
    /// Of the last step, before the clip.
    [[nodiscard]] std::vector<float> gradient() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

/// Whether this build has it.
[[nodiscard]] bool device_trainer_is_built();

/// Whether the device makes this projection itself in a model of this width; in a build without device code, false.
[[nodiscard]] bool device_projects(const Projection& wanted, int width);

/// RequestError, one sentence, where the device does not run this configuration with these faults: what the constructor would
/// refuse, before there is a device. WorkError in a build without.
void check_for_device(const TrainConfig& config, const std::vector<Fault>& faults);

/// The configuration with what else a run on the device depends on, and does not go on without (TrainConfig::also): back end,
/// whether sums have an order, the number of ranks and in what they add up, which decide an element's order of additions.
[[nodiscard]] TrainConfig on_the_device(TrainConfig config, const DeviceOptions& options);

/// Micro-batches of a step that each of the ranks goes through; RequestError where they do not divide config.accumulate.
[[nodiscard]] int micro_batches_of_a_rank(int ranks, const TrainConfig& config);

/// Why the device does not run this configuration, one sentence; empty: it does.
[[nodiscard]] std::string refusal(const TrainConfig& config);

}  // namespace faultline::gpt
