// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/device_faults.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt/fast_attention.hpp>
#include <faultline/gpt_device/memory_plan.hpp>
#include <faultline/injectors/apply.hpp>
#include <faultline/injectors/attention_injector.hpp>
#include <faultline/injectors/model_injector.hpp>
#include <faultline/tensor_kernel/backward_kernel.hpp>
#include <faultline/tensor_kernel/forward_kernel.hpp>

namespace faultline::gpt {
namespace {

using on_device::Bf16;
using on_device::HeadFault;
using on_device::KernelFaults;
using on_device::KernelSite;
using on_device::RecordRange;
using on_device::TileSet;

constexpr int tile_rows = static_cast<int>(fast_block);
constexpr int sequences_at_most = 1 << 12;  // of a micro-step, as FaultHooks numbers them

/// Sites of the fast kernel that are registers on the device, in the order in which its kernels come by.
struct InsideSite {
    Site site;
    KernelSite in_kernel;
    bool backward;
};
constexpr std::array inside_sites{
    InsideSite{Site::row_max, KernelSite::row_max, false},
    InsideSite{Site::p_cast, KernelSite::p_cast, false},
    InsideSite{Site::row_sum, KernelSite::row_sum, false},
    InsideSite{Site::pv_accumulate, KernelSite::pv_accumulate, false},
    InsideSite{Site::dp_accumulate, KernelSite::dp_accumulate, true},
    InsideSite{Site::ds, KernelSite::ds, true},
    InsideSite{Site::bwd_p_cast, KernelSite::bwd_p_cast, true},
    InsideSite{Site::ds_cast, KernelSite::ds_cast, true},
};
const InsideSite* inside_site(Site site) {
    const auto* found = std::ranges::find(inside_sites, site, &InsideSite::site);
    return found == inside_sites.end() ? nullptr : found;
}

/// Where it stands in the tensor cores' kernels; nothing: it does not.
std::optional<tensor_kernel::AlteredSite> altered_site(Site site) {
    using enum tensor_kernel::AlteredSite;
    switch (site) {
        case Site::p_cast:
            return p_cast;
        case Site::dp_accumulate:
            return dp_accumulate;
        case Site::ds:
            return ds;
        case Site::bwd_p_cast:
            return bwd_p_cast;
        case Site::ds_cast:
            return ds_cast;
        default:
            return {};
    }
}

bool law_needs_rms(const Fault& fault) {
    return fault.law != Law::multiplicative && fault.unit == Fault::Unit::relative && !fault.by_value;
}

/// Whether what stands there is in the type of products' operands.
bool holds_operands(ModelSite site) {
    switch (site) {
        case ModelSite::layer_norm_statistics:
        case ModelSite::residual_add:
        case ModelSite::optimizer_update:
            return false;
        default:
            return true;
    }
}
bool is_cast_in_memory(Site site) {
    return site == Site::o_cast || site == Site::dq_cast || site == Site::dk_cast || site == Site::dv_cast;
}

/// ModelAt::part of the values that stand at a site.
std::vector<int> parts_at(ModelSite site) {
    if (site == ModelSite::residual_add) return {0, 1};
    return {site == ModelSite::attention_projection ? 0 : 1};
}

bool within_bf16(Format f) { return f.rounds && f.precision <= 8 && f.emax <= 127 && f.emin >= -126; }

[[noreturn]] void refuse(const Fault& fault, const std::string& why) {
    throw RequestError(fmt::format("device cuda: fault \"{}\": {}", to_string(fault), why));
}

}  // namespace

int DeviceFaults::tile_of(int block) const { return block > 0 ? block : config_.model.context; }

DeviceFaults::DeviceFaults(const TrainConfig& config, const ParameterLayout& layout, const std::vector<Fault>& faults)
    : config_(config), layout_(layout), plan_(config.model.plan(0, 0)) {
    const auto layers = static_cast<std::size_t>(config.model.layers);
    forward_.resize(layers);
    backward_.resize(layers);
    altered_forward_.resize(layers);
    altered_backward_.resize(layers);
    if (config.batch > sequences_at_most && !faults.empty())
        throw RequestError(
            fmt::format("device cuda: batch: {}: with a fault expected at most {}", config.batch, sequences_at_most));
    for (const Fault& fault : faults) plant(fault);
    if (!any()) return;
    const ModelConfig& m = config.model;
    const auto tokens = static_cast<std::size_t>(config.batch) * static_cast<std::size_t>(m.context);
    std::size_t rows = tokens, draws = 0;
    for (const Parameter& p : layout.all()) rows = std::max(rows, static_cast<std::size_t>(p.rows));
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
    (void)room(rows * 24 + 256);  // squares and count of a row, amplitudes of tiles
    (void)room(draws * sizeof(on_device::TileDraw));
}

std::size_t DeviceFaults::totals_bytes() const {
    return static_cast<std::size_t>(config_.model.layers * config_.model.heads) * sizeof(Realised);
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

template <class T>
TileSet<T> DeviceFaults::set_of(Site site, T* values, bool by_head) const {
    const ModelConfig& m = config_.model;
    const auto length = static_cast<std::size_t>(m.context), d = static_cast<std::size_t>(m.head_dim()),
               width = static_cast<std::size_t>(m.width);
    TileSet<T> set;
    set.sequences = config_.batch;
    set.heads = m.heads;
    set.tile = tile_rows;
    if (site == Site::lse || site == Site::delta) {  // a column of row quantities is as good as a row
        set.values = values;
        set.head_stride = length;
        set.sequence_stride = length * static_cast<std::size_t>(m.heads);
        if (by_head) {
            set.head_stride = length * static_cast<std::size_t>(config_.batch);
            set.sequence_stride = length;
        }
        set.rows = 1;
        set.cols = m.context;
        set.by_columns = true;
        if (plan_ != nullptr) set.tile = tile_of(plan_->schedule.block_q);
        return set;
    }
    const std::size_t parts = site == Site::o_cast ? 1 : 3;
    const std::size_t part = site == Site::dk_cast ? 1 : site == Site::dv_cast ? 2 : 0;
    set.values = values == nullptr ? nullptr : values + part * width;
    set.row_stride = parts * width;
    set.sequence_stride = length * set.row_stride;
    set.head_stride = d;
    set.rows = m.context;
    set.cols = m.head_dim();
    if (part > 0) set.tile = m.context;
    if (plan_ != nullptr)  // the emulated kernel shows gradients whole
        set.tile = site == Site::o_cast ? tile_of(plan_->schedule.block_q) : m.context;
    return set;
}

/// use(set, column) for the matrices that the fault sees of rows x cols: the whole, or columns of it.
template <class T, class F>
void DeviceFaults::with_sets(const Planted& planted, int layer, int part, T* values, int first_row, int rows, int cols,
                             F&& use) const {
    const Fault& fault = planted.fault;
    const ModelSite site = std::get<ModelSite>(fault.site);
    const int heads = config_.model.heads;
    TileSet<T> set;
    set.model = true;
    set.values = values;
    set.row_stride = static_cast<std::size_t>(cols);
    set.rows = rows;
    set.cols = cols;
    set.first_row = first_row;
    set.tile = std::max(1, chunk_tokens / config_.model.context) * config_.model.context;
    ModelAt where;
    where.layer = layer;
    where.part = part;
    set.name = model_tile(where);
    const bool by_column = site == ModelSite::layer_norm_statistics;
    if (!by_column && fault.column < 0) {
        set.blocks = heads > 0 && cols % heads == 0 ? heads : 1;
        return use(set, 0);
    }
    for (int j = 0; j < cols; ++j) {
        if (fault.column >= 0 && j != fault.column) continue;
        TileSet<T> column = set;
        column.values = values == nullptr ? nullptr : values + j;
        column.cols = 1;
        column.batch = j;
        use(column, j);
    }
}

void DeviceFaults::plant(const Fault& fault) {
    const ModelConfig& m = config_.model;
    Planted planted;
    planted.fault = fault;
    planted.of_rms = law_needs_rms(fault);
    planted.first = table_;
    const auto tokens = config_.batch * m.context;
    const auto stands_in = [&](int layer) {
        return fault.layers.empty() || std::ranges::find(fault.layers, layer) != fault.layers.end();
    };
    const auto must_hold = [&](const char* what) {
        if (m.bf16 && (fault.hold == Hold::exact || !within_bf16(fault.format.value_or(bf16))))
            refuse(fault, fmt::format("{} stands in memory as bf16: expected hold=stochastic or nearest, and no format "
                                      "that has more numbers",
                                      what));
    };
    if (const Site* site = std::get_if<Site>(&fault.site)) {
        const RoundingPlan plan = plan_ != nullptr ? *plan_ : fast_plan(m.bf16);
        (void)AttentionInjector(fault, plan, m.heads);  // says what cannot stand in the plan
        planted.format = plan[*site].format;
        const InsideSite* in_kernel = inside_site(*site);
        if (plan_ != nullptr && (in_kernel != nullptr || *site == Site::delta)) refuse_inside(fault, *site);
        if (in_kernel == nullptr && *site != Site::lse && *site != Site::delta && !is_cast_in_memory(*site))
            refuse(fault,
                   fmt::format("the device's kernel has no site {}: expected one of row_max, row_sum, p_cast, "
                               "pv_accumulate, lse, o_cast, delta, bwd_p_cast, dp_accumulate, ds, ds_cast, dq_cast, "
                               "dk_cast, dv_cast",
                               name(*site)));
        if (is_cast_in_memory(*site)) must_hold(name(*site).data());
        table_ += static_cast<std::size_t>(m.layers * m.heads);
        const int query_tiles = (m.context + tile_rows - 1) / tile_rows;
        auto tiles = static_cast<std::size_t>(
            config_.batch *
            (in_kernel != nullptr ? query_tiles : set_of(*site, static_cast<float*>(nullptr), false).tiles()));
        if (in_kernel != nullptr && plan_ != nullptr) {
            tensor_kernel::BackwardCall call;  // a query's and a key's tiles are as many
            call.batch = config_.batch;
            call.n_k = m.context;
            tiles = tensor_kernel::altered_sums(call);
        }
        for (int layer = 0; layer < m.layers; ++layer)
            if (stands_in(layer)) add_records(planted, layer, 0, 0, tiles, m.heads);
        if (in_kernel != nullptr) {
            planted.draws = tiles * static_cast<std::size_t>(m.heads);
            add_inside(planted);
        }
        planted_.push_back(std::move(planted));
        return;
    }
    const ModelSite site = std::get<ModelSite>(fault.site);
    planted.format = m.bf16 && holds_operands(site) ? bf16 : exact;
    (void)ModelInjector(fault, m.heads, planted.format);
    if (holds_operands(site)) must_hold(name(site).data());
    table_ += static_cast<std::size_t>((m.layers + 2) * (m.heads + 1));
    const auto plan_records = [&](int layer, int part, int first_row, int rows, int cols) {
        if (!stands_in(layer)) return;
        if (fault.column >= cols)
            throw RequestError(fmt::format("fault \"{}\": column {}: expected less than the {} columns of {}",
                                           to_string(fault), fault.column, cols, name(site)));
        with_sets(planted, layer, part, static_cast<float*>(nullptr), first_row, rows, cols,
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
                if (!stands_in(parameter.layer)) continue;
                if (fault.column >= parameter.cols)
                    throw RequestError(fmt::format("fault \"{}\": column {}: expected less than the {} columns of {}",
                                                   to_string(fault), fault.column, parameter.cols, parameter.name));
                TileSet<float> set = update_set(planted, parameter, nullptr);
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
    planted_.push_back(std::move(planted));
}

/// RequestError where the tensor cores' kernel does not have this fault in its registers.
void DeviceFaults::refuse_inside(const Fault& fault, Site site) const {
    constexpr const char* expected =
        "expected p_cast, dp_accumulate, ds, bwd_p_cast, ds_cast, lse, o_cast, dq_cast, dk_cast or dv_cast, or attention fast";
    if (!altered_site(site)) refuse(fault, fmt::format("the tensor cores' kernel has no {}: {}", name(site), expected));
    if (law_needs_rms(fault))
        refuse(
            fault,
            "is a part of a tile's rms, which the tensor cores' kernel does not know when the tile comes by: expected a size "
            "of the value (multiplicative, shape=value, ulp), or attention fast");
    const int head_dim = config_.model.head_dim();
    const tensor_kernel::ForwardKernel forward = tensor_kernel::supported(*plan_, head_dim, true).kernel;
    const tensor_kernel::BackwardKernel backward = tensor_kernel::supported_backward(*plan_, head_dim, true).kernel;
    const bool wgmma =
        inside_site(site)->backward
            ? backward.unit == tensor_kernel::Unit::wgmma && backward.variant == tensor_kernel::BackwardVariant{}
            : forward.unit == tensor_kernel::Unit::wgmma && forward.variant == tensor_kernel::ForwardVariant{};
    if (!wgmma)
        refuse(fault,
               fmt::format("plan {} runs a kernel that is not compiled with faults: expected fa3's, by wgmma with a "
                           "fused argument (attention tensor), or attention fast",
                           plan_->name));
    if (config_.model.bf16 && (site == Site::p_cast || site == Site::bwd_p_cast || site == Site::ds_cast) &&
        (fault.hold == Hold::exact || !within_bf16(fault.format.value_or(bf16))))
        refuse(fault,
               fmt::format("{} is an operand in bf16: expected hold=stochastic or nearest, and no format that has more "
                           "numbers",
                           name(site)));
}

void DeviceFaults::add_inside(const Planted& planted) {
    const Site site = std::get<Site>(planted.fault.site);
    const InsideSite* at = inside_site(site);
    for (const auto& [where, first] : planted.records) {
        const auto layer = static_cast<std::size_t>(std::get<0>(where));
        KernelFaults& of = (at->backward ? backward_ : forward_)[layer];
        if (of.count == on_device::most_kernel_faults)
            refuse(planted.fault, fmt::format("is the fifth inside one kernel of a layer: expected at most {}",
                                              on_device::most_kernel_faults));
        ++of.count;
    }
}

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
    std::size_t rows = static_cast<std::size_t>(config_.batch) * static_cast<std::size_t>(config_.model.context);
    for (const Parameter& p : layout_.all()) rows = std::max(rows, static_cast<std::size_t>(p.rows));
    rows_ = take(rows * 24 + 256);
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
    for (const InsideSite& at : inside_sites)
        for (const Planted& planted : planted_) {
            const Site* site = std::get_if<Site>(&planted.fault.site);
            if (site == nullptr || *site != at.site) continue;
            for (const auto& [where, first] : planted.records) {
                const int layer = std::get<0>(where);
                if (plan_ != nullptr) {
                    tensor_kernel::Alterations& in_registers =
                        (at.backward ? altered_backward_ : altered_forward_)[static_cast<std::size_t>(layer)];
                    in_registers.at[in_registers.count++] = {
                        *altered_site(at.site), planted.heads + layer * config_.model.heads,
                        reinterpret_cast<tensor_kernel::AlteredSums*>(device_records_ + first)};
                    continue;
                }
                KernelFaults& of = (at.backward ? backward_ : forward_)[static_cast<std::size_t>(layer)];
                of.one[of.count++] = {at.in_kernel, planted.of_rms, planted.heads + layer * config_.model.heads,
                                      device_records_ + first, draws};
            }
            draws += planted.draws;
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
        with_sets(planted, layer, part, values, first_row, rows, cols, [&](const auto& set, int column) {
            const auto records = planted.records.find({layer, part, column});
            if (records == planted.records.end()) return;
            const auto before = static_cast<std::size_t>(first_row / rows * set.tiles() * on_device::parts_of(set));
            on_device::alter(set, heads, planted.of_rms, rows_, device_records_ + records->second + before, stream_);
        });
    }
}

TileSet<float> DeviceFaults::update_set(const Planted& planted, const Parameter& parameter, float* update) const {
    ModelAt where;
    where.name = parameter.name;
    TileSet<float> set;
    set.model = true;
    set.values = update == nullptr ? nullptr : update + parameter.offset;
    set.row_stride = static_cast<std::size_t>(parameter.stride);
    set.rows = static_cast<int>(parameter.rows);
    set.cols = static_cast<int>(parameter.cols);
    set.tile = set.rows;
    set.name = model_tile(where);
    const int heads = config_.model.heads;
    set.blocks = heads > 0 && set.cols % heads == 0 ? heads : 1;
    if (planted.fault.column < 0) return set;
    if (update != nullptr) set.values += planted.fault.column;
    set.cols = set.blocks = 1;
    set.batch = planted.fault.column;
    return set;
}

void DeviceFaults::at_update(float* update) const {
    for (const Planted& planted : planted_)
        for (std::size_t p = 0; p < layout_.all().size(); ++p) {
            const Parameter& parameter = layout_.all()[p];
            const auto records = planted.records.find({parameter.layer, static_cast<int>(p), 0});
            if (planted.fault.site != std::variant<Site, ModelSite>(ModelSite::optimizer_update) ||
                records == planted.records.end())
                continue;
            on_device::alter(update_set(planted, parameter, update),
                             planted.heads + (parameter.layer + 1) * (config_.model.heads + 1), planted.of_rms, rows_,
                             device_records_ + records->second, stream_);
        }
}

template <class E>
void DeviceFaults::at(Site site, int layer, E* values, bool by_head) const {
    for (const Planted& planted : planted_) {
        const auto records = planted.records.find({layer, 0, 0});
        if (planted.fault.site != std::variant<Site, ModelSite>(site) || records == planted.records.end()) continue;
        on_device::alter(set_of(site, values, by_head), planted.heads + layer * config_.model.heads, planted.of_rms,
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
                            config_.model.layers, config_.model.heads, nullptr, totals_, stream_);
}

template void DeviceFaults::at(ModelSite, int, int, float*, int, int, int) const;
template void DeviceFaults::at(ModelSite, int, int, Bf16*, int, int, int) const;
template void DeviceFaults::at(Site, int, float*, bool) const;
template void DeviceFaults::at(Site, int, Bf16*, bool) const;

}  // namespace faultline::gpt
