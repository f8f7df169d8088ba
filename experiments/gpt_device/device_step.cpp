// SPDX-License-Identifier: Apache-2.0
// A step: its inputs, its launches, and what comes of them.
#include <faultline/gpt_device/device_state.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include <faultline/base/error.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::gpt {

using on_device::StepResult;
using on_device::StepScalars;

on_device::StepScalars DeviceTrainer::State::scalars_of(std::int64_t step, int micro_step) const {
    const auto t = static_cast<double>(switches.optimizer_steps + 1);
    return {static_cast<float>(rate_of(step)),
            static_cast<float>(1 / (1 - std::pow(config.optimizer.beta1, t))),
            static_cast<float>(1 / (1 - std::pow(config.optimizer.beta2, t))),
            static_cast<float>(config.clip * switches.clip_factor),
            switches.qk_clip,
            micro_step};
}

void DeviceTrainer::State::write_input(const Windows& of, char* to) const {
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

void DeviceTrainer::State::stage(std::int64_t step) {
    const auto half = static_cast<std::size_t>(step % 2);
    if (staged_step[half] == step) return;
    staged_step[half] = -1;
    for (int round = 0; round < exchange.rounds(); ++round)
        write_input(training_windows(config, data, windows, step, exchange.micro_batch(round)),
                    staged[half].data() + static_cast<std::size_t>(round) * input.bytes);
    staged_step[half] = step;
}

void DeviceTrainer::State::copy_input(std::int64_t step, int micro_step) {
    char* from = staged[static_cast<std::size_t>(step % 2)].data() + static_cast<std::size_t>(micro_step) * input.bytes;
    const StepScalars scalars = scalars_of(step, micro_step);
    std::memcpy(from + input.scalars, &scalars, sizeof scalars);
    on_device::upload(pass->at<char>(memory.input), from, input.bytes, stream);
}

const StepReport& DeviceTrainer::State::run_step() {
    stage(next);
    const bool captured = capture_wanted && capture_wanted(next);
    for (int round = 0; round < exchange.rounds(); ++round) {
        copy_input(next, round);
        plant(round);
        const bool last = round + 1 == exchange.rounds();
        const Recorded& launches = last ? last_micro_batch : micro_batch;
        if (captured)
            capture(round);
        else if (attention.emulated() != nullptr)
            run_micro_batch(rows_are_due() ? Pass::Watch::rows : watched(), last);
        else
            (rows_are_due() ? launches.detailed : launches.plain).launch(stream);
    }
    if (late_spectra) late_spectra->before_weights_change();
    update.launch(stream);
    on_device::download_later(result.data(), pass->at<char>(memory.result), memory.result_bytes(), stream);
    if (faults.any()) on_device::download_later(injected.data(), faults.totals(), faults.totals_bytes(), stream);
    if (projected) fetch_energies();
    if (hooks.update != nullptr && step_is_finite()) show_update();
    if (spectra_are_due()) begin_spectra();
    try {
        if (next + 1 < config.steps) stage(next + 1);  // while the device works
    } catch (const RequestError&) {
        staged_step[static_cast<std::size_t>((next + 1) % 2)] = -1;  // said when it is that step's turn
    }
    exchange.wait(stream);
    if (late_spectra) late_spectra->step_is_done();
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
    if (faults.any()) report_faults();
    if (projected) report_energies();
    const bool last = next + 1 == config.steps;
    const bool validate = config.validate_every > 0 && ((next + 1) % config.validate_every == 0 || last);
    report.validation_loss = validate ? validation_loss() : std::numeric_limits<double>::quiet_NaN();
    if (hooks.step != nullptr) hooks.step->after_step(report);
    ++switches.optimizer_steps;
    ++next;
    return report;
}

void DeviceTrainer::State::report_faults() const {
    static_assert(sizeof(Realised) % sizeof(double) == 0 && std::is_trivially_copyable_v<Realised>);  // sums alone
    std::vector<double> own(faults.totals_bytes() / sizeof(double));
    std::memcpy(own.data(), injected.data(), faults.totals_bytes());
    const std::size_t half = own.size() / 2;
    std::vector<double> sums(half);
    add_in_rank_order(exchange.ranks(), std::span(sums), std::span<const double>(own).first(half));
    for (std::size_t i = 0; i < half; ++i) sums[i] += own[half + i];  // of the update, which all ranks make alike
    std::vector<Realised> did(half * sizeof(double) / sizeof(Realised));
    std::memcpy(static_cast<void*>(did.data()), sums.data(), half * sizeof(double));
    planted->did(did);
}

bool DeviceTrainer::State::step_is_finite() const {
    on_device::wait(stream);
    StepResult of{};
    std::memcpy(&of, result.data(), sizeof of);
    return of.finite != 0 && of.update_finite != 0;
}

void DeviceTrainer::State::capture(int round) {
    std::vector<Pass::Operands> layers(static_cast<std::size_t>(config.model.layers));
    pass->keep_operands(&layers);
    run_micro_batch(rows_are_due() ? Pass::Watch::rows : watched(), round + 1 == exchange.rounds());
    pass->keep_operands(nullptr);
    exchange.hand_over(round, layers, [&](int micro_step) { capture_take(next, micro_step, layers); });
}

double DeviceTrainer::State::validation_loss() {
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

}  // namespace faultline::gpt
