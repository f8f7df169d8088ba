// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/nearer_plans.hpp>

#include <algorithm>

#include <faultline/plan/presets.hpp>

namespace faultline {
namespace {

/// A kernel in low precision is no plan that rounds nothing, however near: where that one comes out ahead, of a fp32
/// kernel whose last bits no preset has, there would be no rounding to attribute.
bool rounds(const RankedPlan& candidate) {
    const std::span<const RoundingPlan> all = presets();
    const auto preset =
        std::find_if(all.begin(), all.end(), [&](const RoundingPlan& p) { return p.name == candidate.plan; });
    return preset == all.end() || !preset->rounding_sites().empty();
}

}  // namespace

Identification rank_presets(const Capture& capture, const RoundingPlan& plan, int head, int threads,
                            const std::function<bool()>& cancelled, const AttentionBackend& backend) {
    if (observed_kernels(capture).empty()) return {};
    IdentifyOptions options;
    options.candidates = {plan};  // first: of equals it is the one
    for (const RoundingPlan& preset : presets())
        if (!preset.same_numerics(plan)) options.candidates.push_back(preset);
    options.heads = {head};
    options.search = false;
    options.threads = threads;
    options.cancelled = cancelled;
    options.backend = &backend;
    return identify(capture, options);
}

std::vector<NearerPlan> nearer_plans(const Identification& ranked, const std::string& plan, int head) {
    std::vector<NearerPlan> nearer;
    for (const KernelIdentification& kernel : ranked.kernels) {
        const auto nearest = std::find_if(kernel.ranking.begin(), kernel.ranking.end(), rounds);
        const auto own = std::find_if(kernel.ranking.begin(), kernel.ranking.end(),
                                      [&](const RankedPlan& candidate) { return candidate.plan == plan; });
        if (own == kernel.ranking.end() || nearest == own) continue;  // the first: a plan that cannot run these layers
        const Match theirs = nearest->match.all(), ours = own->match.all();
        if (2 * theirs.differing() > ours.differing() || ours.differing() == 0) continue;
        nearer.push_back({kernel.kernel, nearest->plan, theirs.share(), ours.share(), head, kernel.layers});
    }
    return nearer;
}

std::vector<NearerPlan> nearer_plans(const Capture& capture, const RoundingPlan& plan, int head, int threads,
                                     const std::function<bool()>& cancelled, const AttentionBackend& backend) {
    return nearer_plans(rank_presets(capture, plan, head, threads, cancelled, backend), plan.name, head);
}

}  // namespace faultline
