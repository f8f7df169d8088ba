// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/nearer_plans.hpp>

#include <algorithm>

#include <faultline/identification/observed_kernels.hpp>
#include <faultline/plan/presets.hpp>

namespace faultline {
namespace {

/// A kernel in low precision is no plan that rounds nothing, however near: where that one comes out ahead, of a fp32
/// kernel whose last bits no preset has, there would be no rounding to attribute.
bool rounds(const RankedPlan& candidate) {
    return candidate.plan != presets().front().name;  // exact, the one preset that rounds nothing
}

}  // namespace

Identification rank_presets(const Capture& capture, const RoundingPlan& plan, const AttributionOptions& options,
                            const std::string& kernel) {
    if (observed_kernels(capture).empty()) return {};
    IdentifyOptions ranking;
    ranking.candidates = {plan};  // first: of equals it is the one
    for (const RoundingPlan& preset : presets()) ranking.presets.push_back(preset.name);
    if (!kernel.empty()) ranking.kernels = {kernel};
    ranking.heads = options.heads;
    ranking.search = false;
    ranking.threads = options.threads;
    ranking.seed = options.seed;
    ranking.progress = options.progress;
    ranking.cancelled = options.cancelled;
    ranking.backend = options.backend;
    return identify(capture, ranking);
}

std::string first_kernel(const Identification& ranked) {
    const auto flash = std::find_if(ranked.kernels.begin(), ranked.kernels.end(),
                                    [](const KernelIdentification& k) { return k.kernel == "flash"; });
    if (flash != ranked.kernels.end()) return flash->kernel;
    return ranked.kernels.empty() ? "" : ranked.kernels.front().kernel;
}

std::optional<ChosenPlan> nearest_plan(const Identification& ranked, const std::string& kernel) {
    // A kernel has a ranking for each head size and mask: summed, in the order of the first.
    std::vector<RankedPlan> sums;
    for (const KernelIdentification& k : ranked.kernels) {
        if (k.kernel != kernel) continue;
        for (const RankedPlan& candidate : k.ranking) {
            const auto same = [&](const RankedPlan& sum) { return sum.plan == candidate.plan; };
            const auto at = std::find_if(sums.begin(), sums.end(), same);
            if (at == sums.end())
                sums.push_back({candidate.plan, candidate.match, {}});
            else
                at->match.add(candidate.match);
        }
    }
    double exact = 0;
    for (const RankedPlan& candidate : sums)
        if (!rounds(candidate)) exact = candidate.match.all().share();
    std::erase_if(sums, [](const RankedPlan& candidate) { return !rounds(candidate); });
    order_ranking(sums);
    std::optional<ChosenPlan> chosen;
    for (const RankedPlan& candidate : sums) {
        const Match match = candidate.match.all();
        if (!chosen)
            chosen = ChosenPlan{kernel, candidate.plan, match.share(), {}, exact > match.share() ? exact : 0};
        else if (match.equal == sums.front().match.all().equal &&
                 telling_lse(candidate.match).equal == telling_lse(sums.front().match).equal)
            chosen->as_near.push_back(candidate.plan);
    }
    if (chosen) chosen->is_kernel = chosen->bit_equal >= found_share;
    if (chosen && chosen->bit_equal < more_than_chance) chosen.reset();
    return chosen;
}

bool is_nearest_to_some(const Identification& ranked, const std::string& plan) {
    return std::any_of(ranked.kernels.begin(), ranked.kernels.end(), [&](const KernelIdentification& k) {
        const std::optional<ChosenPlan> nearest = nearest_plan(ranked, k.kernel);
        return nearest &&
               (nearest->plan == plan || std::count(nearest->as_near.begin(), nearest->as_near.end(), plan) > 0);
    });
}

std::vector<NearerPlan> nearer_plans(const Identification& ranked, const std::string& plan,
                                     const std::vector<int>& heads) {
    std::vector<NearerPlan> nearer;
    for (const KernelIdentification& kernel : ranked.kernels) {
        const auto nearest = std::find_if(kernel.ranking.begin(), kernel.ranking.end(), rounds);
        const auto own = std::find_if(kernel.ranking.begin(), kernel.ranking.end(),
                                      [&](const RankedPlan& candidate) { return candidate.plan == plan; });
        if (own == kernel.ranking.end() || nearest == own) continue;  // the first: a plan that cannot run these layers
        const Match theirs = nearest->match.all(), ours = own->match.all();
        if (2 * theirs.differing() > ours.differing() || ours.differing() == 0) continue;
        if (theirs.share() - ours.share() <= unmodelled_share) continue;
        nearer.push_back({kernel.kernel, nearest->plan, theirs.share(), ours.share(), heads, kernel.layers});
    }
    return nearer;
}

}  // namespace faultline
