// SPDX-License-Identifier: Apache-2.0
// What a run on the device keeps in its memory: known before the first byte is asked for, so that a run which does not fit is
// refused at once, and one that does never asks again.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <faultline/gpt/trainer.hpp>
#include <faultline/gpt_device/attention.hpp>
#include <faultline/gpt_device/kernels.hpp>

namespace faultline::gpt {

struct MemoryRegion {
    std::string name;
    std::size_t offset = 0, bytes = 0;  ///< offset is a multiple of 256
};

/// Regions of one allocation, in the order in which they were added, in groups for the print.
class MemoryPlan {
  public:
    /// Index of the new region.
    std::size_t add(const std::string& group, const std::string& name, std::size_t bytes);
    [[nodiscard]] const MemoryRegion& operator[](std::size_t i) const { return regions_[i]; }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    /// "10.06 GiB: weights 0.70, gradient 0.46, …"
    [[nodiscard]] std::string text() const;

  private:
    struct Group {
        std::string name;
        std::size_t bytes = 0;
    };
    std::vector<MemoryRegion> regions_;
    std::vector<Group> groups_;
    std::size_t bytes_ = 0;
};

/// Tokens whose logits exist at once: the head works through a micro-batch in pieces, because logits are its largest tensor.
[[nodiscard]] std::ptrdiff_t head_tokens(const TrainConfig& config);

/// Floats of the partial sums over tokens that a layer's backward leaves before it adds them up.
[[nodiscard]] std::size_t partial_sums(int width);

/// Bytes of an operand of a product: 2 in bf16 precision, else 4.
[[nodiscard]] std::size_t element_bytes(const TrainConfig& config);

/// Regions of a layer's activations, as indices of the plan.
struct LayerRegions {
    std::size_t x_in, x_mid, statistics1, statistics2, h1, in, o, gated, lse, h2, u,
        a;  ///< gated: o itself without a gate
};

/// What a run needs beside what every run does.
struct RunNeeds {
    std::size_t attention_scratch = 0;  ///< bytes that the attention of the run asks for
    std::size_t muon_scratch = 0;       ///< and its optimizer
    on_device::PartCounts parts;        ///< of what its heads see, where `monitors`
    bool monitors = false;
    bool may_norm = false;       ///< QK norm is on, or may be switched on
    std::size_t faults = 0;      ///< bytes that its faults ask for
    std::size_t projection = 0;  ///< and its projection
    bool update_apart = false;   ///< what is added to the weights stands in memory first
    bool one_gradient = false;  ///< that of a micro-batch is the step's, also where accumulate > 1: ranks have one each
};

/// The plan of a run of this configuration, and where its parts are.
struct RunMemory {
    RunMemory(const TrainConfig& config, const ParameterLayout& layout, const RunNeeds& needs);
    MemoryPlan plan;
    std::size_t weights, operands, first, second, gradient, micro_gradient, kinds;
    std::vector<LayerRegions> layers;
    std::size_t x_out, final_statistics, final_h, logits;
    std::size_t dx, dbranch, dh, da, din, dheads, partials, sums, losses, result, input, delta, attention, products,
        products_beside;
    std::size_t muon, faults, projection, proposed;
    std::size_t hats, scales;  ///< where QK norm may be: q and k after it [tokens, 2 width], and scales [layers, heads]
    /// Bytes from the result to the end of the totals, which follow it: one copy brings both to the host.
    [[nodiscard]] std::size_t result_bytes() const {
        return plan[totals].offset + plan[totals].bytes - plan[result].offset;
    }
    /// Where there are monitors: HeadParts of all layers, and HeadTotals [layers, heads].
    std::size_t largest, rms, zero_sums, rows, totals;
};

/// Bytes of a step's input: tokens, targets, tokens sorted by id, where each id begins, and numbers of the step.
struct InputLayout {
    explicit InputLayout(const TrainConfig& config);
    std::size_t tokens, targets, order, starts, scalars, bytes;  ///< offsets, and all of it
};

}  // namespace faultline::gpt
