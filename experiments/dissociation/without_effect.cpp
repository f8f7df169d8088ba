// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/without_effect.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <variant>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using Kind = Intervention::Kind;

/// Whether it is in the kernel's forward, where it may change the logits themselves.
bool in_forward(const Fault& fault) {
    const Site* site = std::get_if<Site>(&fault.site);
    return site != nullptr && info(*site).pass != Pass::backward;
}

/// A bound that no logit passes, or infinity. Of vectors of norm sqrt(head_dim) it is sqrt(head_dim), and the roundings of a
/// plan, of formats with three bits and more and in log2 units too, do not double it; a fault may.
double largest_logit(const gpt::ModelConfig& model, const std::vector<Fault>& faults) {
    if (model.qk_norm != gpt::QkNorm::parameter_free || std::ranges::any_of(faults, in_forward))
        return std::numeric_limits<double>::infinity();
    return 2 * std::sqrt(static_cast<double>(model.head_dim()));
}

/// Whether the optimizer keeps anything from step to step, its count of steps included.
bool has_moments(const gpt::OptimizerConfig& optimizer) {
    using gpt::OptimizerKind;
    const bool adamw = optimizer.beta1 > 0 || optimizer.beta2 > 0, momentum = optimizer.momentum > 0;
    switch (optimizer.kind) {
        case OptimizerKind::adamw:
            return adamw;
        case OptimizerKind::muon:
            return adamw || momentum;
        case OptimizerKind::sgd:
            return momentum;
    }
    return true;
}

}  // namespace

void expect_intervention_acts(const Intervention& intervention, const std::string& word, const gpt::TrainConfig& config,
                              const std::vector<Fault>& faults) {
    const auto idle_where = [&](bool idle, const std::string& because, std::string_view expected) {
        if (idle)
            throw RequestError(
                fmt::format("intervention {}: does nothing: {}: expected {}", in_quotes(word), because, expected));
    };
    const gpt::ModelConfig& model = config.model;
    const bool guards = intervention.kind == Kind::guard;
    const auto does = [&](GuardAction action) { return guards && intervention.action == action; };
    // A guard switches QK normalisation on where there is none, of whichever kind.
    idle_where((intervention.kind == Kind::qk_norm && model.qk_norm == gpt::QkNorm::parameter_free) ||
                   (does(GuardAction::qk_norm) && model.qk_norm != gpt::QkNorm::none),
               "the model has QK normalisation from the first step", "another intervention, or qk-norm none");
    idle_where(guards && config.steps < 2, "a guard acts in the step behind its trigger, and the run has one step",
               "more steps");
    const bool clips = intervention.kind == Kind::qk_clip || does(GuardAction::qk_clip);
    if (clips && config.qk_clip > 0)
        throw RequestError(
            fmt::format("intervention {}: the run has qk-clip {} from the first step, and one of them would not hold: "
                        "expected another intervention, or qk-clip 0",
                        in_quotes(word), config.qk_clip));
    const double bound = largest_logit(model, faults);
    const std::string normed =
        fmt::format("the model has parameter-free QK normalisation, and no logit passes sqrt({})", model.head_dim());
    idle_where(clips && intervention.tau >= bound, normed, "a smaller tau, or qk-norm none");
    idle_where(guards && intervention.monitor == Monitor::max_logit && intervention.threshold >= bound, normed,
               "a smaller threshold, another monitor, or qk-norm none");
    idle_where(does(GuardAction::tighter_clip) && config.clip == 0, "the run does not clip gradients",
               "another action, or a clip above 0");
    idle_where(does(GuardAction::fp32_ffn) && !model.bf16, "the run is in fp32", "another action, or precision bf16");
    idle_where(does(GuardAction::reset_optimizer) && !has_moments(config.optimizer),
               "the optimizer keeps nothing from step to step", "another action, or an optimizer with a momentum");
}

}  // namespace faultline
