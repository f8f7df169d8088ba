// SPDX-License-Identifier: Apache-2.0
// What a step reports.
#include <faultline/gpt_device/device_state.hpp>

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

namespace faultline::gpt {

void DeviceTrainer::State::fill_report(const on_device::StepResult& of) {
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
    if (!hook_uses.spectra) return;
    const auto begin = std::chrono::steady_clock::now();
    finish_report();  // a hook acts on what it sees
    waited_for_spectra += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void DeviceTrainer::State::begin_spectra() {
    pending_spectra = late_spectra->begin(pass->at<float>(memory.weights) + layout.layer(0).w_in, layer_step(),
                                          layout.in_columns(), hook_uses.spectra);
}

void DeviceTrainer::State::fill_monitors() {
    std::vector<on_device::HeadTotals> seen(heads());
    const std::size_t behind = memory.plan[memory.totals].offset - memory.plan[memory.result].offset;
    std::memcpy(seen.data(), result.data() + behind, seen.size() * sizeof seen[0]);
    const double tokens = config.tokens_of_step(), rows = tokens - config.batch * config.accumulate;
    const bool due = rows_are_due() && rows > 0;
    report.zero_sum_total.resize(heads(), 0.0);
    for (std::vector<double>* values : {&report.max_logit, &report.qk_rms, &report.zero_sum, &report.zero_sum_abs,
                                        &report.saturated, &report.entropy})
        values->assign(heads(), std::numeric_limits<double>::quiet_NaN());
    for (std::size_t i = 0; i < heads(); ++i) {
        const int layer = static_cast<int>(i) / config.model.heads;
        const std::vector<double>& switched = pass->switched_scales(layer);
        const double unit = attention.zero_sum_unit(
            layer, switched.empty() ? static_cast<double>(attention.shape().scale) : switched[i % switched.size()]);
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

}  // namespace faultline::gpt
