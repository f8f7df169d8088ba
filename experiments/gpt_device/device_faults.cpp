// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/device_faults.hpp>

#include <algorithm>

#include <faultline/gpt_device/fault_sets.hpp>
#include <faultline/gpt_device/fault_sites.hpp>
#include <faultline/injectors/apply.hpp>

namespace faultline::gpt {

using on_device::Bf16;
using on_device::HeadFault;
using on_device::KernelFaults;
using on_device::RecordRange;

void DeviceFaults::bind(char* memory, const on_device::StepScalars* scalars, on_device::Stream stream) {
    scalars_ = scalars;
    stream_ = stream;
    if (!any()) return;
    memory_ = memory;
    const auto take = [&](std::size_t bytes) {
        char* at = memory;
        memory += (bytes + 255) / 256 * 256;
        return at;
    };
    auto* table = reinterpret_cast<HeadFault*>(take(table_ * sizeof(HeadFault)));
    device_ranges_ =
        reinterpret_cast<RecordRange*>(take((ranges_.size() + update_ranges_.size()) * sizeof(RecordRange)));
    device_records_ = reinterpret_cast<Realised*>(take(records_ * sizeof(Realised)));
    totals_ = reinterpret_cast<Realised*>(take(totals_bytes()));
    rows_ = take(rows_bytes());
    device_names_ = reinterpret_cast<std::uint64_t*>(take(names_ * sizeof(std::uint64_t)));
    auto* draws = reinterpret_cast<on_device::TileDraw*>(memory);
    staged_ = std::make_unique<on_device::PinnedMemory>(table_ * sizeof(HeadFault) *
                                                        static_cast<std::size_t>(config_.accumulate));
    std::vector<RecordRange> all = ranges_;
    all.insert(all.end(), update_ranges_.begin(), update_ranges_.end());
    on_device::upload(device_ranges_, all.data(), all.size() * sizeof(RecordRange), stream_);
    on_device::clear(totals_, totals_bytes(), stream_);
    on_device::clear(device_records_, records_ * sizeof(Realised), stream_);
    on_device::wait(stream_);
    for (Planted& planted : planted_) planted.heads = table + planted.first;
    // The faults inside kernels, sorted by where a kernel comes by; of one site, as they were given.
    for (KernelFaults& of : forward_) of.count = 0;
    for (KernelFaults& of : backward_) of.count = 0;
    static_assert(sizeof(tensor_kernel::AlteredSums) == sizeof(Realised));  // and the same numbers in the same order
    for (const InsideSite& at : inside_sites) {
        if (plan_ == nullptr && !at.in_kernel) continue;
        for (const Planted& planted : planted_) {
            const Site* site = std::get_if<Site>(&planted.fault.site);
            if (site == nullptr || *site != at.site) continue;
            for (const auto& [where, first] : planted.records) {
                const int layer = std::get<0>(where);
                if (plan_ != nullptr) {
                    tensor_kernel::Alterations& in_registers =
                        (at.backward ? altered_backward_ : altered_forward_)[static_cast<std::size_t>(layer)];
                    (at.backward ? sampled_backward_ : sampled_forward_)[static_cast<std::size_t>(layer)] =
                        planted.fault.sampled;
                    in_registers.at[in_registers.count++] = {
                        at.in_registers, planted.heads + layer * config_.model.heads,
                        reinterpret_cast<tensor_kernel::AlteredSums*>(device_records_ + first)};
                    continue;
                }
                KernelFaults& of = (at.backward ? backward_ : forward_)[static_cast<std::size_t>(layer)];
                of.one[of.count++] = {*at.in_kernel, planted.of_rms, planted.heads + layer * config_.model.heads,
                                      device_records_ + first, draws};
            }
            draws += planted.draws;
        }
    }
}

void DeviceFaults::prepare(std::int64_t step, int micro_step, bool stopped) {
    if (!any()) return;
    const ModelConfig& m = config_.model;
    auto* staged = reinterpret_cast<HeadFault*>(staged_->data()) + static_cast<std::size_t>(micro_step) * table_;
    const auto entry = [&](const Planted& planted, int layer, int head, int batch, bool touched) {
        FaultPlace place;
        place.step = step;
        place.layer = layer;
        place.head = head;
        place.batch = batch;
        HeadFault out;
        out.change = alteration_of(planted.fault, place, planted.format);
        out.touched = touched && !stopped && planted.fault.active(step, layer) ? 1 : 0;
        // An update is of the whole step.
        out.micro_step =
            planted.fault.site == std::variant<Site, ModelSite>(ModelSite::optimizer_update) ? 0 : micro_step;
        return out;
    };
    for (const Planted& planted : planted_) {
        HeadFault* to = staged + planted.first;
        if (std::holds_alternative<Site>(planted.fault.site)) {
            for (int layer = 0; layer < m.layers; ++layer)
                for (int head = 0; head < m.heads; ++head)
                    *to++ =
                        entry(planted, layer, head, micro_step * sequences_at_most, planted.fault.touches_head(head));
            continue;
        }
        for (int layer = -1; layer <= m.layers; ++layer) {
            *to++ = entry(planted, layer, 0, 0, true);
            for (int head = 0; head < m.heads; ++head)
                *to++ = entry(planted, layer, head, 0, planted.fault.touches_head(head));
        }
    }
    on_device::upload(memory_, staged, table_ * sizeof(HeadFault), stream_);
}

void DeviceFaults::name_tiles() const {
    for (const Planted& planted : planted_)
        if (planted.names_of_layer > 0)
            on_device::name_tiles(
                attention_set(config_, plan_, std::get<Site>(planted.fault.site), static_cast<Bf16*>(nullptr), false),
                planted.heads, config_.model.layers, device_names_ + planted.names, stream_);
}

bool DeviceFaults::stands_at(ModelSite site, int layer) const {
    return std::ranges::any_of(planted_, [&](const Planted& p) {
        return p.fault.site == std::variant<Site, ModelSite>(site) &&
               (p.fault.layers.empty() || std::ranges::find(p.fault.layers, layer) != p.fault.layers.end());
    });
}

template <class E>
void DeviceFaults::at(ModelSite site, int layer, int part, E* values, int first_row, int rows, int cols) const {
    for (const Planted& planted : planted_) {
        if (planted.fault.site != std::variant<Site, ModelSite>(site)) continue;
        const HeadFault* heads = planted.heads + (layer + 1) * (config_.model.heads + 1);
        for_model_sets(
            config_, planted.fault, layer, part, values, first_row, rows, cols, [&](const auto& set, int column) {
                const auto records = planted.records.find({layer, part, column});
                if (records == planted.records.end()) return;
                const auto before = static_cast<std::size_t>(first_row / rows * set.tiles() * on_device::parts_of(set));
                on_device::alter(set, heads, planted.law, nullptr, rows_, device_records_ + records->second + before,
                                 stream_);
            });
    }
}

void DeviceFaults::at_update(float* update) const {
    for (const Planted& planted : planted_)
        for (std::size_t p = 0; p < layout_.all().size(); ++p) {
            const Parameter& parameter = layout_.all()[p];
            const auto records = planted.records.find({parameter.layer, static_cast<int>(p), 0});
            if (planted.fault.site != std::variant<Site, ModelSite>(ModelSite::optimizer_update) ||
                records == planted.records.end())
                continue;
            on_device::alter(update_set(config_, planted.fault, parameter, update),
                             planted.heads + (parameter.layer + 1) * (config_.model.heads + 1), planted.law, nullptr,
                             rows_, device_records_ + records->second, stream_);
        }
}

template <class E>
void DeviceFaults::at(Site site, int layer, E* values, bool by_head) const {
    for (const Planted& planted : planted_) {
        const auto records = planted.records.find({layer, 0, 0});
        if (planted.fault.site != std::variant<Site, ModelSite>(site) || records == planted.records.end()) continue;
        on_device::alter(attention_set(config_, plan_, site, values, by_head),
                         planted.heads + layer * config_.model.heads, planted.law,
                         device_names_ + planted.names + static_cast<std::size_t>(layer) * planted.names_of_layer,
                         rows_, device_records_ + records->second, stream_);
    }
}

void DeviceFaults::join_records() const {
    if (!any()) return;
    on_device::join_records(device_records_, device_ranges_, static_cast<int>(ranges_.size()), config_.model.layers,
                            config_.model.heads, scalars_, totals_, stream_);
}

void DeviceFaults::join_update_records() const {
    if (update_ranges_.empty()) return;
    on_device::join_records(device_records_, device_ranges_ + ranges_.size(), static_cast<int>(update_ranges_.size()),
                            config_.model.layers, config_.model.heads, nullptr,
                            totals_ + config_.model.layers * config_.model.heads, stream_);
}

template void DeviceFaults::at(ModelSite, int, int, float*, int, int, int) const;
template void DeviceFaults::at(ModelSite, int, int, Bf16*, int, int, int) const;
template void DeviceFaults::at(Site, int, float*, bool) const;
template void DeviceFaults::at(Site, int, Bf16*, bool) const;

}  // namespace faultline::gpt
