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
#include <faultline/gpt_device/exchange.hpp>
#include <faultline/gpt_device/pass.hpp>
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
    // How sums over micro-batches are made depends on it.
    config.also.emplace_back("ranks", std::to_string(options.ranks == nullptr ? 1 : options.ranks->size()));
    if (options.ranks != nullptr && options.exchange.bf16) config.also.emplace_back("reduce", "bf16");
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
    AttentionOnDevice attention;
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
    on_device::PinnedMemory result;
    on_device::Graph micro_batch, last_micro_batch, update;  // the last one adds up over ranks
    std::int64_t next = 0;
    StepReport report;
    std::optional<NonFinite> failure;

    State(const TrainConfig& wanted, const TokenData& tokens, const WindowOrder& order, const DeviceOptions& options)
        : config(on_this_back_end(checked(wanted), options)),
          data(tokens),
          windows(order),
          layout(config.model),
          attention(config),
          memory(config, layout, attention.scratch_bytes()),
          input(config),
          exchange(options.ranks, config, layout, options.exchange),
          staged{on_device::PinnedMemory(input.bytes * static_cast<std::size_t>(exchange.rounds())),
                 on_device::PinnedMemory(input.bytes * static_cast<std::size_t>(exchange.rounds()))},
          result(sizeof(StepResult)) {
        check_tokens(data, config.model.vocabulary, config.model.context);
        // A card without room is one rank's trouble, of which the others hear before they wait for its sums.
        together(options.ranks, [&] { base.emplace(memory.plan.bytes(), memory.plan.text()); });
        pass = make_pass(config, layout, memory, attention, base->data(), stream, options.deterministic);
        const std::vector<std::uint8_t> kinds = kinds_of(layout);
        on_device::upload(pass->at<char>(memory.kinds), kinds.data(), kinds.size(), stream);
        // Once through everything, so that kernels are loaded and products chosen before graphs are made of them; what it
        // does to the weights is undone by start().
        start();
        stage(0);
        copy_input(0, 0);
        run_micro_batch(true);
        run_update();
        exchange.wait(stream);
        if (exchange.rounds() > 1) micro_batch = on_device::Graph(stream, [this] { run_micro_batch(false); });
        last_micro_batch = on_device::Graph(stream, [this] { run_micro_batch(true); });
        update = on_device::Graph(stream, [this] { run_update(); });
        start();
    }

    [[nodiscard]] std::size_t count() const { return static_cast<std::size_t>(layout.size()); }

    /// Initial weights, moments of zero.
    void start() {
        std::vector<float> weights(count());
        layout.initialize(config.seed, std::span(weights), hardware_threads());
        set_weights(weights);
        on_device::clear(pass->at<char>(memory.first), count() * sizeof(float), stream);
        on_device::clear(pass->at<char>(memory.second), count() * sizeof(float), stream);
        on_device::wait(stream);
    }
    void set_weights(std::span<const float> weights) {
        on_device::upload(pass->at<char>(memory.weights), weights.data(), weights.size_bytes(), stream);
        pass->round_weights();
        on_device::wait(stream);
    }
    [[nodiscard]] std::vector<float> host(std::size_t region) const {
        std::vector<float> values(count());
        on_device::download(values.data(), pass->at<char>(region), count() * sizeof(float), stream);
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
    void run_micro_batch(bool last) {
        if (!last || !exchange.active()) {
            pass->forward_backward();
            accumulate({0, count()});
            return;
        }
        pass->layer_done = [this](int layer) {
            accumulate(range_of_layer(layout, layer));
            exchange.layer_done(layer, pass->at<float>(memory.gradient), stream);
        };
        pass->forward_backward();
        pass->layer_done = nullptr;
        for (const GradientRange& of : ranges_beside_layers(layout)) accumulate(of);
        exchange.finish(pass->at<float>(memory.gradient), pass->loss_sum(), stream);
    }
    void run_update() {
        auto* left = pass->at<StepResult>(memory.result);
        on_device::finish_gradient(pass->at<float>(memory.gradient), pass->at<std::uint8_t>(memory.kinds),
                                   rounds_late(), count(), pass->loss_sum(), pass->scalars(),
                                   pass->at<double>(memory.sums), left, stream);
        const OptimizerConfig& o = config.optimizer;
        const on_device::AdamwSettings settings{static_cast<float>(o.beta1), static_cast<float>(o.beta2),
                                                static_cast<float>(o.epsilon), static_cast<float>(o.weight_decay)};
        on_device::adamw(pass->at<float>(memory.gradient), pass->at<std::uint8_t>(memory.kinds), rounds_late(), count(),
                         settings, pass->scalars(), left, pass->at<float>(memory.weights),
                         pass->at<float>(memory.first), pass->at<float>(memory.second),
                         rounds() ? pass->at<on_device::Bf16>(memory.operands) : nullptr, stream);
    }

    [[nodiscard]] StepScalars scalars_of(std::int64_t step, int micro_step) const {
        const auto t = static_cast<double>(step + 1);
        return {static_cast<float>(learning_rate(config.schedule, step, config.steps)),
                static_cast<float>(1 / (1 - std::pow(config.optimizer.beta1, t))),
                static_cast<float>(1 / (1 - std::pow(config.optimizer.beta2, t))), static_cast<float>(config.clip),
                micro_step};
    }
    /// Tokens, targets, and the tokens' places sorted by id (a counting sort: ascending within an id).
    void write_input(const Windows& of, const StepScalars& scalars, char* to) const {
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
        std::memcpy(to + input.scalars, &scalars, sizeof scalars);
    }
    void stage(std::int64_t step) {
        const auto half = static_cast<std::size_t>(step % 2);
        if (staged_step[half] == step) return;
        staged_step[half] = -1;
        for (int round = 0; round < exchange.rounds(); ++round)
            write_input(training_windows(config, data, windows, step, exchange.micro_batch(round)),
                        scalars_of(step, round), staged[half].data() + static_cast<std::size_t>(round) * input.bytes);
        staged_step[half] = step;
    }
    void copy_input(std::int64_t step, int micro_step) {
        on_device::upload(
            pass->at<char>(memory.input),
            staged[static_cast<std::size_t>(step % 2)].data() + static_cast<std::size_t>(micro_step) * input.bytes,
            input.bytes, stream);
    }

    const StepReport& step() {
        stage(next);
        for (int round = 0; round < exchange.rounds(); ++round) {
            copy_input(next, round);
            (round + 1 < exchange.rounds() ? micro_batch : last_micro_batch).launch(stream);
        }
        update.launch(stream);
        on_device::download_later(result.data(), pass->at<char>(memory.result), sizeof(StepResult), stream);
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
        const bool last = next + 1 == config.steps;
        const bool validate = config.validate_every > 0 && ((next + 1) % config.validate_every == 0 || last);
        report.validation_loss = validate ? validation_loss() : nan_value;
        ++next;
        return report;
    }

    void fill_report(const StepResult& of) {
        report.step = next;
        report.loss = of.loss / config.tokens_of_step();
        report.grad_norm = std::sqrt(of.squares);
        report.learning_rate = learning_rate(config.schedule, next, config.steps);
        report.layers = config.model.layers;
        report.heads = config.model.heads;
        report.qk_normed.assign(static_cast<std::size_t>(report.layers), 0);
        if (config.monitor_every == 0) return;
        const bool due = next % config.monitor_every == 0 || next + 1 == config.steps;
        const std::vector<float> weights = due ? host(memory.weights) : std::vector<float>();
        report_spectra(config.model, layout, weights, due, report);
    }

    double validation_loss() {
        // Batches go round among the ranks; adding to zeros changes no bit of them.
        const int ranks = exchange.active() ? exchange.ranks()->size() : 1;
        std::vector<double> own(static_cast<std::size_t>(config.validation_batches), 0.0), losses = own;
        std::vector<char> staging(input.bytes);
        for (int b = exchange.active() ? exchange.ranks()->rank() : 0; b < config.validation_batches; b += ranks) {
            write_input(validation_windows(config, data, b), {}, staging.data());
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
            pass->forward_backward();
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

bool device_trainer_is_built() { return true; }

DeviceTrainer::DeviceTrainer(const TrainConfig& config, const TokenData& data, const WindowOrder& windows,
                             const DeviceOptions& options)
    : state_(std::make_unique<State>(config, data, windows, options)) {}
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
const StepReport& DeviceTrainer::report() const { return state_->report; }
void DeviceTrainer::capture(std::function<bool(std::int64_t)>,
                            std::function<void(std::int64_t, int, const Captured&)>) {
    throw RequestError("device cuda: capture: the device's trainer has none: expected --device cpu with it");
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
    save_device_checkpoint(path, state_->config, state_->next, state_->report,
                           {state_->host(state_->memory.weights), state_->host(state_->memory.first),
                            state_->host(state_->memory.second)});
}

void DeviceTrainer::restore(const std::string& path) {
    const DeviceCheckpoint from = load_device_checkpoint(path, state_->config, state_->count());
    state_->set_weights(from.arrays.weights);
    const std::size_t bytes = state_->count() * sizeof(float);
    on_device::upload(state_->pass->at<char>(state_->memory.first), from.arrays.first.data(), bytes, state_->stream);
    on_device::upload(state_->pass->at<char>(state_->memory.second), from.arrays.second.data(), bytes, state_->stream);
    on_device::wait(state_->stream);
    state_->next = from.next_step;
    state_->report = from.report;
    state_->staged_step = {-1, -1};
}

}  // namespace faultline::gpt
