// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/emulated_attention.hpp>

#include <algorithm>

#include <faultline/base/parallel.hpp>
#include <faultline/device/device.hpp>

namespace faultline::gpt {

EmulatedAttention::EmulatedAttention(const ModelConfig& model, int batch, const AttentionBackend* backend)
    : model_(model),
      batch_(static_cast<std::size_t>(batch)),
      backend_(backend),
      states_(static_cast<std::size_t>(model.layers) * batch_),
      scratch_(batch_) {}

void EmulatedAttention::begin(std::int64_t step, int micro_step, AttentionHook* hook) {
    step_ = step;
    micro_step_ = micro_step;
    hook_ = hook;
}

void EmulatedAttention::for_sequences(const std::function<void(std::size_t)>& work) {
    const int threads = std::min(backend_->calls_at_once(hardware_threads()), hardware_threads());
    crew_.run(batch_, threads, work);
}

StepContext EmulatedAttention::context(bool instrumented) {
    if (backend_ == nullptr) backend_ = &device::backend();
    StepContext c;
    c.step = step_;
    c.micro_step = micro_step_;
    c.attention = instrumented ? hook_ : nullptr;
    c.emulating = backend_;
    return c;
}

LayerAt EmulatedAttention::at(int layer, std::size_t sequence) const {
    return {layer, static_cast<int>(sequence), 1, model_.context};
}

template <class T>
MatrixView<T> EmulatedAttention::of_sequence(T* all, std::size_t sequence) const {
    const std::ptrdiff_t rows = model_.context, columns = model_.width;
    return {all + static_cast<std::ptrdiff_t>(sequence) * rows * columns, rows, columns};
}

std::vector<float> EmulatedAttention::forward(int layer, const Operands& in, const std::vector<double>& scale,
                                              bool instrumented, bool rows) {
    std::vector<float> o(in.q.size());
    StepContext how = context(instrumented);
    how.detailed = rows;
    for_sequences([&](std::size_t b) {
        attention_layer_forward<float>(model_, how, at(layer, b), of_sequence(in.q.data(), b),
                                       of_sequence(in.k.data(), b), of_sequence(in.v.data(), b), scale,
                                       of_sequence(o.data(), b), state(layer, b), scratch_[b]);
    });
    return o;
}

EmulatedAttention::Gradients EmulatedAttention::backward(int layer, const Operands& in,
                                                         const std::vector<double>& scale,
                                                         const std::vector<float>& dout, bool instrumented, bool sums) {
    Gradients to{std::vector<float>(in.q.size()), std::vector<float>(in.q.size()), std::vector<float>(in.q.size())};
    StepContext how = context(instrumented);
    how.zero_sums = sums;
    for_sequences([&](std::size_t b) {
        // An emulated head's forward is in its state, o with it.
        attention_layer_backward<float>(
            model_, how, at(layer, b), of_sequence(in.q.data(), b), of_sequence(in.k.data(), b),
            of_sequence(in.v.data(), b), {}, of_sequence(dout.data(), b), scale, of_sequence(to.q.data(), b),
            of_sequence(to.k.data(), b), of_sequence(to.v.data(), b), state(layer, b), scratch_[b]);
    });
    return to;
}

EmulatedAttention::Seen EmulatedAttention::seen(int layer) const {
    Seen to;
    for (std::size_t b = 0; b < batch_; ++b)
        for (const HeadStatistics& head : states_[static_cast<std::size_t>(layer) * batch_ + b].heads) {
            to.largest.push_back(static_cast<float>(head.max_logit));
            to.zero_sums.insert(to.zero_sums.end(), {head.zero_sum, head.zero_sum_abs});
            if (head.detailed) to.rows.insert(to.rows.end(), {head.saturated, head.entropy});
        }
    return to;
}

}  // namespace faultline::gpt
