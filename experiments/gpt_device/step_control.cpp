// SPDX-License-Identifier: Apache-2.0
// What a step hook may do on the device, and the step with a hook.
#include <faultline/gpt_device/device_state.hpp>

#include <cmath>

#include <faultline/base/error.hpp>

namespace faultline::gpt {

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

}  // namespace faultline::gpt
