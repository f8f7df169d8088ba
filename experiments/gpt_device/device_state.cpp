// SPDX-License-Identifier: Apache-2.0
// How a run on the device is set up.
#include <faultline/gpt_device/device_state.hpp>

#include <algorithm>
#include <variant>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/gpt_device/optimizers.hpp>
#include <faultline/ranks/errors.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::gpt {

const TrainConfig& checked_for_device(const TrainConfig& config) {
    check(config.model);
    check(config);
    if (const std::string why = refusal(config); !why.empty()) throw RequestError(why);
    return config;
}

std::vector<std::uint8_t> kinds_of(const ParameterLayout& layout) {
    std::vector<std::uint8_t> kinds(static_cast<std::size_t>(layout.size()) / 8);
    for (const Parameter& p : layout.all()) {
        std::uint8_t kind = p.is_matrix() ? on_device::decays : 0;
        // As Gpt::add_groups: what comes out of a product as bf16. wte's part is rounded where it is made.
        const bool linear = p.role != Role::embedding && (p.is_matrix() || p.name.find(".b_") != std::string::npos);
        if (linear) kind |= on_device::comes_rounded;
        if (p.is_matrix() && p.role != Role::embedding) kind |= on_device::hidden_matrix;
        for (std::ptrdiff_t i = 0; i < p.rows; ++i)
            std::fill_n(kinds.begin() + (p.offset + i * p.stride) / 8, p.cols / 8, kind);
    }
    return kinds;
}

std::vector<Fault> on_the_card(const AttentionOnDevice& attention, std::vector<Fault> faults) {
    if (attention.emulated() == nullptr) return faults;
    for (const Fault& fault : faults)
        if (std::holds_alternative<Site>(fault.site) && fault.sampled)
            throw RequestError(fmt::format(
                "device cuda: fault \"{}\": attention is emulated, which records all of it: expected no record=sample",
                to_string(fault)));
    std::erase_if(faults, [](const Fault& fault) { return std::holds_alternative<Site>(fault.site); });
    return faults;
}

DeviceTrainer::State::State(const TrainConfig& wanted, const TokenData& tokens, const WindowOrder& order,
                            const DeviceOptions& options, const Hooks& hooked)
    : config(on_the_device(checked_for_device(wanted), options)),
      data(tokens),
      windows(order),
      layout(config.model),
      hook_uses(hooked.step != nullptr ? hooked.step->uses() : StepHookUse{false, false, false}),
      monitors(options.monitors || config.qk_clip > 0 || hook_uses.heads || hook_uses.control),
      may_norm(config.model.qk_norm != QkNorm::none || hook_uses.control),
      attention(config, may_norm),
      planted(options.faults),
      faults(config, layout, on_the_card(attention, planted != nullptr ? planted->faults() : std::vector<Fault>())),
      projecting(options.projection),
      projected(memory_of_projection()),
      update_apart(hooked.update != nullptr || faults.alters_update() || projecting != nullptr),
      exchange(options.ranks, config, layout, options.exchange),
      memory(config, layout,
             {attention.scratch_bytes(), muon_scratch(), attention.parts(), monitors, may_norm, faults.bytes(),
              projected ? projected->bytes : 0, update_apart, exchange.gathers() && exchange.rounds() == 1}),
      input(config),
      staged{on_device::PinnedMemory(input.bytes * static_cast<std::size_t>(rounds_of(options.ranks, config))),
             on_device::PinnedMemory(input.bytes * static_cast<std::size_t>(rounds_of(options.ranks, config)))},
      result(memory.result_bytes()),
      injected(faults.totals_bytes()),
      removed(projected ? projected->energy_bytes : sizeof(RemovedEnergy)),
      hooks(hooked) {
    if (hooks.attention != nullptr || hooks.model != nullptr)
        throw RequestError(
            "device cuda: hooks: the device's trainer has those of the update and of the step: expected no others");
    // Where faults stand in the gradients of q, k and v is known of rows of 3 widths.
    if (config.model.output_gate && faults.any())
        throw RequestError(
            "device cuda: inject: a model with an output gate has no faults there: expected none, or no gate");
    if (exchange.active() && attention.emulated() != nullptr)
        throw RequestError(
            "device cuda: attention: " + attention.text() +
            ": several ranks have no emulated attention: expected one rank, attention fast, or a plan that the tensor cores run");
    if (exchange.active() && hooks.update != nullptr)
        throw RequestError("device cuda: hooks: several ranks have none of the update: expected none, or one rank");
    if (hooks.update != nullptr) {
        shown_weights.resize(count());
        shown_update.resize(count());
    }
    switches.qk_clip = config.qk_clip;
    try {
        set_up(options);
    } catch (const SharedFailure&) {
        exchange.part(stream);
        throw;
    }
}

void DeviceTrainer::State::set_up(const DeviceOptions& options) {
    // What goes wrong is one rank's trouble, of which the others hear before they wait for its sums.
    together(options.ranks, [&] { prepare(options.deterministic); });
    try {
        together(options.ranks, [&] {
            run_micro_batch(most_watched(), true);
            run_update();
        });
        exchange.wait(stream);
    } catch (...) {
        exchange.call_off();  // memory that a sum on its way uses is not freed, and there are no graphs yet
        throw;
    }
    together(options.ranks, [&] {
        record_graphs();
        start();
    });
}

void DeviceTrainer::State::prepare(bool deterministic) {
    check_tokens(data, config.model.vocabulary, config.model.context);
    base.emplace(memory.plan.bytes(), memory.plan.text());
    pass = make_pass(config, layout, memory, attention, faults, base->data(), stream, deterministic);
    faults.bind(pass->at<char>(memory.faults), pass->scalars(), stream);
    if (config.monitor_every > 0) late_spectra = std::make_unique<LateSpectra>(config.model, stream);
    const std::vector<std::uint8_t> kinds = kinds_of(layout);
    on_device::upload(pass->at<char>(memory.kinds), kinds.data(), kinds.size(), stream);
    start();
    stage(0);
    copy_input(0, 0);
    faults.prepare(0, 0, true);
}

std::size_t DeviceTrainer::State::muon_scratch() const {
    if (config.optimizer.kind != OptimizerKind::muon) return 0;
    return on_device::Muon(layout, config.model, config.optimizer).scratch_bytes();
}

void DeviceTrainer::State::record_graphs() {
    const auto record = [this](Recorded& to, bool last) {
        const auto graph = [&](Pass::Watch watch) {
            return on_device::Graph(stream, [this, watch, last] { run_micro_batch(watch, last); });
        };
        to.plain = graph(watched());
        if (most_watched() == Pass::Watch::rows) to.detailed = graph(Pass::Watch::rows);
    };
    if (attention.emulated() == nullptr) {
        if (exchange.rounds() > 1) record(micro_batch, false);
        record(last_micro_batch, true);
    }
    update = on_device::Graph(stream, [this] { run_update(); });
    if (hooks.update != nullptr) application = on_device::Graph(stream, [this] { finish_update(); });
}

void DeviceTrainer::State::start() {
    std::vector<float> weights(count());
    layout.initialize(config.seed, std::span(weights), hardware_threads());
    set_weights(weights);
    clear_moments();
    take_directions();
}

void DeviceTrainer::State::clear_moments() {
    on_device::clear(pass->at<char>(memory.first), count() * sizeof(float), stream);
    on_device::clear(pass->at<char>(memory.second), seconds() * sizeof(float), stream);
    on_device::wait(stream);
    switches.optimizer_steps = 0;
}

void DeviceTrainer::State::set_weights(std::span<const float> weights) {
    if (late_spectra) late_spectra->before_weights_change();
    on_device::upload(pass->at<char>(memory.weights), weights.data(), weights.size_bytes(), stream);
    pass->round_weights();
    on_device::wait(stream);
}

std::vector<float> DeviceTrainer::State::host(std::size_t region) const {
    std::vector<float> values(region == memory.second ? seconds() : count());
    on_device::download(values.data(), pass->at<char>(region), values.size() * sizeof(float), stream);
    return values;
}

}  // namespace faultline::gpt
