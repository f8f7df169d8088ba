// SPDX-License-Identifier: Apache-2.0
// Which attention kernel a run on the device has: the trainer's own on CUDA cores; plans that the tensor cores' kernels run, of
// each layer its own; or, where one of the plans is none of these, all of them emulated.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <faultline/gpt/trainer.hpp>
#include <faultline/gpt_device/attention.hpp>
#include <faultline/gpt_device/emulated_attention.hpp>
#include <faultline/tensor_kernel/altering.hpp>

namespace faultline::gpt {

class AttentionOnDevice {
  public:
    /// RequestError, one sentence, where the configuration asks for what no kernel has. may_norm: QK norm is on, or may
    /// be switched on.
    AttentionOnDevice(const TrainConfig& config, bool may_norm);
    ~AttentionOnDevice();
    AttentionOnDevice(const AttentionOnDevice&) = delete;
    AttentionOnDevice& operator=(const AttentionOnDevice&) = delete;

    /// "fast, on CUDA cores", "plan NAME, on tensor cores", "plan NAME, emulated (why)".
    [[nodiscard]] std::string text() const;
    [[nodiscard]] bool on_tensor_cores() const { return !kernels_.empty(); }
    /// Not null: attention is emulated, with operands and results on the host; such passes wait, and cannot be recorded.
    [[nodiscard]] EmulatedAttention* emulated() const { return emulated_.get(); }
    /// Of each head: those that QK norm was switched on with, or where there are none 1/sqrt(head_dim).
    [[nodiscard]] std::vector<double> scales(const std::vector<double>& switched) const;
    /// Device memory that the backward needs.
    [[nodiscard]] std::size_t scratch_bytes() const;

    [[nodiscard]] const on_device::AttentionShape& shape() const { return shape_; }
    /// How many parts a head of a sequence has of what the kernels see. The rms of q and k are fast's own parts where
    /// `rms_by_kernel`, else those of qk_rows.
    [[nodiscard]] on_device::PartCounts parts() const;
    [[nodiscard]] bool rms_by_kernel() const { return rms_by_kernel_; }
    /// What a sum of ds as the layer's kernel has it is to be divided by to be in nat/logit, for a head of this scale.
    [[nodiscard]] double zero_sum_unit(int layer, double scale) const;

    /// o and dout [tokens, width], dqkv [tokens, gradient_row()]; lse [batch, heads, length], or [heads, batch, length] with
    /// `scales`, as are the parts then. scales: empty, or the scale of each head, for which the tensor cores' kernel is launched
    /// head by head (fast takes inputs.scales). faults: null, or those inside the kernel. sampled: they are scalings, recorded of the
    /// first sequence alone. Launches on the stream. Only where on_tensor_cores(), in a build with the device.
    using Inputs = on_device::AttentionInputs<on_device::Bf16>;
    void forward(int layer, const Inputs& inputs, const std::vector<double>& scales, on_device::Bf16* o, float* lse,
                 const on_device::HeadParts& seen, const tensor_kernel::Alterations* faults, bool sampled,
                 on_device::Stream stream) const;
    /// What rows of a layer are like, HeadParts::rows, from inputs and lse of its forward: a launch of its own. Only where
    /// on_tensor_cores(); fast's forward has it.
    void look_at_rows(const Inputs& inputs, const std::vector<double>& scales, const float* lse, double* rows,
                      on_device::Stream stream) const;
    void backward(int layer, const Inputs& inputs, const std::vector<double>& scales, const on_device::Bf16* o,
                  const float* lse, const on_device::Bf16* dout, on_device::Bf16* dqkv, void* scratch,
                  bool deterministic, const on_device::HeadParts& seen, const tensor_kernel::Alterations* faults,
                  bool sampled, on_device::Stream stream) const;

  private:
    struct Tensor;
    /// Why the tensor cores do not run the plan in this model; empty: they do, and it is in kernels_.
    std::string add_tensor(const RoundingPlan& plan, const ModelConfig& model);
    [[nodiscard]] const Tensor& kernel_of(int layer) const;
    on_device::AttentionShape shape_;
    bool rms_by_kernel_ = false;
    std::vector<Tensor> kernels_;  ///< of the plans that are there
    std::unique_ptr<EmulatedAttention> emulated_;
    std::string plans_;                     ///< of what is emulated: which, and why
    std::vector<std::vector<int>> layers_;  ///< of each, in ascending order
    std::vector<std::size_t> of_layer_;     ///< which of them
};

}  // namespace faultline::gpt
