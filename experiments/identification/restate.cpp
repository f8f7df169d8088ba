// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/restate.hpp>

#include <algorithm>
#include <tuple>
#include <utility>

namespace faultline::identification {
namespace {

/// A preset with the changes that a search made, as far as it lacks them.
struct Restated {
    std::size_t preset = 0;
    RoundingPlan plan;
    std::vector<Difference> needed;  ///< from the preset
    BothParts runs;
    std::size_t equal = 0, lse = 0;  ///< elements, and rows of the lse, on both parts
};

std::pair<std::size_t, std::size_t> equal_of(const BothParts& runs) {
    const OutputMatches sum = outputs_of(runs);
    return {sum.all().equal, telling_lse(sum).equal};
}

/// Whether one is the better answer: fewer changes, of as many more elements, then more of the lse.
bool better(const Restated& a, const Restated& b) {
    if (a.needed.size() != b.needed.size()) return a.needed.size() < b.needed.size();
    return a.equal != b.equal ? a.equal > b.equal : a.lse > b.lse;
}

/// Whether the second run has as many elements as the first, or as many but what is not modelled may decide.
bool as_many(const Flips& f, const Match& first, bool modelled) {
    const double lost = static_cast<double>(f.lost) - static_cast<double>(f.won);
    return lost <= 0 ||
           (!modelled && first.differing() > 0 && lost <= unmodelled_share * static_cast<double>(first.total));
}

/// The presets that `changed`, made in them, makes a better answer than `now`, best first, of equals as ranked: fewer changes
/// are where what they lose against `most`, the run of what was searched, is no more than a single change would have to gain.
std::vector<Restated> restatements(const Parts& parts, const std::vector<RoundingPlan>& presets, const Restated& now,
                                   const BothParts& most, const std::vector<Difference>& changed,
                                   const Extras& extras) {
    std::vector<Restated> all;
    std::vector<std::pair<std::size_t, std::vector<Difference>>> tries;
    for (std::size_t i = 0; i < presets.size(); ++i) tries.emplace_back(i, changed);
    // The answer without one of its changes, and without two: a rule of both passes is two.
    for (std::size_t a = 0; a < now.needed.size(); ++a)
        for (std::size_t b = a; b < now.needed.size(); ++b) {
            std::vector<Difference>& rest = tries.emplace_back(now.preset, now.needed).second;
            rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(b));
            if (a != b) rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(a));
        }
    for (const auto& [i, fields] : tries) {
        Restated next{i, with_fields_of(presets[i], now.plan, fields), {}, {}};
        next.needed = differences(presets[i], next.plan);
        if (next.needed.empty() || next.needed.size() > now.needed.size() || next.plan.same_numerics(now.plan))
            continue;
        if (!problem_with(next.plan).empty() || !problem_with(next.plan, extras).empty()) continue;
        try {
            next.runs = run_on(parts, next.plan);
        } catch (const NoRoom&) {
            continue;
        }
        const bool fewer = next.needed.size() < now.needed.size();
        const BothParts& first = fewer ? most : now.runs;
        if (!as_many(against(first.searched, next.runs.searched), all_of(first.searched), !fewer) ||
            !as_many(against(first.held_out, next.runs.held_out), all_of(first.held_out), !fewer))
            continue;
        std::tie(next.equal, next.lse) = equal_of(next.runs);
        if (better(next, now)) all.push_back(std::move(next));
    }
    std::stable_sort(all.begin(), all.end(), better);
    return all;
}

/// Of the presets the first that needs fewest changes to be this plan.
Restated said_of(const Parts& parts, const std::vector<RoundingPlan>& presets, const SearchedPlan& found) {
    Restated now{
        0, found.plan, differences(presets.front(), found.plan), {found.base, parts.held_out.baseline(found.plan)}};
    for (std::size_t i = 1; i < presets.size(); ++i) {
        std::vector<Difference> needed = differences(presets[i], found.plan);
        if (needed.size() >= now.needed.size()) continue;
        now.preset = i;
        now.needed = std::move(needed);
    }
    std::tie(now.equal, now.lse) = equal_of(now.runs);
    return now;
}

}  // namespace

void restate(const Parts& parts, const std::vector<RoundingPlan>& presets, const RoundingPlan& start,
             const Extras& extras, SearchedPlan& found) {
    if (differences(start, found.plan).empty()) return;
    Restated now = said_of(parts, presets, found);
    const BothParts most = now.runs;
    std::vector<Difference> changed = differences(start, found.plan);
    // Each round has fewer changes or more elements. What the new answer needs is less than what was changed from the start, and
    // a preset that the search's other changes spoiled may be better with that alone.
    for (std::size_t round = 0; round < presets.size() && !now.needed.empty(); ++round) {
        bool restated = false;
        for (Restated& next : restatements(parts, presets, now, most, changed, extras)) {
            FoundChange step =
                judged(next.needed, run_on(parts, presets[next.preset]), next.runs, found.singles.size());
            if (!step.carries) continue;
            std::erase_if(found.found, [](const FoundChange& f) { return f.carries; });
            found.found.push_back(std::move(step));
            now = std::move(next);
            restated = true;
            break;
        }
        if (!restated && changed == now.needed) break;
        changed = now.needed;
    }
    found.plan = now.plan;
    found.base = std::move(now.runs.searched);
}

std::vector<RankedPlan> with_changes(const Evaluator& evaluator, const std::vector<RoundingPlan>& presets,
                                     const RoundingPlan& found, const std::vector<Difference>& changes,
                                     const Extras& extras) {
    std::vector<RankedPlan> changed;
    for (const RoundingPlan& preset : presets) {
        const RoundingPlan plan = with_fields_of(preset, found, changes);
        if (!problem_with(plan).empty() || !problem_with(plan, extras).empty()) continue;
        RankedPlan ranked{preset.name, {}, {}};
        const Baseline base = evaluator.baseline(plan);
        for (const OutputMatches& match : base.matches) ranked.match.add(match);
        changed.push_back(std::move(ranked));
    }
    return changed;
}

}  // namespace faultline::identification
