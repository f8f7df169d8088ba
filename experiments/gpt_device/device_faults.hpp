// SPDX-License-Identifier: Apache-2.0
// The faults of a run on the device: where each stands, what kernels read of it, and what it did. Private to this folder.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include <faultline/gpt/training.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>
#include <faultline/gpt_device/fault_kernels.hpp>
#include <faultline/injectors/fault.hpp>
#include <faultline/tensor_kernel/altering.hpp>

namespace faultline::gpt {

class DeviceFaults {
  public:
    /// RequestError, one sentence, where a fault cannot stand in this run.
    DeviceFaults(const TrainConfig& config, const ParameterLayout& layout, const std::vector<Fault>& faults);

    [[nodiscard]] bool any() const { return !planted_.empty(); }
    /// Device memory that it asks for.
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    /// Takes that memory; launches go to the stream.
    void bind(char* memory, const on_device::StepScalars* scalars, on_device::Stream stream);
    /// What kernels read in a micro-step of the step's (all ranks' counted): copied before the launches of it. stopped: no fault
    /// acts.
    void prepare(std::int64_t step, int micro_step, bool stopped);

    /// Names what the faults of a micro-step draw from at casts in memory, of all layers at once. Launches, the first of them.
    void name_tiles() const;
    [[nodiscard]] bool stands_at(ModelSite site, int layer) const;
    /// The tokens [first_row, first_row + rows) of a micro-batch at a site of the model, rows x cols; launches.
    template <class E>
    void at(ModelSite site, int layer, int part, E* values, int first_row, int rows, int cols) const;
    [[nodiscard]] bool alters_update() const { return !update_ranges_.empty(); }
    /// Every parameter's update.
    void at_update(float* update) const;
    /// All heads of a layer: lse, delta [batch, heads, length], or [heads, batch, length] where `by_head`; o [tokens, width];
    /// dq, dk, dv in [tokens, 3 width].
    template <class E>
    void at(Site site, int layer, E* values, bool by_head) const;
    /// Faults inside the attention's kernels of a layer, the fast ones or the tensor cores'; null: none.
    [[nodiscard]] const on_device::KernelFaults* forward(int layer) const { return inside(forward_, layer); }
    [[nodiscard]] const on_device::KernelFaults* backward(int layer) const { return inside(backward_, layer); }
    [[nodiscard]] const tensor_kernel::Alterations* altered_forward(int layer) const {
        return inside(altered_forward_, layer);
    }
    [[nodiscard]] const tensor_kernel::Alterations* altered_backward(int layer) const {
        return inside(altered_backward_, layer);
    }
    /// Whether those of altered_forward(), altered_backward() are scalings (scaling.hpp) of which the first sequence alone is recorded.
    [[nodiscard]] bool samples_forward(int layer) const { return sampled_forward_[static_cast<std::size_t>(layer)]; }
    [[nodiscard]] bool samples_backward(int layer) const { return sampled_backward_[static_cast<std::size_t>(layer)]; }

    /// Adds a micro-step's records up; and apart from them those of the update, which all ranks make alike. Launch.
    void join_records() const;
    void join_update_records() const;
    /// [layer, head] row-major, of the micro-steps so far, then as many of the update, in device memory; null where there is no
    /// fault.
    [[nodiscard]] Realised* totals() const { return totals_; }
    [[nodiscard]] std::size_t totals_bytes() const;  ///< of both

  private:
    static constexpr int sequences_at_most = 1 << 12;  ///< of a micro-step, as FaultHooks numbers them
    struct Planted {
        Fault fault;
        Format format;
        bool of_rms = false;
        on_device::LawKind law;
        std::size_t first = 0;  ///< of its HeadFaults
        const on_device::HeadFault* heads = nullptr;
        std::map<std::tuple<int, int, int>, std::size_t> records;  ///< (layer, part, column): the first of its records
        std::size_t draws = 0;                                     ///< inside a kernel: its TileDraws of one layer
        std::size_t names = 0, names_of_layer = 0;  ///< the first of its streams' keys; 0 of a layer where it has none
    };
    void plant(const Fault& fault);
    void plant_in_attention(Planted& planted, Site site);
    void plant_in_model(Planted& planted, ModelSite site);
    void add_records(Planted& to, int layer, int part, int column, std::size_t per_head, int heads);
    void add_inside(const Planted& planted);
    template <class All>
    [[nodiscard]] static const All* inside(const std::vector<All>& all, int layer) {
        const All& of = all[static_cast<std::size_t>(layer)];
        return of.count > 0 ? &of : nullptr;
    }
    [[nodiscard]] std::size_t rows_bytes() const;

    const TrainConfig& config_;
    const ParameterLayout& layout_;
    const RoundingPlan* plan_;  ///< of the tensor cores' kernel; null: the fast one
    std::vector<Planted> planted_;
    std::vector<on_device::RecordRange> ranges_, update_ranges_;
    std::size_t table_ = 0, records_ = 0, names_ = 0, bytes_ = 0;  ///< HeadFaults, Realised, keys
    std::unique_ptr<on_device::PinnedMemory> staged_;
    char* memory_ = nullptr;
    on_device::RecordRange* device_ranges_ = nullptr;
    Realised *device_records_ = nullptr, *totals_ = nullptr;
    void* rows_ = nullptr;
    std::uint64_t* device_names_ = nullptr;
    const on_device::StepScalars* scalars_ = nullptr;
    on_device::Stream stream_ = nullptr;
    std::vector<on_device::KernelFaults> forward_, backward_;
    std::vector<tensor_kernel::Alterations> altered_forward_, altered_backward_;
    std::vector<bool> sampled_forward_, sampled_backward_;
};

}  // namespace faultline::gpt
