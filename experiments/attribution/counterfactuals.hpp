// SPDX-License-Identifier: Apache-2.0
// The counterfactuals of one head group: what each site does alone, and what its repair removes.
#pragma once

#include <array>
#include <vector>

#include <faultline/attribution/group_run.hpp>

namespace faultline::attribution {

/// One site's effect on one output of one group.
struct SiteSums {
    ErrorSums alone, repaired;
    long double fall = 0;   ///< |E|^2 - |E'|^2 over the elements that are finite in both
    long double moved = 0;  ///< |E - E'|^2 over the same
};

using PlaceSums = std::array<SiteSums, place_count>;

/// What is known of a group before its counterfactuals run.
struct GroupBase {
    GroupTruth truth;
    RunOutputs plan;                                            ///< of the plan itself
    std::array<std::vector<double>, place_count> plan_error;    ///< by place
    std::array<long double, place_count> plan_error_squared{};  ///< finite elements
    std::vector<double> direction;                              ///< mean key
    std::vector<Realised> realised;                             ///< what each fault did in the plan's run
};

/// Runs both counterfactuals of `site`.
PlaceSums site_counterfactuals(const Group& group, const GroupBase& base, const RoundingPlan& plan,
                               const Faults& faults, Site site, const std::vector<std::size_t>& places,
                               const AttentionBackend& backend);

/// One run with all of `sites` repaired; `alone` of what it returns is empty.
PlaceSums repaired_together(const Group& group, const GroupBase& base, const RoundingPlan& plan, const Faults& faults,
                            const std::vector<Site>& sites, const std::vector<std::size_t>& places,
                            const AttentionBackend& backend);

/// The sums of all groups at place `o` as an effect. plan_squared: |E|^2 of the plan, all groups.
SiteEffect site_effect(const std::vector<PlaceSums>& by_group, std::size_t o, long double plan_squared,
                       const ErrorMeasure& plan, const ErrorMeasure& floor);

/// The redundant sites in sets of two and more (OutputAttribution::redundant). `effects` parallel to `sites`.
std::vector<std::vector<Site>> redundant_sets(const std::vector<Site>& sites, const std::vector<SiteEffect>& effects);

/// |E|^2 over finite elements.
long double squared(const std::vector<double>& error);

}  // namespace faultline::attribution
