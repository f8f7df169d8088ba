// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/run_memory.hpp>

#include <algorithm>

#include <faultline/dissociation/intervention.hpp>
#include <faultline/dissociation/matrix_run.hpp>
#include <faultline/dissociation/source.hpp>
#include <faultline/gpt/fast_attention.hpp>

namespace faultline {

gpt::HostNeeds host_needs(const std::vector<Fault>& faults) {
    gpt::HostNeeds needs;
    for (const Fault& fault : faults) {
        const Site* const site = std::get_if<Site>(&fault.site);
        if (site == nullptr) continue;
        needs.instrumented = true;
        if (!gpt::is_fast_site(*site)) needs.emulated = true;
    }
    return needs;
}

gpt::HostMemory run_memory(const MatrixConfig& config, const RunPlan& plan, int threads, bool recorded) {
    const Source source = parse_source(plan.source, config.train.model.head_dim(), config.folder);
    const Intervention intervention = parse_intervention(plan.intervention);
    gpt::TrainConfig train = config.train;
    train.threads = threads;
    train.validate_every = std::max(train.validate_every, 1);  // a result has a validation loss
    for (const gpt::AttentionChoice& choice : source.attention) train.model.attention.push_back(choice);
    if (intervention.kind == Intervention::Kind::qk_norm) train.model.qk_norm = gpt::QkNorm::parameter_free;
    gpt::HostNeeds needs = host_needs(source.faults);
    needs.checkpoints = recorded;
    needs.may_norm = intervention.kind == Intervention::Kind::guard && intervention.action == GuardAction::qk_norm;
    needs.projects = intervention.kind == Intervention::Kind::project;
    return gpt::host_memory(train, needs);
}

gpt::HostMemory largest_run(const MatrixConfig& config, const std::vector<RunPlan>& plans, int threads, bool recorded) {
    gpt::HostMemory largest;
    for (const RunPlan& plan : plans) {
        gpt::HostMemory one = run_memory(config, plan, threads, recorded);
        if (one.bytes() > largest.bytes()) largest = std::move(one);
    }
    return largest;
}

std::uint64_t kept_for_guards(const MatrixConfig& config, const std::vector<RunPlan>& plans) {
    const std::uint64_t parameters = gpt::parameter_count(config.train.model);
    if (parameters > static_cast<std::uint64_t>(parameters_for_guards)) return 0;
    const std::uint64_t state = 3 * sizeof(float) * parameters;  // weights and moments
    const auto guards = std::ranges::count_if(plans, [&](const RunPlan& plan) {
        return plan.seed == plans.front().seed &&
               parse_intervention(plan.intervention).kind == Intervention::Kind::guard;
    });
    return static_cast<std::uint64_t>(guards) * state;
}

}  // namespace faultline
