// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/host_memory.hpp>

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gemm/block.hpp>
#include <faultline/gpt/attention_layer.hpp>
#include <faultline/gpt/share.hpp>

namespace faultline::gpt {
namespace {

/// A count that stays at its largest where it would pass it.
struct Count {
    std::uint64_t value = 0;
    Count() = default;
    template <class T>
    Count(T x) : value(x < T(0) ? 0 : static_cast<std::uint64_t>(x)) {}  // NOLINT: numbers are counts
    static constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
    friend Count operator+(Count a, Count b) { return {a.value > most - b.value ? most : a.value + b.value}; }
    friend Count operator*(Count a, Count b) {
        return {b.value != 0 && a.value > most / b.value ? most : a.value * b.value};
    }
    Count& operator+=(Count b) { return *this = *this + b; }
    friend bool operator<(Count a, Count b) { return a.value < b.value; }
};

constexpr std::uint64_t fp32 = sizeof(float), fp64 = sizeof(double);

/// The numbers that all parts are made of.
struct Shapes {
    Shapes(const TrainConfig& config, const HostNeeds& needs)
        : c(config),
          m(config.model),
          width(m.width),
          length(m.context),
          layers(m.layers),
          heads(m.heads),
          vocabulary(m.vocabulary),
          columns(Count(m.output_gate ? 4 : 3) * width),
          parameters(parameter_count(m)) {
        const int per_chunk = std::max(1, chunk_tokens / m.context);
        sequences = std::min(per_chunk, config.batch);
        tokens = Count(sequences) * length;
        const auto known = static_cast<std::ptrdiff_t>(
            std::min<std::uint64_t>(parameters.value, std::numeric_limits<std::ptrdiff_t>::max()));
        const int all = groups_of_batch(known, config.batch, m.context);
        const bool by_groups = config.accumulate % needs.ranks != 0;
        groups = by_groups ? (all + needs.ranks - 1) / needs.ranks : all;
        const int chunks = (config.batch + per_chunk - 1) / per_chunk, threads = std::max(1, config.threads);
        workers = std::min(threads, groups);
        const bool validates = config.validate_every > 0;
        forward_workers = validates ? std::max(0, std::min(threads, chunks) - workers) : 0;
    }
    const TrainConfig& c;
    const ModelConfig& m;
    Count width, length, layers, heads, vocabulary, columns, parameters;
    Count tokens;         ///< of a chunk
    int sequences;        ///< of a chunk
    int groups;           ///< of a micro-batch, of this rank
    int workers;          ///< chunks at once in training
    int forward_workers;  ///< that a validation has beyond them
};

/// What a chunk keeps of all layers for its backward, but for attention's own, and the residual stream.
Count activations(const Shapes& s, const HostNeeds& needs) {
    const bool norms = s.m.qk_norm != QkNorm::none || needs.may_norm;
    // x_in, x_mid, h1, h2, o; u and a; two norms' statistics; q, k, v.
    Count row = Count(5) * s.width + Count(8) * s.width + 4 + s.columns;
    if (s.m.output_gate) row += s.width;
    if (norms) row += Count(2) * s.width + Count(2) * s.heads;
    if (needs.captured > 0) row += s.width;
    constexpr std::uint64_t buffers = 16 * (sizeof(std::vector<float>) + 2 * sizeof(std::ptrdiff_t));
    const Count kept = s.layers * (s.tokens * row * fp32 + sizeof(AttentionState<float>) + buffers);
    return kept + s.tokens * (Count(3) * s.width + 4) * fp32;  // x, branch, the final norm
}

/// Gradients of a chunk on their way back.
Count backward_scratch(const Shapes& s) {
    // dx, dbranch, dh, dgated; da; din; dgate.
    const Count row = Count(4) * s.width + Count(4) * s.width + s.columns + (s.m.output_gate ? s.width : Count(0));
    return s.tokens * row * fp32;
}

struct Emulation {
    Count kept, at_work;  ///< of a head of a sequence: from the forward to the backward, and while it is computed
};

Emulation emulation_of(const RoundingPlan& plan, const Shapes& s) {
    const Count n = s.length, d = s.m.head_dim();
    Emulation e;
    e.kept = (Count(2) * n * d + n) * fp64 + sizeof(HeadForward);
    if (plan.schedule.p_saved) e.kept += n * n * fp64 * (s.m.softcap > 0 ? 2 : 1);
    const auto tile = [&](int block) { return block > 0 ? std::min<Count>(n, block) : n; };
    const Schedule& at = plan.schedule;
    const Count forward = tile(at.block_q) * tile(at.block_k), backward = tile(at.bwd_block_q) * tile(at.bwd_block_k);
    // Operands, their casts and gradients [n, d]; tiles of scores, their exact values and what is made of them.
    e.at_work = (Count(16) * n * d + Count(6) * std::max(forward, backward)) * fp64;
    return e;
}

/// Of the heads that are emulated: what all of a chunk's keep, and the most that one is at work with.
Emulation emulations(const Shapes& s, const HostNeeds& needs) {
    Emulation all;
    const Count every = s.layers * s.heads;
    const auto add = [&](const RoundingPlan& plan, Count count) {
        const Emulation one = emulation_of(plan, s);
        all.kept += Count(s.sequences) * count * one.kept;
        all.at_work = std::max(all.at_work, one.at_work);
    };
    if (needs.emulated) add(fast_plan(s.m.bf16), every);
    for (const AttentionChoice& choice : s.m.attention)
        if (choice.plan)
            add(*choice.plan, (choice.layer < 0 ? s.layers : Count(1)) *
                                  (choice.heads.empty() ? s.heads : Count(choice.heads.size())));
    return all;
}

/// Attention of a chunk: lse, statistics and emulated heads of all layers, and the fast kernel's blocks.
Count attention(const Shapes& s, const HostNeeds& needs, bool backward) {
    const Count slots = s.layers * s.heads * s.sequences, n = s.length, d = s.m.head_dim();
    const Emulation emulated = emulations(s, needs);
    const Count block = Count(fast_block) * n;
    Count fast = (block + 2 * fast_block) * fp32;
    if (backward) fast += (block + Count(2) * n * d + (s.m.softcap > 0 ? block : Count(0))) * fp32;
    if (needs.instrumented) fast += Count(2) * std::max(block, n * d) * fp64;
    return slots * (n * fp32 + sizeof(GroupForward) + sizeof(HeadStatistics)) + emulated.kept + emulated.at_work + fast;
}

/// What a step sees of heads and layers, here, in each group and each chunk.
Count monitors(const Shapes& s) {
    const Count slots = s.layers * s.heads;
    constexpr int of_batch = 8, of_report = 10, of_chunk = 2;
    return slots * fp64 * (Count(of_batch) * (s.groups + 1) + of_report + Count(of_chunk) * s.workers) +
           s.layers * (8 * fp64 + sizeof(QkSwitch) + 1);
}

/// Names, places and shapes of the parameters, and of their updates. A vector has up to twice what it needs.
Count names(const Shapes& s) {
    const int of_layer = 8 + (s.m.output_gate ? 1 : 0) + (s.m.bias ? 6 : 0) + (s.m.qk_norm == QkNorm::learned ? 2 : 0) +
                         (s.m.sigma_reparam ? 7 : 0);
    return s.layers * (Count(of_layer) * (2 * sizeof(Parameter) + 2 * sizeof(ParameterUpdate)) + sizeof(LayerOffsets));
}

}  // namespace

std::uint64_t parameter_count(const ModelConfig& m) {
    const Count width(m.width), columns = Count(m.output_gate ? 4 : 3) * width;
    Count layer = width * columns + width * width + Count(8) * width * width + Count(2) * width;
    if (m.bias) layer += columns + Count(8) * width;  // of q, k, v; two norms', w_o, w_fc's four, w_proj
    if (m.qk_norm == QkNorm::learned) layer += Count(2) * m.head_dim();
    if (m.sigma_reparam) layer += m.output_gate ? 7 : 6;
    return (Count(m.vocabulary) * width + Count(m.context) * width + Count(m.layers) * layer + width * (m.bias ? 2 : 1))
        .value;
}

HostMemory host_memory(const TrainConfig& config, const HostNeeds& needs) {
    const Shapes s(config, needs);
    const Count all = s.parameters * fp32, head = s.vocabulary * s.width * fp32;
    const bool sgd = config.optimizer.kind == OptimizerKind::sgd;
    const Count moments = all * (sgd ? 1 : 2);
    const Count square = s.width * s.width, micro_batch = Count(config.batch) * s.length;

    // At once, beside all that stays: a micro-batch's sums and captures; or the moments as they were before the update, and
    // what Muon or a projection takes; or a checkpoint's copies; or a spectrum.
    Count captures, written;
    if (needs.captured > 0) {
        captures = s.layers * 5 * micro_batch * s.width * fp32;
        const Count part = Count(std::min(needs.captured, config.batch)) * s.length * s.width * fp32;
        written = s.layers * 5 * part + part * 2 + micro_batch * s.width * fp32;
    }
    const Count sums = captures + std::max(head, written);
    Count update = moments;
    if (config.optimizer.kind == OptimizerKind::muon) update += square * 10 * fp32;
    if (needs.projects) update += square * 8 * fp64;
    const Count checkpoint = needs.checkpoints ? all + moments : Count(0);
    const Count spectrum = square * 3 * fp64;
    const Count passing = std::max({sums, update, checkpoint, spectrum});
    const Count windows = micro_batch * 2 * 2 * sizeof(std::int32_t);
    const Count packed = Count(s.workers + s.forward_workers) * gemm_detail::packed_size * fp32;

    const Count workers(s.workers), more(s.forward_workers);
    HostMemory out;
    const auto add = [&](const char* name, Count bytes) { out.parts.push_back({name, bytes.value}); };
    add("weights", all * (1 + (s.m.bf16 ? 1 : 0) + (s.m.sigma_reparam ? 1 : 0)) +
                       (s.m.sigma_reparam ? s.layers * s.width * 40 * fp32 : Count(0)));
    add("gradient", all * 3 + Count(s.groups) * (all + head));  // with a micro-batch's, and the update
    add("moments", moments);
    add("activations", (workers + more) * activations(s, needs));
    add("logits", (workers + more) * s.tokens * s.vocabulary * fp32);
    add("attention", workers * attention(s, needs, true) + more * attention(s, needs, false));
    add("monitors", monitors(s));
    add("scratch", workers * backward_scratch(s) + passing + windows + packed + names(s));
    return out;
}

std::uint64_t HostMemory::bytes() const {
    Count all;
    for (const Part& part : parts) all += part.bytes;
    return all.value;
}

std::uint64_t HostMemory::of(std::string_view name) const {
    const auto found = std::ranges::find(parts, name, &Part::name);
    return found == parts.end() ? 0 : found->bytes;
}

std::string HostMemory::text() const {
    const std::uint64_t all = bytes();
    if (all == Count::most) return "more than 16 EiB";
    const bool small = all < (std::uint64_t{1} << 30);
    std::string out = size_text(all) + ":";
    for (const Part& part : parts)
        out += fmt::format("{} {} {:.{}f}", &part == parts.data() ? "" : ",", part.name,
                           static_cast<double>(part.bytes) * (small ? 0x1p-20 : 0x1p-30), small ? 1 : 2);
    return out;
}

void expect_room(const std::string& what, const HostMemory& memory, std::uint64_t count, const MemoryRoom& room) {
    const std::uint64_t needed = (Count(memory.bytes()) * count).value;
    if (needed <= room.bytes) return;
    const std::string together = count > 1 ? fmt::format(", and {} at a time {}", count, size_text(needed)) : "";
    throw WorkError(fmt::format("not enough memory: {} {}{}: expected at most the {} {}", what, memory.text(), together,
                                size_text(room.bytes), room.of));
}

int runs_with_room(const std::string& what, const HostMemory& one, int runs, bool asked, const MemoryRoom& room) {
    const std::uint64_t fit = room.bytes / std::max<std::uint64_t>(one.bytes(), 1);
    if (!asked && fit >= 1) return static_cast<int>(std::min<std::uint64_t>(fit, static_cast<std::uint64_t>(runs)));
    expect_room(what, one, asked ? static_cast<std::uint64_t>(runs) : 1, room);
    return runs;
}

}  // namespace faultline::gpt
