// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/attention_choice.hpp>

#include <cmath>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor_kernel/backward.hpp>
#include <faultline/tensor_kernel/forward.hpp>

namespace faultline::gpt {

using on_device::Bf16;

struct AttentionOnDevice::Tensor {
    std::string plan;
    tensor_kernel::ForwardKernel forward;
    tensor_kernel::BackwardKernel backward;
};

AttentionOnDevice::AttentionOnDevice(const TrainConfig& config) {
    const ModelConfig& m = config.model;
    shape_ = {config.batch, m.context, m.heads, m.head_dim(),
              static_cast<float>(1.0 / std::sqrt(static_cast<double>(m.head_dim())))};
    const RoundingPlan* plan = nullptr;
    for (int l = 0; l < m.layers; ++l)
        for (int h = 0; h < m.heads; ++h) {
            if ((l > 0 || h > 0) && m.plan(l, h) != plan)
                throw RequestError(
                    "device cuda: layer-attention: the device has one kernel for all heads: expected none");
            plan = m.plan(l, h);
        }
    if (plan == nullptr) return;
    if (!m.bf16)
        throw RequestError(
            fmt::format("device cuda: attention: {}: the tensor cores' kernel has bf16 operands: expected precision "
                        "bf16, or attention fast",
                        plan->name));
    const tensor_kernel::ForwardSupport forward = tensor_kernel::supported(*plan, m.head_dim(), true);
    const tensor_kernel::BackwardSupport backward = tensor_kernel::supported_backward(*plan, m.head_dim(), true);
    for (const std::string& why : {forward.why, backward.why})
        if (!why.empty())
            throw RequestError(fmt::format("device cuda: attention: plan {}: {}; or attention fast", plan->name, why));
    if (forward.kernel.element != tensor_kernel::Element::bf16)
        throw RequestError(fmt::format("device cuda: attention: plan {}: casts to fp16: expected bf16", plan->name));
    tensor_ = std::make_unique<Tensor>(Tensor{plan->name, forward.kernel, backward.kernel});
}

AttentionOnDevice::~AttentionOnDevice() = default;

std::string AttentionOnDevice::text() const {
    if (tensor_ == nullptr) return "fast, on CUDA cores";
    return fmt::format("plan {}, on tensor cores (forward {}, backward {})", tensor_->plan, tensor_->forward.name,
                       tensor_->backward.name);
}

namespace {

struct HeadStrides {
    tensor_kernel::Strides qkv, o;
};
HeadStrides strides_of(const on_device::AttentionShape& s) {
    const std::int64_t width = std::int64_t{1} * s.heads * s.head_dim;
    return {{3 * width, s.head_dim, 3 * width * s.length}, {width, s.head_dim, width * s.length}};
}

tensor_kernel::BackwardCall backward_call(const on_device::AttentionShape& s) {
    tensor_kernel::BackwardCall call;
    call.batch = s.batch;
    call.heads = call.kv_heads = s.heads;
    call.n_q = call.n_k = s.length;
    call.head_dim = s.head_dim;
    call.scale = static_cast<double>(s.scale);
    const HeadStrides strides = strides_of(s);
    call.q_strides = call.k_strides = call.v_strides = strides.qkv;
    call.dq_strides = call.dk_strides = call.dv_strides = strides.qkv;
    call.o_strides = call.dout_strides = strides.o;
    return call;
}

}  // namespace

std::size_t AttentionOnDevice::scratch_bytes() const {
    return tensor_ == nullptr ? 0 : tensor_kernel::backward_workspace(backward_call(shape_));
}

void AttentionOnDevice::forward(const Bf16* qkv, Bf16* o, float* lse, on_device::Stream stream) const {
    const std::ptrdiff_t width = std::ptrdiff_t{1} * shape_.heads * shape_.head_dim;
    tensor_kernel::ForwardCall call;
    call.batch = shape_.batch;
    call.heads = call.kv_heads = shape_.heads;
    call.n_q = call.n_k = shape_.length;
    call.head_dim = shape_.head_dim;
    call.scale = static_cast<double>(shape_.scale);
    call.q = qkv;
    call.k = qkv + width;
    call.v = qkv + 2 * width;
    call.o = o;
    call.lse = lse;
    const HeadStrides strides = strides_of(shape_);
    call.q_strides = call.k_strides = call.v_strides = strides.qkv;
    call.o_strides = strides.o;
    tensor_kernel::launch_forward(call, tensor_->forward, stream);
}

void AttentionOnDevice::backward(const Bf16* qkv, const Bf16* o, const float* lse, const Bf16* dout, Bf16* dqkv,
                                 void* scratch, bool deterministic, on_device::Stream stream) const {
    const std::ptrdiff_t width = std::ptrdiff_t{1} * shape_.heads * shape_.head_dim;
    tensor_kernel::BackwardCall call = backward_call(shape_);
    call.deterministic = deterministic;
    call.q = qkv;
    call.k = qkv + width;
    call.v = qkv + 2 * width;
    call.o = o;
    call.dout = dout;
    call.lse = lse;
    call.dq = dqkv;
    call.dk = dqkv + width;
    call.dv = dqkv + 2 * width;
    call.workspace = scratch;
    tensor_kernel::launch_backward(call, tensor_->backward, stream);
}

}  // namespace faultline::gpt
