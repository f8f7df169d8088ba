// SPDX-License-Identifier: Apache-2.0
// Which roundings does it take? The smallest sets of sites whose repair (the site made exact) brings a plan's error to a
// target, and the smallest set of sites that, everything else exact, has the plan's fault. Roundings act together: on a
// saturated row the casts of p and o cancel in part, and repairing one alone makes dq worse. So nothing is assumed
// monotone, and what was tried is part of the answer.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <faultline/attribution/plan_origin.hpp>
#include <faultline/bisection/search.hpp>
#include <faultline/bisection/target.hpp>
#include <faultline/cpu/backend.hpp>

namespace faultline {

/// Which question a search answers.
enum class BisectionKind : unsigned char {
    repair,     ///< the sites of the set exact, the others as the plan has them
    reproduce,  ///< the sites of the set as the plan has them, the others exact
};

struct BisectionAnswer {
    BisectionKind kind = BisectionKind::repair;
    std::vector<Target> targets;  ///< all to be met
    std::vector<Site> sites;      ///< those that can touch the targets' outputs; bit i of a mask is sites[i]
    std::vector<Site>
        untouched;  ///< rounding sites that cannot, left as the plan has them (repair) or exact (reproduce)
    /// Repairs alone: an error is asked to be smaller than it is with every site exact, so that no search was made.
    bool out_of_reach = false;
    bisection::SearchResult search;
    /// For every set of search.tried: the targets' values.
    std::map<bisection::SiteMask, std::vector<WideReal>> values;

    [[nodiscard]] std::vector<Site> sites_of(bisection::SiteMask set) const;
};

struct Bisection {
    std::string input;
    RoundingPlan plan;
    PlanOrigin origin;                     ///< filled by who chose the plan
    std::vector<BisectionAnswer> answers;  ///< until, then reproduce
    bool complete = true;                  ///< false: interrupted; the answers present are whole
};

struct BisectionOptions {
    std::vector<Target> until;      ///< repair until all of these are met; may be empty
    std::vector<Target> reproduce;  ///< reproduce these
    bisection::SearchOptions search;
    std::vector<int> heads;                            ///< empty: all query heads (a kv head's group is computed whole)
    int threads = 0;                                   ///< 0: one per hardware thread; results do not depend on it
    std::uint64_t seed = 0;                            ///< of stochastic rounding
    const AttentionBackend* backend = &cpu_backend();  ///< where plans run; results do not depend on it
    std::function<void(std::size_t done, std::size_t total, const std::string& what)> progress;
    std::function<bool()> cancelled;  ///< polled between runs
};

/// RequestError where a target names what the capture has not (a gradient without dO), or a number that the plan's own run
/// does not have: a coherence over one head, or nearness to a plan whose output is not finite.
[[nodiscard]] Bisection bisect(const Capture& capture, const RoundingPlan& plan, const BisectionOptions& options);

/// Whether the rounding at `site` can change `output` under this plan, by the flow of the data alone.
[[nodiscard]] bool can_touch(const RoundingPlan& plan, Site site, Output output);

}  // namespace faultline
