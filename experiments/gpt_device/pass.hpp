// SPDX-License-Identifier: Apache-2.0
// Forward and backward of a micro-batch on the device, in the order of chunk.cpp and chunk_backward.cpp of experiments/gpt, a
// whole micro-batch at once. Private to this folder.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <faultline/gpt_device/attention_choice.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>
#include <faultline/gpt_device/device_faults.hpp>
#include <faultline/gpt_device/memory_plan.hpp>
#include <faultline/gpt_device/monitors.hpp>
#include <faultline/gpt_device/products.hpp>

namespace faultline::gpt {

/// Names of where a value that is not finite can first come up, in the order of a pass, with what is left of them after it.
struct SiteOfPass {
    std::string name;
    std::size_t region;  ///< of the plan
    std::ptrdiff_t columns;
    bool is_operand;  ///< of element type; else fp32
    std::size_t count;
};

class Pass {
  public:
    /// `base`: device memory of memory.plan.bytes().
    Pass(const TrainConfig& config, const ParameterLayout& layout, const RunMemory& memory,
         const AttentionOnDevice& how, const DeviceFaults& faults, char* base, on_device::Stream stream,
         bool deterministic)
        : config_(config),
          layout_(layout),
          memory_(memory),
          how_(how),
          faults_(faults),
          base_(base),
          stream_(stream),
          input_(config),
          products_(stream, base + memory.plan[memory.products].offset, memory.plan[memory.products].bytes,
                    deterministic),
          beside_(on_device::Priority::low),
          deterministic_(deterministic),
          switched_(static_cast<std::size_t>(config.model.layers)) {
        if (const MemoryRegion& room = memory.plan[memory.products_beside]; room.bytes > 0)
            products_beside_.emplace(beside_.stream(), base + room.offset, room.bytes, deterministic);
    }
    virtual ~Pass() = default;
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

    /// What is watched on the way: nothing, what every step shows, or that with what rows are like (entropy, saturation).
    enum class Watch : unsigned char { nothing, every_step, rows };
    /// Gradient of the mean loss into memory.micro_gradient (assigned), the sum of the losses into loss_sum() (added to), what
    /// is watched into memory.totals (likewise).
    virtual void forward_backward(Watch watch) = 0;
    /// Called, where it is set, when the backward has left a layer: the layer's gradient is whole.
    std::function<void(int layer)> layer_done;
    /// What attention works on in a layer, of all tokens: as Gpt::Operands. Waits.
    using Operands = Gpt<float>::Operands;
    /// Not null: the next passes leave their operands there, [layers], as attention's backward meets them. Such a pass waits
    /// for each layer, and cannot be recorded.
    void keep_operands(std::vector<Operands>* layers) { kept_ = layers; }
    /// The sum of the losses into loss_sum(), assigned.
    virtual void loss() = 0;
    /// fp32 weights to operands, where these are other memory.
    virtual void round_weights() = 0;
    /// Index of the first value of the site's that is not finite, or -1. Waits.
    virtual std::ptrdiff_t first_non_finite(const SiteOfPass& site) = 0;
    [[nodiscard]] std::vector<SiteOfPass> sites() const;

    /// Parameter-free QK norm in this layer from now on, s = scale[head] q^.k^; only where the memory has room for it. Launches
    /// that were recorded before do not know of it.
    void switch_qk_norm(int layer, const std::vector<double>& scale);
    /// The scales of a layer that was switched; empty where it was not.
    [[nodiscard]] const std::vector<double>& switched_scales(int layer) const {
        return switched_[static_cast<std::size_t>(layer)];
    }
    [[nodiscard]] bool qk_normed(int layer) const {
        return config_.model.qk_norm != QkNorm::none || !switched_scales(layer).empty();
    }

    [[nodiscard]] on_device::Products& products() { return products_; }
    template <class T>
    [[nodiscard]] T* at(std::size_t region) const {
        return reinterpret_cast<T*>(base_ + memory_.plan[region].offset);
    }
    [[nodiscard]] double* loss_sum() const { return at<double>(memory_.sums) + 4096; }
    [[nodiscard]] const on_device::StepScalars* scalars() const {
        return reinterpret_cast<const on_device::StepScalars*>(at<char>(memory_.input) + input_.scalars);
    }

  protected:
    [[nodiscard]] const std::int32_t* ids(std::size_t offset) const {
        return reinterpret_cast<const std::int32_t*>(at<char>(memory_.input) + offset);
    }
    const TrainConfig& config_;
    const ParameterLayout& layout_;
    const RunMemory& memory_;
    const AttentionOnDevice& how_;
    const DeviceFaults& faults_;
    bool faulty_ = false;  ///< whether faults act in the launches that are made
    bool hooked_ = false;  ///< and whether instruments do in attention that is emulated
    char* base_;
    on_device::Stream stream_;
    InputLayout input_;
    on_device::Products products_;
    /// Beside the backward is made what it has no use for: it fills what the backward leaves of the card.
    on_device::SideStream beside_;
    std::optional<on_device::Products> products_beside_;  ///< of small runs: the weights' gradients
    bool deterministic_;
    std::vector<std::vector<double>> switched_;  ///< scales of each layer, empty: not switched
    Watch watch_ = Watch::nothing;
    std::vector<Operands>* kept_ = nullptr;
};

/// In fp32 or bf16, as the configuration says.
[[nodiscard]] std::unique_ptr<Pass> make_pass(const TrainConfig& config, const ParameterLayout& layout,
                                              const RunMemory& memory, const AttentionOnDevice& how,
                                              const DeviceFaults& faults, char* base, on_device::Stream stream,
                                              bool deterministic);

}  // namespace faultline::gpt
