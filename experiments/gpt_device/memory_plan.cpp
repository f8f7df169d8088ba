// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/memory_plan.hpp>

#include <algorithm>

#include <fmt/format.h>

#include <faultline/gpt_device/monitors.hpp>

namespace faultline::gpt {

std::size_t MemoryPlan::add(const std::string& group, const std::string& name, std::size_t bytes) {
    constexpr std::size_t alignment = 256;
    const std::size_t whole = (bytes + alignment - 1) / alignment * alignment;
    regions_.push_back({name, bytes_, bytes});
    bytes_ += whole;
    const auto found = std::ranges::find(groups_, group, &Group::name);
    if (found == groups_.end())
        groups_.push_back({group, whole});
    else
        found->bytes += whole;
    return regions_.size() - 1;
}

std::string MemoryPlan::text() const {
    const auto gib = [](std::size_t bytes) { return static_cast<double>(bytes) * 0x1p-30; };
    std::string out = fmt::format("{:.2f} GiB:", gib(bytes_));
    for (const Group& group : groups_)
        out += fmt::format("{} {} {:.2f}", &group == groups_.data() ? "" : ",", group.name, gib(group.bytes));
    return out;
}

std::size_t element_bytes(const TrainConfig& config) { return config.model.bf16 ? 2 : 4; }

std::ptrdiff_t head_tokens(const TrainConfig& config) {
    // Enough rows for products at full speed, and whole sequences: a piece is at most a quarter of GPT-2's 32 x 1024.
    constexpr std::ptrdiff_t most = 8192;
    const std::ptrdiff_t tokens = static_cast<std::ptrdiff_t>(config.batch) * config.model.context;
    for (std::ptrdiff_t pieces = (tokens + most - 1) / most; pieces < config.batch; ++pieces)
        if (config.batch % pieces == 0) return tokens / pieces;
    return config.model.context;
}

// What cuBLASLt may use for sums in parts: as much as its fastest products on an H200 ask for.
constexpr std::size_t product_workspace = std::size_t{64} << 20;

std::size_t partial_sums(int width) {
    // Of a layer's backward, which adds them all up at its end: two norms and, above the last layer, the final one; the
    // biases' gradients of q, k, v and an output gate (4 widths), of the feed-forward (4) and, where faults alter what it is of,
    // of its branch (in a norm's parts); and what the gains of QK norm need.
    const auto columns = static_cast<std::size_t>(width),
               parts = static_cast<std::size_t>(on_device::norm_parts(width));
    const auto norm = static_cast<std::size_t>(on_device::norm_columns(width, true));
    return 3 * parts * norm + ((4 + 4) * on_device::sum_slabs + parts + 512) * columns;
}

InputLayout::InputLayout(const TrainConfig& config) {
    const std::size_t row =
        sizeof(std::int32_t) * static_cast<std::size_t>(config.batch) * static_cast<std::size_t>(config.model.context);
    tokens = 0;
    targets = row;
    order = 2 * row;
    starts = 3 * row;
    const std::size_t end = starts + sizeof(std::int32_t) * (static_cast<std::size_t>(config.model.vocabulary) + 1);
    scalars = (end + 15) / 16 * 16;
    bytes = scalars + sizeof(on_device::StepScalars);
}

RunMemory::RunMemory(const TrainConfig& config, const ParameterLayout& layout, const RunNeeds& needs) {
    const ModelConfig& m = config.model;
    const auto parameters = static_cast<std::size_t>(layout.size());
    const std::size_t tokens = static_cast<std::size_t>(config.batch) * static_cast<std::size_t>(m.context);
    const auto in_columns = static_cast<std::size_t>(layout.in_columns());
    const auto width = static_cast<std::size_t>(m.width), heads = static_cast<std::size_t>(m.heads);
    const auto vocabulary = static_cast<std::size_t>(m.vocabulary);
    const std::size_t element = element_bytes(config);
    constexpr std::size_t fp32 = 4;
    weights = plan.add("weights", "weights", parameters * fp32);
    operands = m.bf16 ? plan.add("weights", "operands", parameters * element) : weights;
    first = plan.add("moments", "first moment", parameters * fp32);
    const bool one_moment = config.optimizer.kind == OptimizerKind::sgd;
    second = plan.add("moments", "second moment", one_moment ? 0 : parameters * fp32);
    gradient = plan.add("gradient", "gradient", parameters * fp32);
    micro_gradient = config.accumulate > 1 && !needs.one_gradient
                         ? plan.add("gradient", "of a micro-batch", parameters * fp32)
                         : gradient;
    kinds = plan.add("weights", "kinds", parameters / 8);
    for (int l = 0; l < m.layers; ++l) {
        const auto keep = [&](const char* name, std::size_t bytes) { return plan.add("activations", name, bytes); };
        LayerRegions at{};
        at.x_in = keep("x_in", tokens * width * fp32);
        at.x_mid = keep("x_mid", tokens * width * fp32);
        at.statistics1 = keep("statistics1", tokens * 2 * fp32);
        at.statistics2 = keep("statistics2", tokens * 2 * fp32);
        at.h1 = keep("h1", tokens * width * element);
        at.in = keep("q, k, v", tokens * in_columns * element);
        at.o = keep("o", tokens * width * element);
        at.gated = m.output_gate ? keep("gated o", tokens * width * element) : at.o;
        at.lse = keep("lse", tokens * heads * fp32);
        at.h2 = keep("h2", tokens * width * element);
        at.u = keep("u", tokens * 4 * width * element);
        at.a = keep("a", tokens * 4 * width * element);
        layers.push_back(at);
    }
    x_out = plan.add("activations", "x_out", tokens * width * fp32);
    final_statistics = plan.add("activations", "final statistics", tokens * 2 * fp32);
    final_h = plan.add("activations", "final h", tokens * width * element);
    logits = plan.add("logits", "logits", static_cast<std::size_t>(head_tokens(config)) * vocabulary * element);
    const auto scratch = [&](const char* name, std::size_t bytes) { return plan.add("scratch", name, bytes); };
    dx = scratch("dx", tokens * width * fp32);
    // Branches of the forward and their gradients in the backward.
    dbranch = scratch("branch", tokens * width * element);
    dh = scratch("dh", tokens * width * element);
    da = scratch("da", tokens * 4 * width * element);
    din = scratch("din", tokens * in_columns * element);
    dheads = scratch("dheads", tokens * width * element);
    partials = scratch("partial sums", partial_sums(m.width) * fp32);
    sums = scratch("sums", 8192 * sizeof(double));
    losses = scratch("losses", tokens * sizeof(double));
    result = scratch("result", sizeof(on_device::StepResult));
    const auto layers_heads = static_cast<std::size_t>(m.layers) * heads;
    totals = plan.add("monitors", "totals", needs.monitors ? layers_heads * sizeof(on_device::HeadTotals) : 0);
    input = scratch("input", InputLayout(config).bytes);
    delta = scratch("delta", tokens * heads * fp32);
    attention = scratch("attention", needs.attention_scratch);
    products = scratch("products", product_workspace);
    // Large products fill the card, and two at once take longer than one after the other (GPT-2 124M on an H200: 56.0 ms a
    // step for 55.7); of small ones several run at once (2 layers of width 64: 0.28 ms for 0.33).
    constexpr std::size_t small = std::size_t{1} << 21;
    products_beside = scratch("products beside", tokens * width <= small ? product_workspace : 0);
    muon = scratch("Newton-Schulz", needs.muon_scratch);
    faults = scratch("faults", needs.faults);
    projection = scratch("projection", needs.projection);
    proposed = plan.add("gradient", "update", needs.update_apart ? parameters * fp32 : 0);
    hats = scratch("q and k after their norm", needs.may_norm ? tokens * 2 * width * element : 0);
    scales = scratch("scales", needs.may_norm ? layers_heads * fp32 : 0);
    const auto monitor = [&](const char* name, int parts, std::size_t bytes) {
        const std::size_t count =
            layers_heads * static_cast<std::size_t>(config.batch) * static_cast<std::size_t>(parts);
        return plan.add("monitors", name, needs.monitors ? count * bytes : 0);
    };
    largest = monitor("largest scores", needs.parts.largest, sizeof(float));
    rms = monitor("rms of q and k", needs.parts.rms, 2 * sizeof(double));
    zero_sums = monitor("zero sums", needs.parts.zero_sums, 2 * sizeof(double));
    rows = monitor("rows", needs.parts.rows, 2 * sizeof(double));
}

}  // namespace faultline::gpt
