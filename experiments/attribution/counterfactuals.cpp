// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/counterfactuals.hpp>

#include <cmath>
#include <limits>

namespace faultline::attribution {

PlaceSums repaired_together(const Group& group, const GroupBase& base, const RoundingPlan& plan, const Faults& faults,
                            const std::vector<Site>& sites, const std::vector<std::size_t>& places,
                            const AttentionBackend& backend) {
    RoundingPlan exact = plan;
    Faults rest = faults;
    for (const Site site : sites) {
        exact.set(site, Rule{});
        rest = rest.without(site);
    }
    const RunOutputs repaired = run_plan(group, exact, rest, nullptr, nullptr, backend);
    PlaceSums found;
    for (const std::size_t o : places) {
        const std::vector<Matrix>&own = values_at(base.plan, o), &other = values_at(repaired, o);
        found[o].repaired = errors_at(other, base.truth, o, base.direction);
        const std::vector<double>& e = base.plan_error[o];
        std::size_t i = 0;
        for (std::size_t m = 0; m < own.size(); ++m) {
            const std::vector<double>& with = own[m].values;
            const std::vector<double>& without = other[m].values;
            for (std::size_t a = 0; a < with.size(); ++a, ++i) {
                // e^2 - (e - r)^2 without the cancellation of two squares.
                const long double removed = static_cast<long double>(with[a]) - without[a];
                const long double fall = removed * (2 * static_cast<long double>(e[i]) - removed);
                if (!std::isfinite(fall)) continue;
                found[o].fall += fall;
                found[o].moved += removed * removed;
            }
        }
    }
    return found;
}

PlaceSums site_counterfactuals(const Group& group, const GroupBase& base, const RoundingPlan& plan,
                               const Faults& faults, Site site, const std::vector<std::size_t>& places,
                               const AttentionBackend& backend) {
    PlaceSums found = repaired_together(group, base, plan, faults, {site}, places, backend);
    const RunOutputs alone = run_plan(group, plan.exact_except(site), faults.only(site), nullptr, nullptr, backend);
    for (const std::size_t o : places) found[o].alone = errors_at(values_at(alone, o), base.truth, o, base.direction);
    return found;
}

SiteEffect site_effect(const std::vector<PlaceSums>& by_group, std::size_t o, long double plan_squared,
                       const ErrorMeasure& plan, const ErrorMeasure& floor) {
    SiteEffect effect;
    long double fall = by_group.front()[o].fall, moved = by_group.front()[o].moved;
    ErrorSums alone = by_group.front()[o].alone, repaired = by_group.front()[o].repaired;
    for (std::size_t g = 1; g < by_group.size(); ++g) {
        fall += by_group[g][o].fall;
        moved += by_group[g][o].moved;
        alone.join(by_group[g][o].alone);
        repaired.join(by_group[g][o].repaired);
    }
    effect.alone = alone.measure();
    effect.repaired = repaired.measure();
    if (plan_squared > 0) {
        effect.share = static_cast<double>(fall / plan_squared);
        effect.moved_squared = static_cast<double>(moved / plan_squared);
        const double size = (effect.alone.error_norm / plan.error_norm).to_double();
        effect.alone_squared = size * size;
        effect.interaction = effect.share - effect.alone_squared;
    }
    // No distance between finite elements says how far it is from a number to none.
    if (effect.repaired.nonfinite != plan.nonfinite) effect.moved_squared = std::numeric_limits<double>::infinity();
    // Within a factor of two of what binary64 itself leaves, the site did nothing that can be told.
    effect.alone_below_floor =
        effect.alone.nonfinite == 0 && effect.alone.error_norm <= WideReal(2.0) * floor.error_norm;
    return effect;
}

std::vector<std::vector<Site>> redundant_sets(const std::vector<Site>& sites, const std::vector<SiteEffect>& effects) {
    std::vector<std::vector<Site>> sets;
    std::vector<Site> differ;
    std::vector<bool> taken(sites.size(), false);
    for (std::size_t s = 0; s < sites.size(); ++s) {
        if (taken[s] || !is_redundant(effects[s])) continue;
        std::vector<Site> same{sites[s]};
        for (std::size_t t = s + 1; t < sites.size(); ++t) {
            if (!is_redundant(effects[t]) || !(effects[t].alone.error_norm == effects[s].alone.error_norm)) continue;
            same.push_back(sites[t]);
            taken[t] = true;
        }
        if (same.size() > 1)
            sets.push_back(std::move(same));
        else
            differ.push_back(sites[s]);
    }
    if (differ.size() > 1) sets.push_back(std::move(differ));
    return sets;
}

long double squared(const std::vector<double>& error) {
    long double squares = 0;
    for (const double e : error)
        if (std::isfinite(e)) squares += static_cast<long double>(e) * e;
    return squares;
}

}  // namespace faultline::attribution

namespace faultline {

bool is_redundant(const SiteEffect& effect) {
    constexpr double next_to_nothing = 0.1;  // of what it does alone
    return !effect.alone_below_floor && effect.alone_squared >= worth_naming &&
           std::abs(effect.share) < next_to_nothing * effect.alone_squared;
}

}  // namespace faultline
