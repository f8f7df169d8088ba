// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/device_trainer.hpp>

#include <utility>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/device_state.hpp>

namespace faultline::gpt {

bool device_trainer_is_built() { return true; }
bool device_projects(const Projection& wanted, int width) { return on_device::has_projection(wanted, width); }

void check_for_device(const TrainConfig& config, const std::vector<Fault>& faults) {
    const AttentionOnDevice attention(checked_for_device(config), true);
    (void)DeviceFaults(config, ParameterLayout(config.model), on_the_card(attention, faults));
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
    if (const Exchange& exchange = state_->exchange; exchange.active()) {
        lines.push_back("ranks: " + exchange.text());
        if (exchange.gathers())
            lines.back() += fmt::format("; {:.2f} GiB for what comes", static_cast<double>(exchange.room()) * 0x1p-30);
    }
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
bool DeviceTrainer::let_go() noexcept { return state_->exchange.let_go(state_->stream); }
std::optional<SpectraTimes> DeviceTrainer::spectra_times() const {
    if (!state_->late_spectra) return std::nullopt;
    SpectraTimes times = state_->late_spectra->times();
    times.steps_waited += state_->waited_for_spectra;
    return times;
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
    state_->leave_directions();
    DeviceSwitches switches = state_->switches;
    switches.qk_scales.clear();  // those of a checkpoint that the run went on from
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
    state_->take_directions();
}

}  // namespace faultline::gpt
