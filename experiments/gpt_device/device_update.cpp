// SPDX-License-Identifier: Apache-2.0
// From the gradients of micro-batches to the next weights.
#include <faultline/gpt_device/device_state.hpp>

#include <faultline/gpt_device/exchange_kernels.hpp>
#include <faultline/gpt_device/optimizers.hpp>
#include <faultline/gpt_device/qk_clip.hpp>

namespace faultline::gpt {

using on_device::StepResult;

void DeviceTrainer::State::accumulate(const GradientRange& of) {
    if (memory.micro_gradient != memory.gradient)
        on_device::accumulate_gradient(pass->at<float>(memory.micro_gradient) + of.first,
                                       pass->at<std::uint8_t>(memory.kinds) + of.first / 8, rounds(), of.count,
                                       pass->scalars(), pass->at<float>(memory.gradient) + of.first, stream);
}

void DeviceTrainer::State::run_micro_batch(Pass::Watch watch, bool last) {
    if (!last || !exchange.active()) {
        pass->forward_backward(watch);
        accumulate({0, count()});
        return;
    }
    pass->layer_done = [this](int layer) {
        accumulate(range_of_layer(layout, layer));
        exchange.layer_done(layer, pass->at<float>(memory.gradient), stream);
    };
    pass->forward_backward(watch);
    pass->layer_done = nullptr;
    for (const GradientRange& of : ranges_beside_layers(layout)) accumulate(of);
    exchange.finish(pass->at<float>(memory.gradient), pass->loss_sum(),
                    monitors ? pass->at<on_device::HeadTotals>(memory.totals) : nullptr, stream);
}

void DeviceTrainer::State::finish_gradient(StepResult* left) {
    auto* gradient = pass->at<float>(memory.gradient);
    const auto* kinds = pass->at<std::uint8_t>(memory.kinds);
    auto* sums = pass->at<double>(memory.sums);
    if (!exchange.gathers())
        return on_device::finish_gradient(gradient, kinds, rounds_late(), count(), pass->loss_sum(), pass->scalars(),
                                          sums, left, stream);
    on_device::finish_gathered_gradient(exchange.parts(), gradient, kinds,
                                        rounds() && memory.micro_gradient == memory.gradient, count(), pass->loss_sum(),
                                        pass->scalars(), sums, left, stream);
    exchange.release(stream);
}

void DeviceTrainer::State::run_update() {
    auto* left = pass->at<StepResult>(memory.result);
    finish_gradient(left);
    const OptimizerConfig& o = config.optimizer;
    const auto decay = static_cast<float>(o.weight_decay);
    const on_device::UpdateArrays arrays{pass->at<float>(memory.gradient),
                                         pass->at<std::uint8_t>(memory.kinds),
                                         rounds_late(),
                                         count(),
                                         pass->scalars(),
                                         left,
                                         pass->at<float>(memory.weights),
                                         pass->at<float>(memory.first),
                                         operands(),
                                         update_apart ? pass->at<float>(memory.proposed) : nullptr};
    if (o.kind == OptimizerKind::sgd) {
        on_device::sgd(arrays, static_cast<float>(o.momentum), decay, stream);
    } else {
        const bool muon = o.kind == OptimizerKind::muon;
        if (muon)
            on_device::Muon(layout, config.model, o)
                .update(arrays, pass->products(), pass->at<char>(memory.muon), stream);
        const on_device::AdamwSettings settings{static_cast<float>(o.beta1),
                                                static_cast<float>(o.beta2),
                                                static_cast<float>(o.epsilon),
                                                decay,
                                                muon ? static_cast<float>(o.adamw_rate) : 1.0F,
                                                muon};
        on_device::adamw(arrays.gradient, arrays.kinds, arrays.round, count(), settings, pass->scalars(), left,
                         arrays.weights, arrays.first, pass->at<float>(memory.second), arrays.operands, arrays.proposed,
                         stream);
    }
    if (update_apart) {
        faults.at_update(arrays.proposed);
        faults.join_update_records();
    }
    if (projected) project();
    if (hooks.update == nullptr) finish_update();
}

void DeviceTrainer::State::finish_update() {
    const auto* left = pass->at<StepResult>(memory.result);
    auto* weights = pass->at<float>(memory.weights);
    if (update_apart)
        on_device::apply_update(pass->at<float>(memory.proposed), count(), left, weights, operands(), stream);
    if (config.qk_clip == 0 && !hook_uses.control) return;
    on_device::qk_clip(pass->at<on_device::HeadTotals>(memory.totals),
                       {layout.layer(0).w_in, layer_step(), layout.in_columns(), config.model.layers,
                        config.model.heads, config.model.head_dim()},
                       pass->scalars(), left, weights, operands(), stream);
}

void DeviceTrainer::State::show_update() {
    const auto width = static_cast<std::size_t>(config.model.width);
    const auto blocks = [&](auto&& copy) {
        for (int l = 0; l < config.model.layers; ++l)
            copy(static_cast<std::size_t>(layout.layer(l).w_in),
                 width * static_cast<std::size_t>(layout.in_columns()) * sizeof(float));
    };
    const auto* weights = pass->at<float>(memory.weights);
    auto* proposed = pass->at<float>(memory.proposed);
    blocks([&](std::size_t at, std::size_t bytes) {
        on_device::download_later(shown_weights.data() + at, weights + at, bytes, stream);
        on_device::download_later(shown_update.data() + at, proposed + at, bytes, stream);
    });
    on_device::wait(stream);
    std::vector<ParameterUpdate> updates;
    for (const Parameter& p : layout.all())
        if (p.role == Role::w_q || p.role == Role::w_k)
            updates.push_back(
                {p.name, p.layer, p.role, p.of(std::span<const float>(shown_weights)), p.of(std::span(shown_update))});
    hooks.update->before_apply(next, updates);
    blocks([&](std::size_t at, std::size_t bytes) {
        on_device::upload(proposed + at, shown_update.data() + at, bytes, stream);
    });
    application.launch(stream);
}

}  // namespace faultline::gpt
