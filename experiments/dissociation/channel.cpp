// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/channel.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <faultline/base/error.hpp>

namespace faultline {
namespace {

using Kind = Intervention::Kind;

double largest(const std::vector<double>& values) {
    double top = -std::numeric_limits<double>::infinity();
    for (const double x : values) {
        if (std::isnan(x)) continue;  // not due in this step
        top = std::max(top, x);
    }
    return top;
}

/// Numbers and blocks of numbers as bytes, one after another.
class Bytes {
  public:
    template <class T>
    void put(const T& value) {
        out.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    void put(const double* values, std::size_t count) {
        put(static_cast<std::uint64_t>(count));
        out.append(reinterpret_cast<const char*>(values), count * sizeof(double));
    }
    std::string out;
};

class BytesIn {
  public:
    explicit BytesIn(std::string_view bytes) : rest_(bytes) {}
    template <class T>
    T get() {
        T value;
        take(&value, sizeof value);
        return value;
    }
    std::vector<double> values() {
        const auto count = get<std::uint64_t>();
        if (count > rest_.size() / sizeof(double)) fail();
        std::vector<double> found(count);
        take(found.data(), count * sizeof(double));
        return found;
    }
    std::string_view rest() const { return rest_; }

  private:
    [[noreturn]] static void fail() {
        throw WorkError("checkpoint: the state of the intervention is cut short: expected a checkpoint of this run");
    }
    void take(void* to, std::size_t count) {
        if (count > rest_.size()) fail();
        if (count > 0) std::memcpy(to, rest_.data(), count);  // an empty vector has no address
        rest_.remove_prefix(count);
    }
    std::string_view rest_;
};

}  // namespace

Channel::Channel(const Intervention& intervention, int layers, int heads, std::uint64_t seed, FaultHooks* faults)
    : intervention_(intervention),
      layers_(layers),
      heads_(heads),
      seed_(seed),
      faults_(faults),
      followed_(static_cast<std::size_t>(2 * layers), LeadingDirections(intervention.k)),
      removed_(static_cast<std::size_t>(layers)) {}

void Channel::before_apply(std::int64_t step, std::span<const gpt::ParameterUpdate> updates) {
    if (intervention_.kind != Kind::project) return;
    for (const gpt::ParameterUpdate& p : updates) {
        if ((p.role != gpt::Role::w_q && p.role != gpt::Role::w_k) || p.layer < 0) continue;
        const int which = p.role == gpt::Role::w_k ? 1 : 0;
        LeadingDirections& directions = followed_.at(static_cast<std::size_t>(2 * p.layer + which));
        directions.update(to_eigen(p.weight));
        Eigen::MatrixXd d = to_eigen(MatrixView<const float>(p.update));
        removed_[static_cast<std::size_t>(p.layer)].join(remove(d, directions.left(), directions.right(),
                                                                intervention_.sides, intervention_.removal,
                                                                RandomStream(seed_, step, p.layer, which)));
        for (std::ptrdiff_t i = 0; i < p.update.rows; ++i)
            for (std::ptrdiff_t j = 0; j < p.update.cols; ++j) p.update(i, j) = static_cast<float>(d(i, j));
    }
}

gpt::Projection Channel::projection() const {
    return {intervention_.k, LeadingDirections::extra_by_default, intervention_.sides,
            intervention_.removal == Removal::shrink};
}

std::vector<double> Channel::blocks(int columns) const {
    std::vector<double> all;
    for (const LeadingDirections& directions : followed_) {
        const Eigen::MatrixXd block =
            directions.block().size() > 0 ? directions.block() : directions.cold_start(columns);
        all.insert(all.end(), block.data(), block.data() + block.size());
    }
    return all;
}

void Channel::keep_blocks(std::span<const double> blocks, int columns) {
    const std::size_t each = blocks.size() / followed_.size();
    for (std::size_t i = 0; i < followed_.size(); ++i)
        followed_[i].set_block(Eigen::Map<const Eigen::MatrixXd>(blocks.data() + i * each, columns,
                                                                 static_cast<Eigen::Index>(each) / columns));
}

void Channel::projected(std::span<const RemovedEnergy> energies) {
    for (std::size_t i = 0; i < energies.size(); ++i) removed_.at(i / 2).join(energies[i]);
}

double Channel::monitored(const gpt::StepReport& report) const {
    switch (intervention_.monitor) {
        case Monitor::max_logit:
            return largest(report.max_logit);
        case Monitor::sigma_q:
            return largest(report.sigma_q);
        case Monitor::grad_norm:
            return report.grad_norm;
        case Monitor::saturated:
            return largest(report.saturated);
    }
    return 0;
}

gpt::StepHookUse Channel::uses() const {
    const bool guards = intervention_.kind == Kind::guard;
    return {guards, guards && intervention_.monitor == Monitor::sigma_q, guards || intervention_.kind == Kind::qk_clip};
}

void Channel::before_step(std::int64_t step, const gpt::StepReport*, gpt::StepControl& control) {
    if (intervention_.kind == Kind::qk_clip && step == 0) control.set_qk_clip(intervention_.tau);
    if (intervention_.kind == Kind::repair && step >= intervention_.from && faults_ != nullptr) faults_->stop();
    if (triggered_at_ < 0 || acted_) return;
    acted_ = true;
    switch (intervention_.action) {
        case GuardAction::qk_norm:
            for (int layer = 0; layer < layers_; ++layer) {
                std::vector<double> scale;
                for (int head = 0; head < heads_ && intervention_.continuous; ++head)
                    scale.push_back(qk_rms_.at(static_cast<std::size_t>(layer * heads_ + head)) /
                                    std::sqrt(static_cast<double>(control.head_dim())));
                control.enable_qk_norm(layer, scale);
            }
            return;
        case GuardAction::qk_clip:
            return control.set_qk_clip(intervention_.tau);
        case GuardAction::repair:
            if (faults_ != nullptr) faults_->stop();
            return;
        case GuardAction::lower_rate:
            return control.set_learning_rate_factor(intervention_.factor);
        case GuardAction::tighter_clip:
            return control.set_clip_factor(intervention_.factor);
        case GuardAction::reset_optimizer:
            return control.reset_optimizer();
        case GuardAction::fp32_ffn:
            return control.set_fp32_ffn(true);
    }
}

void Channel::watch(const gpt::StepReport& report) {
    if (intervention_.kind != Kind::guard || triggered_at_ >= 0 || !(monitored(report) > intervention_.threshold))
        return;
    triggered_at_ = report.step;
    qk_rms_ = report.qk_rms;
}

void Channel::after_step(gpt::StepReport& report) {
    std::vector<double> energy, fraction, leading, missing;
    for (RemovedEnergy& layer : removed_) {
        energy.push_back(layer.removed);
        fraction.push_back(layer.fraction());
        leading.push_back(layer.update > 0 ? layer.leading / layer.update : 0);
        missing.push_back(layer.update > 0 ? layer.missing / layer.update : 0);
        layer = {};
    }
    watch(report);
    report.extras.push_back({"removed_energy", std::move(energy), "energy removed from the updates of W_Q and W_K"});
    report.extras.push_back({"removed_fraction", std::move(fraction), "the same over the energy of these updates"});
    report.extras.push_back(
        {"leading_fraction", std::move(leading), "energy of the updates along the leading directions, over theirs"});
    report.extras.push_back({"missing_fraction", std::move(missing),
                             "energy that was to be removed elsewhere and was not found, over that of the updates"});
    report.extras.push_back({"intervention_active", {acted_ ? 1.0 : 0.0}, "1 from the step on after the guard acted"});
    if (faults_ != nullptr) faults_->report(report);
}

std::string Channel::save() const {
    Bytes bytes;
    bytes.put(triggered_at_);
    bytes.put(static_cast<unsigned char>(acted_));
    bytes.put(qk_rms_.data(), qk_rms_.size());
    for (const LeadingDirections& directions : followed_) {
        const Eigen::MatrixXd& block = directions.block();
        bytes.put(static_cast<std::int64_t>(block.rows()));
        bytes.put(block.data(), static_cast<std::size_t>(block.size()));
    }
    if (faults_ != nullptr) bytes.out += faults_->save();
    return bytes.out;
}

void Channel::load(std::string_view state) {
    BytesIn bytes(state);
    triggered_at_ = bytes.get<std::int64_t>();
    acted_ = bytes.get<unsigned char>() != 0;
    qk_rms_ = bytes.values();
    for (LeadingDirections& directions : followed_) {
        const auto rows = bytes.get<std::int64_t>();
        const std::vector<double> values = bytes.values();
        if (rows <= 0) {  // as before the first update: a step that was given up may have begun it
            directions.set_block({});
            continue;
        }
        Eigen::MatrixXd block(rows, static_cast<Eigen::Index>(values.size()) / rows);
        std::copy(values.begin(), values.begin() + block.size(), block.data());
        directions.set_block(std::move(block));
    }
    if (faults_ != nullptr) faults_->load(bytes.rest());
}

}  // namespace faultline
