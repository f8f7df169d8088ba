// SPDX-License-Identifier: Apache-2.0
// A build without the device back end.
#include <faultline/base/error.hpp>
#include <faultline/gpt_device/device_trainer.hpp>

namespace faultline::gpt {
namespace {

[[noreturn]] void fail() {
    throw WorkError("device cuda: this build has no device back end: expected one configured with the preset cuda");
}

}  // namespace

struct DeviceTrainer::State {};

bool device_trainer_is_built() { return false; }
bool device_projects(const Projection&, int) { return false; }
void check_for_device(const TrainConfig&, const std::vector<Fault>&) { fail(); }
DeviceTrainer::DeviceTrainer(const TrainConfig&, const TokenData&, const WindowOrder&, const DeviceOptions&,
                             const Hooks&) {
    fail();
}
DeviceTrainer::~DeviceTrainer() = default;
std::vector<std::string> DeviceTrainer::description() const { fail(); }
std::string DeviceTrainer::device_name() const { fail(); }
const TrainConfig& DeviceTrainer::config() const { fail(); }
std::ptrdiff_t DeviceTrainer::parameters() const { fail(); }
std::string DeviceTrainer::reductions() const { fail(); }
std::int64_t DeviceTrainer::next_step() const { fail(); }
bool DeviceTrainer::finished() const { fail(); }
const StepReport& DeviceTrainer::step() { fail(); }
const std::optional<NonFinite>& DeviceTrainer::failure() const { fail(); }
const StepReport& DeviceTrainer::report() const { fail(); }
void DeviceTrainer::capture(std::function<bool(std::int64_t)>,
                            std::function<void(std::int64_t, int, const Captured&)>) {
    fail();
}
void DeviceTrainer::save(const std::string&) const { fail(); }
void DeviceTrainer::restore(const std::string&) { fail(); }
bool DeviceTrainer::let_go() noexcept { return false; }
std::optional<SpectraTimes> DeviceTrainer::spectra_times() const { fail(); }
double DeviceTrainer::validation_loss() { fail(); }
std::vector<float> DeviceTrainer::weights() const { fail(); }
void DeviceTrainer::set_weights(std::span<const float>) { fail(); }
std::vector<float> DeviceTrainer::gradient() const { fail(); }

}  // namespace faultline::gpt
