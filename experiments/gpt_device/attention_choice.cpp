// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/attention_choice.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/cpu/row_sums.hpp>
#include <faultline/gpt_device/qk_rows.hpp>
#include <faultline/tensor_kernel/backward.hpp>
#include <faultline/tensor_kernel/row_statistics.hpp>
#include <faultline/tensor_kernel/scaling.hpp>

namespace faultline::gpt {

using on_device::Bf16;

struct AttentionOnDevice::Tensor {
    std::string plan;
    tensor_kernel::ForwardKernel forward;
    tensor_kernel::BackwardKernel backward;
    Schedule schedule;
};

AttentionOnDevice::AttentionOnDevice(const TrainConfig& config, bool may_norm) {
    const ModelConfig& m = config.model;
    shape_ = {config.batch,
              m.context,
              m.heads,
              m.head_dim(),
              static_cast<float>(1.0 / std::sqrt(static_cast<double>(m.head_dim()))),
              static_cast<float>(m.softcap),
              m.output_gate};
    std::vector<const RoundingPlan*> plans;
    for (int l = 0; l < m.layers; ++l) {
        const RoundingPlan* plan = m.plan(l, 0);
        for (int h = 0; h < m.heads; ++h)
            if (m.plan(l, h) != plan)
                throw RequestError(
                    "device cuda: layer-attention: the device has one kernel for all heads of a layer: expected whole "
                    "layers");
        if ((plan == nullptr) != (m.plan(0, 0) == nullptr))
            throw RequestError(
                "device cuda: layer-attention: the device has fast in all layers or in none: expected plans of the "
                "tensor cores' kernel in the others too");
        if (plan == nullptr) continue;
        const auto at = std::ranges::find(plans, plan);
        of_layer_.push_back(static_cast<std::size_t>(at - plans.begin()));
        if (at == plans.end()) plans.push_back(plan);
    }
    rms_by_kernel_ = plans.empty() && !may_norm;
    for (const RoundingPlan* plan : plans) {
        const std::string why = add_tensor(*plan, m);
        if (why.empty()) continue;
        for (const RoundingPlan* one : plans) plans_ += fmt::format("{}{}", plans_.empty() ? "" : ", ", one->name);
        plans_ = fmt::format("plan {}, emulated ({})", plans_, why);
        emulated_ = std::make_unique<EmulatedAttention>(config.model, config.batch);
        kernels_.clear();
        return;
    }
    layers_.resize(plans.size());
    for (int l = 0; on_tensor_cores() && l < m.layers; ++l)
        layers_[of_layer_[static_cast<std::size_t>(l)]].push_back(l);
}

std::string AttentionOnDevice::add_tensor(const RoundingPlan& plan, const ModelConfig& m) {
    if (m.softcap != 0) return "the tensor cores' kernel has no softcap";
    if (!m.bf16) return "the tensor cores' kernel has bf16 operands";
    const tensor_kernel::ForwardSupport forward = tensor_kernel::supported(plan, m.head_dim(), true);
    const tensor_kernel::BackwardSupport backward = tensor_kernel::supported_backward(plan, m.head_dim(), true);
    for (const std::string& why : {forward.why, backward.why})
        if (!why.empty()) return why;
    if (forward.kernel.element != tensor_kernel::Element::bf16)
        return fmt::format("casts q, k and v to {}: expected bf16",
                           forward.kernel.element == tensor_kernel::Element::e4m3 ? "e4m3" : "fp16");
    kernels_.push_back({plan.name, forward.kernel, backward.kernel, plan.schedule});
    return {};
}

AttentionOnDevice::~AttentionOnDevice() = default;

std::string AttentionOnDevice::text() const {
    if (emulated_) return plans_;
    if (!on_tensor_cores()) return "fast, on CUDA cores";
    std::string text;
    for (std::size_t i = 0; i < kernels_.size(); ++i) {
        const Tensor& kernel = kernels_[i];
        text += fmt::format("{}plan {} (forward {}, backward {})", i > 0 ? ", " : "", kernel.plan, kernel.forward.name,
                            kernel.backward.name);
        if (kernels_.size() > 1) text += fmt::format(" in layers {}", fmt::join(layers_[i], ","));
    }
    return text + ", on tensor cores";
}

on_device::PartCounts AttentionOnDevice::parts() const {
    on_device::PartCounts counts = on_device::fast_parts(shape_.length);
    if (emulated_) {
        counts.largest = counts.rows = counts.zero_sums = 1;
    } else if (on_tensor_cores()) {
        counts.largest = counts.rows = tensor_kernel::row_groups(shape_.length);
        counts.zero_sums = tensor_kernel::zero_sum_parts(shape_.length);
    }
    if (!rms_by_kernel_) counts.rms = on_device::rms_parts(shape_.length);
    return counts;
}

std::vector<double> AttentionOnDevice::scales(const std::vector<double>& switched) const {
    if (!switched.empty()) return switched;
    return std::vector<double>(static_cast<std::size_t>(shape_.heads),
                               1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
}

const AttentionOnDevice::Tensor& AttentionOnDevice::kernel_of(int layer) const {
    return kernels_[of_layer_.at(static_cast<std::size_t>(layer))];
}

double AttentionOnDevice::zero_sum_unit(int layer, double scale) const {
    return on_tensor_cores() ? score_gradient_site(kernel_of(layer).schedule, scale, false).unit : 1;
}

namespace {

struct HeadStrides {
    tensor_kernel::Strides qk, v, o, gradient;
};
HeadStrides strides_of(const on_device::AttentionShape& s, std::int64_t qk, std::int64_t v) {
    const std::int64_t width = std::int64_t{1} * s.heads * s.head_dim;
    const auto of = [&](std::int64_t row) { return tensor_kernel::Strides{row, s.head_dim, row * s.length}; };
    return {of(qk), of(v), of(width), of(s.gradient_row())};
}

tensor_kernel::BackwardCall backward_call(const on_device::AttentionShape& s) {
    tensor_kernel::BackwardCall call;
    call.batch = s.batch;
    call.heads = call.kv_heads = s.heads;
    call.n_q = call.n_k = s.length;
    call.head_dim = s.head_dim;
    call.scale = static_cast<double>(s.scale);
    return call;
}

/// The faults of a call whose first head is `first` of the layer.
template <class Call>
tensor_kernel::Alterations from_head(tensor_kernel::Alterations faults, Call call, int first) {
    call.heads = call.kv_heads = 1;
    for (int f = 0; f < faults.count; ++f) {
        faults.at[f].heads += first;
        faults.at[f].sums += static_cast<std::size_t>(first) * tensor_kernel::altered_sums(call);
    }
    return faults;
}

/// Heads in one launch, or one after the other: `launch(heads, first head, where its rows of the whole batch begin, scale)`.
template <class F>
void for_launches(const on_device::AttentionShape& s, const std::vector<double>& scales, F&& launch) {
    if (scales.empty()) return launch(s.heads, 0, std::size_t{0}, static_cast<double>(s.scale));
    for (int h = 0; h < s.heads; ++h)
        launch(1, h, static_cast<std::size_t>(h) * static_cast<std::size_t>(s.batch),
               static_cast<double>(static_cast<float>(scales[static_cast<std::size_t>(h)])));
}

}  // namespace

std::size_t AttentionOnDevice::scratch_bytes() const {
    return !on_tensor_cores() ? 0 : tensor_kernel::backward_workspace(backward_call(shape_));
}

void AttentionOnDevice::forward(int layer, const Inputs& in, const std::vector<double>& scales, Bf16* o, float* lse,
                                const on_device::HeadParts& seen, const tensor_kernel::Alterations* faults,
                                bool sampled, on_device::Stream stream) const {
    const HeadStrides strides =
        strides_of(shape_, static_cast<std::int64_t>(in.qk_stride), static_cast<std::int64_t>(in.v_stride));
    const auto length = static_cast<std::size_t>(shape_.length);
    const on_device::PartCounts counts = parts();
    for_launches(shape_, scales, [&](int heads, int first, std::size_t slot, double scale) {
        const std::ptrdiff_t column = std::ptrdiff_t{1} * first * shape_.head_dim;
        tensor_kernel::ForwardCall call;
        call.batch = shape_.batch;
        call.heads = call.kv_heads = heads;
        call.n_q = call.n_k = shape_.length;
        call.head_dim = shape_.head_dim;
        call.scale = scale;
        call.q = in.q + column;
        call.k = in.k + column;
        call.v = in.v + column;
        call.o = o + column;
        call.lse = lse + slot * length;
        if (seen.largest != nullptr) call.largest = seen.largest + slot * static_cast<std::size_t>(counts.largest);
        call.q_strides = call.k_strides = strides.qk;
        call.v_strides = strides.v;
        call.o_strides = strides.o;
        const tensor_kernel::ForwardKernel& kernel = kernel_of(layer).forward;
        tensor_kernel::ForwardCall one = call;  // is recorded
        one.batch = 1;
        if (faults == nullptr)
            tensor_kernel::launch_forward(call, kernel, stream);
        else if (sampled)
            tensor_kernel::launch_scaled_forward(call, kernel, from_head(*faults, one, first), stream);
        else
            tensor_kernel::launch_altered_forward(call, kernel, from_head(*faults, call, first), stream);
    });
}

void AttentionOnDevice::look_at_rows(const Inputs& in, const std::vector<double>& scales, const float* lse,
                                     double* rows, on_device::Stream stream) const {
    const HeadStrides strides =
        strides_of(shape_, static_cast<std::int64_t>(in.qk_stride), static_cast<std::int64_t>(in.v_stride));
    const auto parts_of_rows = static_cast<std::size_t>(parts().rows);
    for_launches(shape_, scales, [&](int heads, int first, std::size_t slot, double scale) {
        const std::ptrdiff_t column = std::ptrdiff_t{1} * first * shape_.head_dim;
        tensor_kernel::RowStatisticsCall call;
        call.batch = shape_.batch;
        call.heads = call.kv_heads = heads;
        call.n_q = call.n_k = shape_.length;
        call.head_dim = shape_.head_dim;
        call.scale = scale;
        call.q = in.q + column;
        call.k = in.k + column;
        call.lse = lse + slot * static_cast<std::size_t>(shape_.length);
        call.out = rows + 2 * slot * parts_of_rows;
        call.q_strides = call.k_strides = strides.qk;
        tensor_kernel::launch_row_statistics(call, stream);
    });
}

void AttentionOnDevice::backward(int layer, const Inputs& in, const std::vector<double>& scales, const Bf16* o,
                                 const float* lse, const Bf16* dout, Bf16* dqkv, void* scratch, bool deterministic,
                                 const on_device::HeadParts& seen, const tensor_kernel::Alterations* faults,
                                 bool sampled, on_device::Stream stream) const {
    const std::ptrdiff_t width = std::ptrdiff_t{1} * shape_.heads * shape_.head_dim;
    const HeadStrides strides =
        strides_of(shape_, static_cast<std::int64_t>(in.qk_stride), static_cast<std::int64_t>(in.v_stride));
    const auto length = static_cast<std::size_t>(shape_.length);
    const auto zero_sums = static_cast<std::size_t>(parts().zero_sums);
    for_launches(shape_, scales, [&](int heads, int first, std::size_t slot, double scale) {
        const std::ptrdiff_t column = std::ptrdiff_t{1} * first * shape_.head_dim;
        tensor_kernel::BackwardCall call = backward_call(shape_);
        call.heads = call.kv_heads = heads;
        call.scale = scale;
        call.deterministic = deterministic;
        call.q = in.q + column;
        call.k = in.k + column;
        call.v = in.v + column;
        call.o = o + column;
        call.dout = dout + column;
        call.lse = lse + slot * length;
        call.dq = dqkv + column;
        call.dk = dqkv + width + column;
        call.dv = dqkv + 2 * width + column;
        call.workspace = scratch;
        if (seen.zero_sums != nullptr) call.zero_sums = seen.zero_sums + 2 * slot * zero_sums;
        call.q_strides = call.k_strides = strides.qk;
        call.v_strides = strides.v;
        call.o_strides = call.dout_strides = strides.o;
        call.dq_strides = call.dk_strides = call.dv_strides = strides.gradient;
        const tensor_kernel::BackwardKernel& kernel = kernel_of(layer).backward;
        if (faults == nullptr) return tensor_kernel::launch_backward(call, kernel, stream);
        if (!sampled)
            return tensor_kernel::launch_altered_backward(call, kernel, from_head(*faults, call, first), stream);
        tensor_kernel::BackwardCall one = call;  // is recorded
        one.batch = 1;
        tensor_kernel::launch_scaled_backward(call, kernel, from_head(*faults, one, first), stream);
    });
}

}  // namespace faultline::gpt
