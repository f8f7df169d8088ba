// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/device_trainer.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/gpt_device/checkpoint.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>
#include <faultline/gpt_device/device_faults.hpp>
#include <faultline/gpt_device/exchange.hpp>
#include <faultline/gpt_device/late_spectra.hpp>
#include <faultline/gpt_device/optimizers.hpp>
#include <faultline/gpt_device/pass.hpp>
#include <faultline/gpt_device/qk_clip.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::gpt {
namespace {

using on_device::StepResult;
using on_device::StepScalars;

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

const TrainConfig& checked(const TrainConfig& config) {
    check(config.model);
    check(config);
    if (const std::string why = refusal(config); !why.empty()) throw RequestError(why);
    return config;
}

TrainConfig on_this_back_end(TrainConfig config, const DeviceOptions& options) {
    config.also.emplace_back("device", "cuda");
    config.also.emplace_back("deterministic", options.deterministic ? "true" : "false");
    return config;
}

/// Kind of each octet of the flat weights.
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

}  // namespace

struct DeviceTrainer::State {
    TrainConfig config;
    const TokenData& data;
    const WindowOrder& windows;
    ParameterLayout layout;
    bool monitors, may_norm;
    AttentionOnDevice attention;
    PlantedFaults* planted;
    DeviceFaults faults;
    bool update_apart;  ///< it stands in memory before it is added
    RunMemory memory;
    InputLayout input;
    on_device::Device device;
    on_device::OwnedStream stream;
    Exchange exchange;
    std::optional<on_device::Memory> base;
    std::unique_ptr<Pass> pass;
    /// Inputs of this step and of the next, for each micro-batch; and where the step's result comes.
    std::array<on_device::PinnedMemory, 2> staged;
    std::array<std::int64_t, 2> staged_step{-1, -1};
    on_device::PinnedMemory result, totals, injected;
    /// A micro-batch, and the last one of a step, which adds up over ranks; of each also one in which the rows are looked at.
    struct Recorded {
        on_device::Graph plain, detailed;
    };
    Recorded micro_batch, last_micro_batch;
    on_device::Graph update, application;
    /// What an update hook sees, flat; of it W_Q, W_K and W_V alone are filled.
    std::vector<float> shown_weights, shown_update;
    Hooks hooks;
    std::unique_ptr<LateSpectra> late_spectra;
    std::function<void(StepReport&)> pending_spectra;
    DeviceSwitches switches;
    std::function<bool(std::int64_t)> capture_wanted;
    std::function<void(std::int64_t, int, const Training::Captured&)> capture_take;
    std::int64_t next = 0;
    StepReport report;
    std::optional<NonFinite> failure;

    State(const TrainConfig& wanted, const TokenData& tokens, const WindowOrder& order, const DeviceOptions& options,
          const Hooks& hooked)
        : config(on_this_back_end(checked(wanted), options)),
          data(tokens),
          windows(order),
          layout(config.model),
          monitors(options.monitors || config.qk_clip > 0 || hooked.step != nullptr),
          may_norm(config.model.qk_norm != QkNorm::none || hooked.step != nullptr),
          attention(config, may_norm),
          planted(options.faults),
          faults(config, layout, planted != nullptr ? planted->faults() : std::vector<Fault>()),
          update_apart(hooked.update != nullptr || faults.alters_update()),
          memory(config, layout,
                 {attention.scratch_bytes(), muon_scratch(), attention.parts(), monitors, config.monitor_every > 0,
                  may_norm, faults.bytes(), update_apart}),
          input(config),
          exchange(options.ranks, config, layout, options.exchange),
          staged{on_device::PinnedMemory(input.bytes * static_cast<std::size_t>(exchange.rounds())),
                 on_device::PinnedMemory(input.bytes * static_cast<std::size_t>(exchange.rounds()))},
          result(sizeof(StepResult)),
          totals(sizeof(on_device::HeadTotals) * heads()),
          injected(faults.totals_bytes()),
          hooks(hooked) {
        if (hooks.attention != nullptr || hooks.model != nullptr)
            throw RequestError(
                "device cuda: hooks: the device's trainer has those of the update and of the step: expected no others");
        if (exchange.active() && (faults.any() || hooks.update != nullptr))
            throw RequestError("device cuda: inject: several ranks have no faults: expected none, or one rank");
        if (hooks.update != nullptr) {
            shown_weights.resize(count());
            shown_update.resize(count());
        }
        switches.qk_clip = config.qk_clip;
        check_tokens(data, config.model.vocabulary, config.model.context);
        // A card without room is one rank's trouble, of which the others hear before they wait for its sums.
        together(options.ranks, [&] { base.emplace(memory.plan.bytes(), memory.plan.text()); });
        pass = make_pass(config, layout, memory, attention, faults, base->data(), stream, options.deterministic);
        faults.bind(pass->at<char>(memory.faults), pass->scalars(), stream);
        if (config.monitor_every > 0)
            late_spectra = std::make_unique<LateSpectra>(config.model, pass->at<float>(memory.snapshot),
                                                         pass->at<char>(memory.bases),
                                                         pass->at<on_device::Bidiagonal>(memory.bidiagonals), stream);
        const std::vector<std::uint8_t> kinds = kinds_of(layout);
        on_device::upload(pass->at<char>(memory.kinds), kinds.data(), kinds.size(), stream);
        // Once through everything, so that kernels are loaded and products chosen before graphs are made of them; what it
        // does to the weights is undone by start().
        start();
        stage(0);
        copy_input(0, 0);
        faults.prepare(0, 0, true);
        run_micro_batch(most_watched(), true);
        run_update();
        exchange.wait(stream);
        record_graphs();
        start();
    }

    [[nodiscard]] std::size_t muon_scratch() const {
        if (config.optimizer.kind != OptimizerKind::muon) return 0;
        return on_device::Muon(layout, config.model, config.optimizer).scratch_bytes();
    }
    /// Of the second moments.
    [[nodiscard]] std::size_t seconds() const { return config.optimizer.kind == OptimizerKind::sgd ? 0 : count(); }
    void record_graphs() {
        const auto record = [this](Recorded& to, bool last) {
            const auto graph = [&](Pass::Watch watch) {
                return on_device::Graph(stream, [this, watch, last] { run_micro_batch(watch, last); });
            };
            to.plain = graph(watched());
            if (most_watched() == Pass::Watch::rows) to.detailed = graph(Pass::Watch::rows);
        };
        if (exchange.rounds() > 1) record(micro_batch, false);
        record(last_micro_batch, true);
        update = on_device::Graph(stream, [this] { run_update(); });
        if (hooks.update != nullptr) application = on_device::Graph(stream, [this] { finish_update(); });
    }
    /// In every step.
    [[nodiscard]] Pass::Watch watched() const { return monitors ? Pass::Watch::every_step : Pass::Watch::nothing; }
    [[nodiscard]] Pass::Watch most_watched() const {
        if (!monitors) return Pass::Watch::nothing;
        return config.monitor_every > 0 ? Pass::Watch::rows : Pass::Watch::every_step;
    }
    [[nodiscard]] bool rows_are_due() const {
        return most_watched() == Pass::Watch::rows && next % config.monitor_every == 0;
    }

    /// Of all layers.
    [[nodiscard]] std::size_t heads() const {
        return static_cast<std::size_t>(config.model.layers * config.model.heads);
    }
    [[nodiscard]] std::size_t count() const { return static_cast<std::size_t>(layout.size()); }

    /// Initial weights, moments of zero.
    void start() {
        std::vector<float> weights(count());
        layout.initialize(config.seed, std::span(weights), hardware_threads());
        set_weights(weights);
        clear_moments();
    }
    void clear_moments() {
        on_device::clear(pass->at<char>(memory.first), count() * sizeof(float), stream);
        on_device::clear(pass->at<char>(memory.second), seconds() * sizeof(float), stream);
        on_device::wait(stream);
        switches.optimizer_steps = 0;
    }
    void set_weights(std::span<const float> weights) {
        on_device::upload(pass->at<char>(memory.weights), weights.data(), weights.size_bytes(), stream);
        pass->round_weights();
        on_device::wait(stream);
    }
    [[nodiscard]] std::vector<float> host(std::size_t region) const {
        std::vector<float> values(region == memory.second ? seconds() : count());
        on_device::download(values.data(), pass->at<char>(region), values.size() * sizeof(float), stream);
        return values;
    }

    [[nodiscard]] bool rounds() const { return config.model.bf16; }
    /// Where rounding of a weight's gradient is left to those who read it: with one micro-batch.
    [[nodiscard]] bool rounds_late() const { return rounds() && config.accumulate == 1; }

    /// The micro-batch's gradient joins the step's, where there are several.
    void accumulate(const GradientRange& of) {
        if (config.accumulate > 1)
            on_device::accumulate_gradient(pass->at<float>(memory.micro_gradient) + of.first,
                                           pass->at<std::uint8_t>(memory.kinds) + of.first / 8, rounds(), of.count,
                                           pass->scalars(), pass->at<float>(memory.gradient) + of.first, stream);
    }
    void run_micro_batch(Pass::Watch watch, bool last) {
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
    void run_update() {
        auto* left = pass->at<StepResult>(memory.result);
        on_device::finish_gradient(pass->at<float>(memory.gradient), pass->at<std::uint8_t>(memory.kinds),
                                   rounds_late(), count(), pass->loss_sum(), pass->scalars(),
                                   pass->at<double>(memory.sums), left, stream);
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
                             arrays.weights, arrays.first, pass->at<float>(memory.second), arrays.operands,
                             arrays.proposed, stream);
        }
        if (update_apart) {
            faults.at_update(arrays.proposed);
            faults.join_update_records();
        }
        if (hooks.update == nullptr) finish_update();
    }
    [[nodiscard]] on_device::Bf16* operands() const {
        return rounds() ? pass->at<on_device::Bf16>(memory.operands) : nullptr;
    }
    /// From the optimizer's proposal, where it stands apart, to the next weights.
    void finish_update() {
        const auto* left = pass->at<StepResult>(memory.result);
        auto* weights = pass->at<float>(memory.weights);
        if (update_apart)
            on_device::apply_update(pass->at<float>(memory.proposed), count(), left, weights, operands(), stream);
        if (config.qk_clip == 0 && hooks.step == nullptr) return;
        on_device::qk_clip(
            pass->at<on_device::HeadTotals>(memory.totals),
            {layout.layer(0).w_in, layer_step(), config.model.layers, config.model.heads, config.model.head_dim()},
            pass->scalars(), left, weights, operands(), stream);
    }
    /// W_Q and W_K of the proposal through the hook, and all of it onto the weights.
    void show_update() {
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
                updates.push_back({p.name, p.layer, p.role, p.of(std::span<const float>(shown_weights)),
                                   p.of(std::span(shown_update))});
        hooks.update->before_apply(next, updates);
        blocks([&](std::size_t at, std::size_t bytes) {
            on_device::upload(proposed + at, shown_update.data() + at, bytes, stream);
        });
        application.launch(stream);
    }

    [[nodiscard]] StepScalars scalars_of(std::int64_t step, int micro_step) const {
        const auto t = static_cast<double>(switches.optimizer_steps + 1);
        return {static_cast<float>(rate_of(step)),
                static_cast<float>(1 / (1 - std::pow(config.optimizer.beta1, t))),
                static_cast<float>(1 / (1 - std::pow(config.optimizer.beta2, t))),
                static_cast<float>(config.clip * switches.clip_factor),
                switches.qk_clip,
                micro_step};
    }
    [[nodiscard]] double rate_of(std::int64_t step) const {
        return learning_rate(config.schedule, step, config.steps) * switches.rate_factor;
    }
    /// Tokens, targets, and the tokens' places sorted by id (a counting sort: ascending within an id).
    void write_input(const Windows& of, char* to) const {
        const auto ids = [&](std::size_t offset) { return reinterpret_cast<std::int32_t*>(to + offset); };
        std::ranges::copy(of.tokens, ids(input.tokens));
        std::ranges::copy(of.targets, ids(input.targets));
        std::int32_t* starts = ids(input.starts);
        std::fill_n(starts, config.model.vocabulary + 1, 0);
        for (const std::int32_t token : of.tokens) ++starts[token + 1];
        for (int v = 0; v < config.model.vocabulary; ++v) starts[v + 1] += starts[v];
        std::vector<std::int32_t> next_of(starts, starts + config.model.vocabulary);
        std::int32_t* order = ids(input.order);
        for (std::size_t i = 0; i < of.tokens.size(); ++i)
            order[next_of[static_cast<std::size_t>(of.tokens[i])]++] = static_cast<std::int32_t>(i);
    }
    void stage(std::int64_t step) {
        const auto half = static_cast<std::size_t>(step % 2);
        if (staged_step[half] == step) return;
        staged_step[half] = -1;
        for (int round = 0; round < exchange.rounds(); ++round)
            write_input(training_windows(config, data, windows, step, exchange.micro_batch(round)),
                        staged[half].data() + static_cast<std::size_t>(round) * input.bytes);
        staged_step[half] = step;
    }
    /// The step's scalars are of now: a hook may have changed them since the tokens were staged.
    void copy_input(std::int64_t step, int micro_step) {
        char* from =
            staged[static_cast<std::size_t>(step % 2)].data() + static_cast<std::size_t>(micro_step) * input.bytes;
        const StepScalars scalars = scalars_of(step, micro_step);
        std::memcpy(from + input.scalars, &scalars, sizeof scalars);
        on_device::upload(pass->at<char>(memory.input), from, input.bytes, stream);
    }

    class Control;
    const StepReport& step();
    const StepReport& run_step() {
        stage(next);
        const bool captured = capture_wanted && capture_wanted(next);
        for (int round = 0; round < exchange.rounds(); ++round) {
            copy_input(next, round);
            plant(round);
            const Recorded& launches = round + 1 < exchange.rounds() ? micro_batch : last_micro_batch;
            if (captured)
                capture(round);
            else
                (rows_are_due() ? launches.detailed : launches.plain).launch(stream);
        }
        update.launch(stream);
        on_device::download_later(result.data(), pass->at<char>(memory.result), sizeof(StepResult), stream);
        if (monitors)
            on_device::download_later(totals.data(), pass->at<char>(memory.totals),
                                      heads() * sizeof(on_device::HeadTotals), stream);
        if (faults.any()) on_device::download_later(injected.data(), faults.totals(), faults.totals_bytes(), stream);
        if (hooks.update != nullptr && step_is_finite()) show_update();
        if (spectra_are_due()) begin_spectra();
        try {
            if (next + 1 < config.steps) stage(next + 1);  // while the device works
        } catch (const RequestError&) {
            staged_step[static_cast<std::size_t>((next + 1) % 2)] = -1;  // said when it is that step's turn
        }
        exchange.wait(stream);
        StepResult of{};
        std::memcpy(&of, result.data(), sizeof of);
        if (of.finite == 0) {
            find_non_finite();
            return report;
        }
        if (of.update_finite == 0) {
            failure = NonFinite{next, "an update", 0, 0};
            return report;
        }
        fill_report(of);
        if (faults.any()) {
            std::vector<Realised> did(faults.totals_bytes() / sizeof(Realised));
            std::memcpy(did.data(), injected.data(), faults.totals_bytes());
            planted->did(did);
        }
        const bool last = next + 1 == config.steps;
        const bool validate = config.validate_every > 0 && ((next + 1) % config.validate_every == 0 || last);
        report.validation_loss = validate ? validation_loss() : nan_value;
        if (hooks.step != nullptr) hooks.step->after_step(report);
        ++switches.optimizer_steps;
        ++next;
        return report;
    }

    void plant(int micro_step) { faults.prepare(next, micro_step, planted != nullptr && planted->stopped()); }
    /// Waits for it.
    [[nodiscard]] bool step_is_finite() const {
        on_device::wait(stream);
        StepResult of{};
        std::memcpy(&of, result.data(), sizeof of);
        return of.finite != 0 && of.update_finite != 0;
    }
    /// A micro-batch launched one by one, with its operands kept: the same kernels, and bits, as the recorded one.
    void capture(int round) {
        std::vector<Pass::Operands> layers(static_cast<std::size_t>(config.model.layers));
        pass->keep_operands(&layers);
        run_micro_batch(rows_are_due() ? Pass::Watch::rows : watched(), round + 1 == exchange.rounds());
        pass->keep_operands(nullptr);
        exchange.hand_over(round, layers, [&](int micro_step) { capture_take(next, micro_step, layers); });
    }

    void fill_report(const StepResult& of) {
        report.step = next;
        report.loss = of.loss / config.tokens_of_step();
        report.grad_norm = std::sqrt(of.squares);
        report.learning_rate = rate_of(next);
        report.layers = config.model.layers;
        report.heads = config.model.heads;
        report.qk_normed.clear();
        for (int l = 0; l < report.layers; ++l) report.qk_normed.push_back(pass->qk_normed(l) ? 1 : 0);
        report.extras.clear();
        if (monitors) fill_monitors();
        report.finish = nullptr;
        if (!late_spectra) return;
        clear_spectra(report);
        if (!spectra_are_due()) return;
        report.finish = std::move(pending_spectra);
        if (hooks.step != nullptr) finish_report();  // a hook acts on what it sees
    }
    [[nodiscard]] bool spectra_are_due() const {
        return late_spectra && (next % config.monitor_every == 0 || next + 1 == config.steps);
    }
    void finish_report() {
        if (report.finish) std::exchange(report.finish, nullptr)(report);
    }
    /// Of W_Q and W_K as the update leaves them.
    void begin_spectra() {
        pending_spectra = late_spectra->begin(pass->at<float>(memory.weights), layout.layer(0).w_in, layer_step());
    }
    /// Weights from one layer to the next.
    [[nodiscard]] std::ptrdiff_t layer_step() const {
        return config.model.layers > 1 ? layout.layer(1).w_in - layout.layer(0).w_in : 0;
    }

    /// As Trainer::fill_report.
    void fill_monitors() {
        std::vector<on_device::HeadTotals> seen(heads());
        std::memcpy(seen.data(), totals.data(), seen.size() * sizeof seen[0]);
        const double tokens = config.tokens_of_step(), rows = tokens - config.batch * config.accumulate;
        const bool due = rows_are_due() && rows > 0;
        report.zero_sum_total.resize(heads(), 0.0);
        for (std::vector<double>* values : {&report.max_logit, &report.qk_rms, &report.zero_sum, &report.zero_sum_abs,
                                            &report.saturated, &report.entropy})
            values->assign(heads(), nan_value);
        for (std::size_t i = 0; i < heads(); ++i) {
            const int layer = static_cast<int>(i) / config.model.heads;
            const std::vector<double>& switched = pass->switched_scales(layer);
            const double unit = attention.zero_sum_unit(switched.empty() ? static_cast<double>(attention.shape().scale)
                                                                         : switched[i % switched.size()]);
            report.max_logit[i] = seen[i].largest;
            report.qk_rms[i] = (seen[i].q_rms / tokens) * (seen[i].k_rms / tokens);
            report.zero_sum[i] = seen[i].zero_sum / unit;
            report.zero_sum_abs[i] = seen[i].zero_sum_abs / unit;
            report.zero_sum_total[i] += report.zero_sum[i];
            if (!due) continue;
            report.saturated[i] = seen[i].saturated / rows;
            report.entropy[i] = seen[i].entropy / rows;
        }
    }

    double validation_loss() {
        // Batches go round among the ranks; adding to zeros changes no bit of them.
        const int ranks = exchange.active() ? exchange.ranks()->size() : 1;
        std::vector<double> own(static_cast<std::size_t>(config.validation_batches), 0.0), losses = own;
        std::vector<char> staging(input.bytes);
        for (int b = exchange.active() ? exchange.ranks()->rank() : 0; b < config.validation_batches; b += ranks) {
            write_input(validation_windows(config, data, b), staging.data());
            on_device::upload(pass->at<char>(memory.input), staging.data(), input.bytes, stream);
            pass->loss();
            double& sum = own[static_cast<std::size_t>(b)];
            on_device::download(&sum, reinterpret_cast<const char*>(pass->loss_sum()), sizeof sum, stream);
        }
        add_in_rank_order(exchange.ranks(), std::span(losses), std::span<const double>(own));
        double total = 0;
        for (const double sum : losses) total += sum;
        return total / (static_cast<double>(config.validation_batches) * config.batch * config.model.context);
    }

    /// The pass is a function of its inputs: going through it again finds the value that went first; of several ranks', that of the
    /// earliest micro-batch.
    void find_non_finite() {
        failure = NonFinite{next, "loss", 0, 0};
        int found_in = std::numeric_limits<int>::max();  // gradients come after all micro-batches
        for (int round = 0; round < exchange.rounds() && found_in > config.accumulate; ++round) {
            copy_input(next, round);
            plant(round);
            pass->forward_backward(Pass::Watch::nothing);
            for (const SiteOfPass& site : pass->sites())
                if (const std::ptrdiff_t at = pass->first_non_finite(site); at >= 0) {
                    failure = NonFinite{next, site.name, at / site.columns, at % site.columns};
                    found_in = exchange.micro_batch(round);
                    break;
                }
        }
        if (found_in > config.accumulate) find_non_finite_gradient();
        exchange.first_of_ranks(found_in, *failure);
    }
    void find_non_finite_gradient() {
        const std::vector<float> gradient = host(memory.micro_gradient);
        const auto all = layout.all();
        for (auto p = all.rbegin(); p != all.rend(); ++p) {  // in the order of the backward, nearly
            const MatrixView<const float> view = p->of(std::span<const float>(gradient));
            for (std::ptrdiff_t i = 0; i < view.rows; ++i)
                for (std::ptrdiff_t j = 0; j < view.cols; ++j)
                    if (!std::isfinite(view(i, j))) {
                        failure = NonFinite{next, "gradient of " + p->name, i, j};
                        return;
                    }
        }
    }
};

/// What a step hook may do.
class DeviceTrainer::State::Control final : public StepControl {
  public:
    explicit Control(State& state) : s_(state) {}
    /// Whether launches have to be recorded anew.
    [[nodiscard]] bool switched() const { return switched_; }
    [[nodiscard]] int layers() const override { return s_.config.model.layers; }
    [[nodiscard]] int heads() const override { return s_.config.model.heads; }
    [[nodiscard]] int head_dim() const override { return s_.config.model.head_dim(); }
    void enable_qk_norm(int layer, std::span<const double> logit_scale) override {
        std::vector<double> scale(logit_scale.begin(), logit_scale.end());
        if (scale.empty())
            scale.assign(static_cast<std::size_t>(heads()), 1.0 / std::sqrt(static_cast<double>(head_dim())));
        s_.pass->switch_qk_norm(layer, scale);
        switched_ = true;
    }
    [[nodiscard]] bool qk_norm_enabled(int layer) const override { return s_.pass->qk_normed(layer); }
    void reset_optimizer() override { s_.clear_moments(); }
    void set_learning_rate_factor(double factor) override { s_.switches.rate_factor = factor; }
    void set_clip_factor(double factor) override { s_.switches.clip_factor = factor; }
    void set_fp32_ffn(bool on) override {
        if (on)
            throw RequestError(
                "device cuda: fp32-ffn: the device's trainer has none: expected another intervention, or "
                "--device cpu");
    }
    void set_qk_clip(double tau) override { s_.switches.qk_clip = tau; }
    [[nodiscard]] MatrixView<const float> weight(std::string_view name) const override {
        if (weights_.empty()) weights_ = s_.host(s_.memory.weights);
        return s_.layout.at(name).of(std::span<const float>(weights_));
    }

  private:
    State& s_;
    bool switched_ = false;
    mutable std::vector<float> weights_;  // of before the step, fetched where asked for
};

const StepReport& DeviceTrainer::State::step() {
    if (hooks.step != nullptr) {
        Control control(*this);
        hooks.step->before_step(next, next == 0 ? nullptr : &report, control);
        if (control.switched()) record_graphs();
    }
    return run_step();
}

bool device_trainer_is_built() { return true; }

void check_for_device(const TrainConfig& config, const std::vector<Fault>& faults) {
    (void)AttentionOnDevice(checked(config), true);
    (void)DeviceFaults(config, ParameterLayout(config.model), faults);
}

DeviceTrainer::DeviceTrainer(const TrainConfig& config, const TokenData& data, const WindowOrder& windows,
                             const DeviceOptions& options, const Hooks& hooks)
    : state_(std::make_unique<State>(config, data, windows, options, hooks)) {}
DeviceTrainer::~DeviceTrainer() = default;

std::vector<std::string> DeviceTrainer::description() const {
    std::vector<std::string> lines{
        fmt::format("{}: {:.1f} million parameters, attention {}", state_->device.name(),
                    static_cast<double>(state_->layout.size()) * 1e-6, state_->attention.text()),
        "memory " + state_->memory.plan.text()};
    if (state_->exchange.active()) lines.push_back("ranks: " + state_->exchange.text());
    return lines;
}
std::string DeviceTrainer::device_name() const { return state_->device.name(); }
const TrainConfig& DeviceTrainer::config() const { return state_->config; }
std::ptrdiff_t DeviceTrainer::parameters() const { return state_->layout.size(); }
std::string DeviceTrainer::reductions() const { return state_->exchange.text(); }
std::int64_t DeviceTrainer::next_step() const { return state_->next; }
bool DeviceTrainer::finished() const { return state_->next >= state_->config.steps || state_->failure.has_value(); }
const StepReport& DeviceTrainer::step() { return state_->step(); }
const std::optional<NonFinite>& DeviceTrainer::failure() const { return state_->failure; }
const StepReport& DeviceTrainer::report() const {
    state_->finish_report();
    return state_->report;
}
void DeviceTrainer::capture(std::function<bool(std::int64_t)> wanted,
                            std::function<void(std::int64_t, int, const Captured&)> take) {
    state_->capture_wanted = std::move(wanted);
    state_->capture_take = std::move(take);
}
double DeviceTrainer::validation_loss() { return state_->validation_loss(); }
std::vector<float> DeviceTrainer::weights() const { return state_->host(state_->memory.weights); }
void DeviceTrainer::set_weights(std::span<const float> weights) { state_->set_weights(weights); }
std::vector<float> DeviceTrainer::gradient() const {
    std::vector<float> values = state_->host(state_->memory.gradient);
    if (!state_->rounds_late()) return values;
    const std::vector<std::uint8_t> kinds = kinds_of(state_->layout);
    for (std::size_t i = 0; i < values.size(); ++i)
        if ((kinds[i / 8] & on_device::comes_rounded) != 0) values[i] = round_to_bf16(values[i]);
    return values;
}

void DeviceTrainer::save(const std::string& path) const {
    state_->finish_report();
    DeviceSwitches switches = state_->switches;
    for (int l = 0; l < state_->config.model.layers; ++l)
        switches.qk_scales.push_back(state_->pass->switched_scales(l));
    save_device_checkpoint(
        path, state_->config, state_->next, state_->report, switches,
        {state_->host(state_->memory.weights), state_->host(state_->memory.first), state_->host(state_->memory.second)},
        state_->hooks.step != nullptr ? state_->hooks.step->save() : std::string());
}

void DeviceTrainer::restore(const std::string& path) {
    const DeviceCheckpoint from = load_device_checkpoint(path, state_->config, state_->count(), state_->seconds());
    state_->set_weights(from.arrays.weights);
    const auto put = [this](std::size_t region, const std::vector<float>& values) {
        on_device::upload(state_->pass->at<char>(region), values.data(), values.size() * sizeof(float), state_->stream);
    };
    put(state_->memory.first, from.arrays.first);
    put(state_->memory.second, from.arrays.second);
    on_device::wait(state_->stream);
    state_->next = from.next_step;
    state_->report = from.report;  // the sums of zero_sum go on from it
    state_->staged_step = {-1, -1};
    state_->switches = from.switches;
    bool switched = false;
    for (int l = 0; l < state_->config.model.layers; ++l) {
        const std::vector<double>& scales = from.switches.qk_scales[static_cast<std::size_t>(l)];
        if (scales == state_->pass->switched_scales(l)) continue;
        if (!state_->may_norm)
            throw RequestError(path + ": QK norm was switched on by a hook: expected the run with that hook");
        state_->pass->switch_qk_norm(l, scales);
        switched = true;
    }
    if (switched) state_->record_graphs();
    if (state_->hooks.step != nullptr) state_->hooks.step->load(from.hook);
}

}  // namespace faultline::gpt
