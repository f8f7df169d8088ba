// SPDX-License-Identifier: Apache-2.0
// RoundingPlan: one kernel's numerics as data. Compare, print, read from TOML, change one rule.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include <faultline/plan/rule.hpp>
#include <faultline/plan/schedule.hpp>
#include <faultline/plan/site.hpp>
#include <faultline/plan/tile_case.hpp>

namespace faultline {

class RoundingPlan {
  public:
    std::string name = "exact";
    std::string description;
    std::string source;  ///< where the kernel's code stands: file and lines
    Schedule schedule;
    std::vector<TileCase> tiles;  ///< tile sizes by head size, not yet settled: for_head_dim does it

    /// Every site exact: the mathematical function in binary64.
    RoundingPlan() = default;

    [[nodiscard]] const Rule& operator[](Site site) const { return rules_[index(site)]; }
    void set(Site site, const Rule& rule) { rules_[index(site)] = rule; }

    /// This plan with one rule changed.
    [[nodiscard]] RoundingPlan with(Site site, const Rule& rule) const;
    /// This plan with one site exact: the counterfactual `repaired`.
    [[nodiscard]] RoundingPlan repaired(Site site) const { return with(site, Rule{}); }
    /// This plan with every other site exact: the counterfactual `alone`.
    [[nodiscard]] RoundingPlan exact_except(Site site) const;
    /// The sites whose rule is not exact, in schedule order.
    [[nodiscard]] std::vector<Site> rounding_sites() const;

    /// The same in everything, names included.
    friend bool operator==(const RoundingPlan&, const RoundingPlan&) = default;
    /// Same rules, schedule and tiles; names do not count.
    [[nodiscard]] bool same_numerics(const RoundingPlan& other) const {
        return rules_ == other.rules_ && schedule == other.schedule && tiles == other.tiles;
    }

  private:
    std::array<Rule, site_count> rules_{};
};

/// The plan that a head of this size runs: the first of plan.tiles that fits has replaced the schedule's fields, and the
/// list is empty. A plan without a list, or none of whose cases fits, keeps its schedule. head_dim is d, the size of q and k. A
/// sliding window bounds what a query sees on the left, or on the right off the diagonal; `causal` stands beside it as the call
/// has it, and a case that names no window is chosen by it alone.
[[nodiscard]] RoundingPlan for_head_dim(const RoundingPlan& plan, int head_dim, bool causal = true,
                                        bool window = false);

/// Ranges of the schedule's integers: far beyond any kernel, and small enough that nothing made of them overflows or fills
/// the memory. Block sizes are 0 (the whole sequence) or more.
inline constexpr int most_block = 1 << 20, most_key_splits = 1 << 12, most_delta_threads = 1 << 10;

struct PlanProblem {
    std::string field;  ///< as a plan file spells it: "schedule.key_splits"
    std::string what;   ///< "is 0: expected 1 to 4096"
};
/// What is wrong with a plan, or nothing. E.g. p normalised before P V needs a single key tile.
[[nodiscard]] std::optional<PlanProblem> find_problem(const RoundingPlan& plan);
/// The same as a sentence, empty for nothing.
[[nodiscard]] std::string problem_with(const RoundingPlan& plan);

/// What a problem asks of a kernel beyond softmax(scale q k^T + bias) v.
struct Extras {
    bool softcap = false, sink = false, dropout = false;
};
/// Why a kernel that runs the plan cannot compute such a problem, as a sentence; empty where it can. E.g. a zero-sum
/// projection under a softcap, whose score gradient does not sum to zero.
[[nodiscard]] std::string problem_with(const RoundingPlan& plan, const Extras& extras);
/// Whether the site has something to do in such a problem: those of a softcap, a sink, dropout only where there is one.
[[nodiscard]] bool takes_part(Site site, const Extras& extras);

/// False where the plan's schedule passes the site for no input whatever, so that a rule for it would say nothing: the
/// backward's scores where p is saved, the merge of splits where there are none.
[[nodiscard]] bool reaches(const RoundingPlan& plan, Site site);

}  // namespace faultline
