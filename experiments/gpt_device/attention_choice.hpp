// SPDX-License-Identifier: Apache-2.0
// Which attention kernel a run on the device has: the trainer's own on CUDA cores, or a plan that the tensor cores' kernel runs.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <faultline/gpt/trainer.hpp>
#include <faultline/gpt_device/kernels.hpp>

namespace faultline::gpt {

class AttentionOnDevice {
  public:
    /// RequestError, one sentence, where the configuration asks for what neither kernel has.
    explicit AttentionOnDevice(const TrainConfig& config);
    ~AttentionOnDevice();
    AttentionOnDevice(const AttentionOnDevice&) = delete;
    AttentionOnDevice& operator=(const AttentionOnDevice&) = delete;

    /// "fast, on CUDA cores", "plan NAME, on tensor cores".
    [[nodiscard]] std::string text() const;
    [[nodiscard]] bool on_tensor_cores() const { return tensor_ != nullptr; }
    /// Device memory that the backward needs.
    [[nodiscard]] std::size_t scratch_bytes() const;

    /// qkv and dqkv [tokens, 3 width] bf16, o and dout [tokens, width] bf16, lse [batch, heads, length]; launches on the
    /// stream. Only where on_tensor_cores(), in a build with the device.
    void forward(const on_device::Bf16* qkv, on_device::Bf16* o, float* lse, on_device::Stream stream) const;
    void backward(const on_device::Bf16* qkv, const on_device::Bf16* o, const float* lse, const on_device::Bf16* dout,
                  on_device::Bf16* dqkv, void* scratch, bool deterministic, on_device::Stream stream) const;

  private:
    struct Tensor;
    on_device::AttentionShape shape_;
    std::unique_ptr<Tensor> tensor_;
};

}  // namespace faultline::gpt
