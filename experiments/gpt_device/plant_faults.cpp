// SPDX-License-Identifier: Apache-2.0
// Which faults can stand in a run on the device, where, and what memory they need: DeviceFaults before there is a device.
#include <algorithm>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/device_faults.hpp>
#include <faultline/gpt_device/fault_sets.hpp>
#include <faultline/gpt_device/fault_sites.hpp>
#include <faultline/gpt_device/memory_plan.hpp>
#include <faultline/injectors/attention_injector.hpp>
#include <faultline/injectors/model_injector.hpp>

namespace faultline::gpt {

using on_device::HeadFault;
using on_device::KernelFaults;
using on_device::RecordRange;
using on_device::TileSet;

namespace {

bool stands_in(const Fault& fault, int layer) {
    return fault.layers.empty() || std::ranges::find(fault.layers, layer) != fault.layers.end();
}

}  // namespace

DeviceFaults::DeviceFaults(const TrainConfig& config, const ParameterLayout& layout, const std::vector<Fault>& faults)
    : config_(config), layout_(layout), plan_(config.model.plan(0, 0)) {
    const auto layers = static_cast<std::size_t>(config.model.layers);
    forward_.resize(layers);
    backward_.resize(layers);
    altered_forward_.resize(layers);
    altered_backward_.resize(layers);
    sampled_forward_.resize(layers);
    sampled_backward_.resize(layers);
    if (config.batch > sequences_at_most && !faults.empty())
        throw RequestError(
            fmt::format("device cuda: batch: {}: with a fault expected at most {}", config.batch, sequences_at_most));
    for (const Fault& fault : faults) plant(fault);
    if (!any()) return;
    std::size_t draws = 0;
    for (const Planted& p : planted_) draws += p.draws;
    const auto room = [&](std::size_t bytes) {
        const std::size_t at = bytes_;
        bytes_ += (bytes + 255) / 256 * 256;
        return at;
    };
    (void)room(table_ * sizeof(HeadFault));
    (void)room((ranges_.size() + update_ranges_.size()) * sizeof(RecordRange));
    (void)room(records_ * sizeof(Realised));
    (void)room(totals_bytes());
    (void)room(rows_bytes());
    (void)room(names_ * sizeof(std::uint64_t));
    (void)room(draws * sizeof(on_device::TileDraw));
}

std::size_t DeviceFaults::totals_bytes() const {
    return 2 * static_cast<std::size_t>(config_.model.layers * config_.model.heads) * sizeof(Realised);
}

/// Squares and count of a row, and amplitudes of tiles.
std::size_t DeviceFaults::rows_bytes() const {
    std::size_t rows = static_cast<std::size_t>(config_.batch) * static_cast<std::size_t>(config_.model.context);
    for (const Parameter& p : layout_.all()) rows = std::max(rows, static_cast<std::size_t>(p.rows));
    return rows * 24 + 256;
}

void DeviceFaults::add_records(Planted& to, int layer, int part, int column, std::size_t per_head, int heads) {
    const int layers = config_.model.layers;
    to.records[{layer, part, column}] = records_;
    // What belongs to no layer stands under layer 0, as FaultHooks has it.
    const bool of_update = to.fault.site == std::variant<Site, ModelSite>(ModelSite::optimizer_update);
    (of_update ? update_ranges_ : ranges_)
        .push_back({records_, per_head, layer < 0 || layer >= layers ? 0 : layer, heads});
    records_ += per_head * static_cast<std::size_t>(heads);
}

void DeviceFaults::plant(const Fault& fault) {
    Planted planted;
    planted.fault = fault;
    planted.of_rms = law_needs_rms(fault);
    planted.first = table_;
    if (const Site* site = std::get_if<Site>(&fault.site))
        plant_in_attention(planted, *site);
    else
        plant_in_model(planted, std::get<ModelSite>(fault.site));
    planted_.push_back(std::move(planted));
}

void DeviceFaults::plant_in_attention(Planted& planted, Site site) {
    const ModelConfig& m = config_.model;
    const Fault& fault = planted.fault;
    for (int layer = 1; layer < m.layers; ++layer)
        if (m.plan(layer, 0) != plan_)
            refuse(fault,
                   "layers have different kernels: expected one in all of them, or a fault at a site of the model");
    const RoundingPlan plan = plan_ != nullptr ? *plan_ : fast_plan(m.bf16);
    (void)AttentionInjector(fault, plan, m.heads);  // says what cannot stand in the plan
    planted.format = plan[site].format;
    planted.law = on_device::kind_of(alteration_of(fault, {}, planted.format));
    if (fault.sampled && plan_ != nullptr && is_cast_in_memory(site)) {
        if (!planted.law.simple) refuse_sample_of_cast(fault);
        planted.law.sampled = true;
    }
    const InsideSite* in_kernel = inside_site(site, plan_ != nullptr);
    if (plan_ != nullptr && in_kernel != nullptr) expect_in_registers(fault, site, *plan_, m.head_dim(), m.bf16);
    if (in_kernel == nullptr && site != Site::lse && site != Site::delta && !is_cast_in_memory(site))
        refuse(fault, fmt::format("the device's kernel has no site {}: expected one of row_max, row_sum, p_cast, "
                                  "pv_accumulate, lse, o_cast, delta, bwd_p_cast, dp_accumulate, ds, ds_cast, dq_cast, "
                                  "dk_cast, dv_cast",
                                  name(site)));
    if (m.bf16 && is_cast_in_memory(site)) expect_held_in_bf16(fault, name(site));
    table_ += static_cast<std::size_t>(m.layers * m.heads);
    const int query_tiles = static_cast<int>((m.context + fast_block - 1) / fast_block);
    auto tiles = static_cast<std::size_t>(
        config_.batch * (in_kernel != nullptr
                             ? query_tiles
                             : attention_set(config_, plan_, site, static_cast<float*>(nullptr), false).tiles()));
    if (in_kernel != nullptr && plan_ != nullptr) {
        tensor_kernel::BackwardCall call;  // a query's and a key's tiles are as many
        if (fault.sampled) expect_scaling(fault, site, planted.format);
        call.batch = fault.sampled ? 1 : config_.batch;
        call.n_k = m.context;
        tiles = tensor_kernel::altered_sums(call);
    }
    for (int layer = 0; layer < m.layers; ++layer)
        if (stands_in(fault, layer)) add_records(planted, layer, 0, 0, tiles, m.heads);
    if (is_cast_in_memory(site) && m.bf16 &&
        on_device::has_names(attention_set(config_, plan_, site, static_cast<on_device::Bf16*>(nullptr), false),
                             planted.law)) {
        planted.names = names_;
        planted.names_of_layer = tiles * static_cast<std::size_t>(m.heads);
        names_ += planted.names_of_layer * static_cast<std::size_t>(m.layers);
    }
    if (in_kernel != nullptr) {
        planted.draws = tiles * static_cast<std::size_t>(m.heads);
        add_inside(planted);
    }
}

void DeviceFaults::plant_in_model(Planted& planted, ModelSite site) {
    const ModelConfig& m = config_.model;
    const Fault& fault = planted.fault;
    const auto tokens = config_.batch * m.context;
    planted.format = m.bf16 && holds_operands(site) ? bf16 : exact;
    planted.law = on_device::kind_of(alteration_of(fault, {}, planted.format));
    (void)ModelInjector(fault, m.heads, planted.format);
    if (m.bf16 && holds_operands(site)) expect_held_in_bf16(fault, name(site));
    table_ += static_cast<std::size_t>((m.layers + 2) * (m.heads + 1));
    const auto plan_records = [&](int layer, int part, int first_row, int rows, int cols) {
        if (!stands_in(fault, layer)) return;
        if (fault.column >= cols)
            throw RequestError(fmt::format("fault \"{}\": column {}: expected less than the {} columns of {}",
                                           to_string(fault), fault.column, cols, name(site)));
        for_model_sets(config_, fault, layer, part, static_cast<float*>(nullptr), first_row, rows, cols,
                       [&](const auto& set, int column) {
                           // Parts of a tile are a matter of shape alone, so floats stand for any type.
                           add_records(planted, layer, part, column,
                                       static_cast<std::size_t>(tokens / rows) * static_cast<std::size_t>(set.tiles()) *
                                           static_cast<std::size_t>(on_device::parts_of(set)),
                                       1);
                       });
    };
    switch (site) {
        case ModelSite::optimizer_update:
            for (std::size_t p = 0; p < layout_.all().size(); ++p) {
                const Parameter& parameter = layout_.all()[p];
                if (!stands_in(fault, parameter.layer)) continue;
                if (fault.column >= parameter.cols)
                    throw RequestError(fmt::format("fault \"{}\": column {}: expected less than the {} columns of {}",
                                                   to_string(fault), fault.column, parameter.cols, parameter.name));
                const TileSet<float> set = update_set(config_, fault, parameter, nullptr);
                add_records(planted, parameter.layer, static_cast<int>(p), 0,
                            static_cast<std::size_t>(on_device::parts_of(set)), 1);
            }
            break;
        case ModelSite::logits: {
            const auto rows = static_cast<int>(head_tokens(config_));
            if (rows != tokens && rows % (std::max(1, chunk_tokens / m.context) * m.context) != 0)
                refuse(fault, "the logits are made in pieces that cut its tiles: expected another batch");
            plan_records(m.layers, 0, 0, rows, m.vocabulary);
            break;
        }
        case ModelSite::layer_norm_statistics:
            if (m.norm_statistics != NormStatistics::fp32)
                refuse(fault, "the statistics are rounded as they are made: expected norm-statistics fp32");
            for (int layer = 0; layer <= m.layers; ++layer)
                for (int part = 0; part < (layer < m.layers ? 2 : 1); ++part) plan_records(layer, part, 0, tokens, 2);
            break;
        default:
            for (int layer = 0; layer < m.layers; ++layer)
                for (const int part : parts_at(site))
                    plan_records(layer, part, 0, tokens,
                                 site == ModelSite::ffn_activation_gradient ? 4 * m.width : m.width);
    }
}

void DeviceFaults::add_inside(const Planted& planted) {
    const Site site = std::get<Site>(planted.fault.site);
    const InsideSite* at = inside_site(site, plan_ != nullptr);
    for (const auto& [where, first] : planted.records) {
        const auto layer = static_cast<std::size_t>(std::get<0>(where));
        KernelFaults& of = (at->backward ? backward_ : forward_)[layer];
        if (of.count == on_device::most_kernel_faults)
            refuse(planted.fault, fmt::format("is the fifth inside one kernel of a layer: expected at most {}",
                                              on_device::most_kernel_faults));
        ++of.count;
        if (plan_ == nullptr) continue;
        // Those of a kernel are recorded alike, and a scaled one has a factor a site.
        const auto others = [&](const Planted& other) {
            const Site* stands = std::get_if<Site>(&other.fault.site);
            const InsideSite* inside = stands == nullptr ? nullptr : inside_site(*stands, true);
            return inside != nullptr && inside->backward == at->backward && other.records.contains(where) &&
                   (other.fault.sampled != planted.fault.sampled || (planted.fault.sampled && *stands == site));
        };
        if (std::ranges::any_of(planted_, others))
            refuse(
                planted.fault,
                "stands in one kernel of a layer with others: expected record=sample of all of them, one at each site, or of none");
    }
}

}  // namespace faultline::gpt
