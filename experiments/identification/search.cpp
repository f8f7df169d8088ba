// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/search.hpp>

#include <algorithm>
#include <utility>

#include <faultline/identification/both_parts.hpp>

namespace faultline::identification {
namespace {

constexpr std::size_t pair_candidates = 8;  // of the changes that help, the best so many are tried in pairs
constexpr int most_rounds =
    6;  // changes accepted one after another; a preset is nearer than that, or the search says so
constexpr std::size_t most_refused =
    4;  // changes that do not carry over, of one plan; then there is nothing to be found here
constexpr std::size_t most_starts = 4;  // each of the others costs some 500 runs of one head
constexpr int steps_behind =
    2;  // a preset that has not caught up by then is no start: a kernel is a rule or two away from one
constexpr double mostly_equal = 0.9;    // of an output; where p or ds is cast otherwise, a half and more differ in bf16
constexpr double nothing_left = 0.999;  // what differs then is the order of atomics and last bits (docs/kernels.md)

/// A change that was picked, and what it does to the elements that it was picked on.
struct Choice {
    const Neighbour* neighbour = nullptr;
    Flips flips;
};

/// The best of the changes that are believed and gain more than `gain`, or none.
Choice best_of(const std::vector<Neighbour>& neighbours, const std::vector<Evaluated>& results,
               const std::vector<RoundingPlan>& refused, std::ptrdiff_t& gain) {
    Choice best;
    for (std::size_t i = 0; i < neighbours.size(); ++i) {
        if (std::any_of(refused.begin(), refused.end(),
                        [&](const RoundingPlan& plan) { return plan.same_numerics(neighbours[i].plan); }))
            continue;
        const Flips& f = results[i].flips;
        const auto won = static_cast<std::ptrdiff_t>(f.won) - static_cast<std::ptrdiff_t>(f.lost);
        if (won <= gain || !believed(f, results[i].match.all())) continue;
        gain = won;
        best = {&neighbours[i], f};
    }
    return best;
}

/// Pairs of the changes that make more elements equal, believed or not.
std::vector<Neighbour> pairs_of(const RoundingPlan& plan, const std::vector<Neighbour>& singles,
                                const std::vector<Evaluated>& results, const Extras& extras) {
    std::vector<std::size_t> helping;
    for (std::size_t i = 0; i < singles.size(); ++i)
        if (results[i].flips.won > results[i].flips.lost) helping.push_back(i);
    const auto gain = [&](std::size_t i) { return results[i].flips.won - results[i].flips.lost; };
    std::stable_sort(helping.begin(), helping.end(), [&](std::size_t a, std::size_t b) { return gain(a) > gain(b); });
    if (helping.size() > pair_candidates) helping.resize(pair_candidates);
    std::vector<Neighbour> pairs;
    for (std::size_t a = 0; a < helping.size(); ++a)
        for (std::size_t b = a + 1; b < helping.size(); ++b) {
            Neighbour pair = together(plan, singles[helping[a]], singles[helping[b]], extras);
            if (!pair.field.empty()) pairs.push_back(std::move(pair));
        }
    return pairs;
}

/// A pair is picked as one choice, and a change that does nothing, or fits what was searched alone, rides on one that helps. So
/// each of the two has to be a change that would be made by itself where the other stands; else the other is tried alone.
/// `found` is of the pair; what is to be made is returned, none where that is neither the pair nor one of the two.
const Neighbour* needed_of(const Parts& parts, const Neighbour& pair, const BothParts& before, const BothParts& after,
                           std::size_t tried, FoundChange& found) {
    const Neighbour* needed = nullptr;
    FoundChange best = found;
    bool both = true;
    for (std::size_t i = 0; i < pair.members.size(); ++i) {
        const Neighbour& member = pair.members[i];
        const Neighbour& other = pair.members[1 - i];
        const BothParts without = run_on(parts, other.plan);
        const FoundChange adds = judged(differences(other.plan, pair.plan), without, after, tried);
        if (adds.carries && believed(adds.searched, all_of(after.searched))) continue;
        both = false;
        best.idle.push_back({member.changes, adds.searched, adds.held_out});
        FoundChange alone = judged(other.changes, before, without, tried);
        if (!alone.carries || !believed(alone.searched, all_of(without.searched))) continue;
        if (needed != nullptr && against(without.searched, after.searched).z() > 0) continue;  // the first is as good
        alone.idle = {best.idle.back()};
        needed = &other;
        found = std::move(alone);
    }
    if (both) return &pair;
    if (needed == nullptr) {
        best.carries = false;
        found = std::move(best);
    }
    return needed;
}

/// Changes that were tried on the units searched.
struct Tried {
    std::vector<Neighbour> changes;
    std::vector<Evaluated> results;  ///< parallel to changes
};

/// The best of all, without those refused.
Choice best_of(const SearchedPlan& at, const std::vector<const Tried*>& pairs,
               const std::vector<RoundingPlan>& refused) {
    std::ptrdiff_t gain = 0;
    Choice best = best_of(at.singles, at.tried, refused, gain);
    for (const Tried* tried : pairs)
        if (const Choice pair = best_of(tried->changes, tried->results, refused, gain); pair.neighbour != nullptr)
            best = pair;
    return best;
}

/// Makes the best change that is believed and carries over. False: there is none.
bool step(const Parts& parts, SearchedPlan& at, const std::vector<const Tried*>& pairs) {
    std::vector<RoundingPlan> refused;
    std::size_t tried = at.singles.size();
    for (const Tried* more : pairs) tried += more->changes.size();
    while (refused.size() < most_refused) {
        const Choice best = best_of(at, pairs, refused);
        if (best.neighbour == nullptr) return false;
        const BothParts before{at.base, parts.held_out.baseline(at.plan)}, after = run_on(parts, best.neighbour->plan);
        FoundChange found = judged(best.neighbour->changes, before, after, tried);
        const Neighbour* made = best.neighbour;
        if (found.carries && !made->members.empty())
            made = needed_of(parts, *best.neighbour, before, after, tried, found);
        const bool carries = found.carries;
        found.pair = found.idle.empty() && !best.neighbour->members.empty();
        at.found.push_back(std::move(found));
        if (carries) {
            at.plan = RoundingPlan(made->plan);
            return true;
        }
        refused.push_back(best.neighbour->plan);
    }
    return false;
}

std::size_t worst_unit(const Baseline& base) {
    const auto fewer = [](const OutputMatches& a, const OutputMatches& b) {
        return a.all().differing() < b.all().differing();
    };
    return static_cast<std::size_t>(std::max_element(base.matches.begin(), base.matches.end(), fewer) -
                                    base.matches.begin());
}

/// The best pairs of a cast's rounding and a rule, tried on the unit with most elements that differ, and those that are believed
/// there on all. Some hundred pairs: none where the best of the other changes leaves nothing to be explained, nor at a cast of
/// whose outputs one is mostly the kernel's, since another rounding of every p or ds reaches all of them.
Tried hidden_pairs(const Parts& parts, SearchedPlan& at, const Choice& best, const Extras& extras) {
    OutputMatches matches;
    for (const OutputMatches& match : at.base.matches) matches.add(match);
    Match after = matches.all();
    after.equal += best.flips.won - best.flips.lost;
    if (after.share() >= nothing_left) return {};
    std::vector<Site> casts;
    const auto differs = [&](Output output) {
        return matches[output].total == 0 || matches[output].share() < mostly_equal;
    };
    if (differs(Output::o)) casts.push_back(Site::p_cast);
    if (differs(Output::dv)) casts.push_back(Site::bwd_p_cast);
    if (differs(Output::dq) && differs(Output::dk)) casts.push_back(Site::ds_cast);
    const std::vector<Neighbour> pairs = rounding_pairs(at.plan, at.singles, casts, extras);
    if (pairs.empty()) return {};
    const Evaluator one = parts.searched.of_unit(worst_unit(at.base));
    Baseline base = one.baseline(at.plan);
    const std::vector<Evaluated> tried = one.evaluate(pairs, base);
    std::vector<RoundingPlan> taken;
    Tried found;
    while (found.changes.size() < pair_candidates) {
        std::ptrdiff_t gain = 0;
        const Choice next = best_of(pairs, tried, taken, gain);
        if (next.neighbour == nullptr) break;
        taken.push_back(next.neighbour->plan);
        found.changes.push_back(*next.neighbour);
    }
    found.results = parts.searched.evaluate(found.changes, at.base);
    return found;
}

/// Changes the plan step by step while a change, or a pair of changes, is believed to help and carries over. `best`, of the one
/// unit searched, where there is a plan to beat: a climb that is behind it after steps_behind steps ends there.
SearchedPlan climb(const Parts& parts, const RoundingPlan& start, const NeighbourhoodOptions& around,
                   const EqualFlags* best = nullptr) {
    SearchedPlan at;
    at.plan = start;
    for (int round = 0;; ++round) {
        at.base = parts.searched.baseline(at.plan);
        if (best != nullptr && round >= steps_behind)
            if (const Flips f = flips(*best, at.base.equal.front()); f.won < f.lost) return at;
        at.singles = neighbours(at.plan, around);
        at.tried = parts.searched.evaluate(at.singles, at.base);
        if (round == most_rounds) return at;
        Tried helping{pairs_of(at.plan, at.singles, at.tried, around.extras), {}};
        helping.results = parts.searched.evaluate(helping.changes, at.base);
        const Tried hidden = hidden_pairs(parts, at, best_of(at, {&helping}, {}), around.extras);
        if (!step(parts, at, {&helping, &hidden})) return at;
    }
}

/// How many outputs have all of their elements equal.
std::size_t whole_outputs(const OutputMatches& match) {
    return static_cast<std::size_t>(std::count_if(match.outputs.begin(), match.outputs.end(),
                                                  [](const Match& m) { return m.total > 0 && m.differing() == 0; }));
}

}  // namespace

std::vector<std::size_t> starts_of(const std::vector<RankedPlan>& ranking) {
    std::vector<std::size_t> starts(ranking.size());
    for (std::size_t i = 0; i < starts.size(); ++i) starts[i] = i;
    if (starts.empty()) return starts;
    std::stable_sort(starts.begin() + 1, starts.end(), [&](std::size_t a, std::size_t b) {
        return whole_outputs(ranking[a].match) > whole_outputs(ranking[b].match);
    });
    return starts;
}

SearchedPlan search_from(const Parts& parts, const std::vector<RoundingPlan>& starts,
                         const NeighbourhoodOptions& around) {
    SearchedPlan best = climb(parts, starts.front(), around);
    const auto changes = [&](const SearchedPlan& p) { return differences(starts[p.start], p.plan).size(); };
    const auto beats = [&](const Flips& f, const SearchedPlan& other) {
        return f.z() >= believed_z || (f.won >= f.lost && changes(other) < changes(best));
    };
    for (std::size_t s = 1; s < std::min(starts.size(), most_starts); ++s) {
        if (changes(best) <= 1 && all_of(best.base).share() >= nothing_left) break;
        const std::size_t u = worst_unit(best.base);
        const Evaluator one = parts.searched.of_unit(u);
        SearchedPlan other = climb({one, parts.held_out}, starts[s], around, &best.base.equal[u]);
        other.start = s;
        if (!beats(flips(best.base.equal[u], other.base.equal.front()), other)) continue;
        if (best.base.equal.size() > 1) {
            std::vector<FoundChange> found = std::move(other.found);
            other = climb(parts, other.plan, around);
            other.start = s;
            other.found.insert(other.found.begin(), found.begin(), found.end());
            if (!beats(against(best.base, other.base), other)) continue;
        }
        best = std::move(other);
    }
    return best;
}

void try_neighbours(const Evaluator& evaluator, const NeighbourhoodOptions& around, SearchedPlan& found) {
    found.base = evaluator.baseline(found.plan);
    found.singles = neighbours(found.plan, around);
    found.tried = evaluator.evaluate(found.singles, found.base);
}

std::vector<SiteEvidence> evidence_of(const SearchedPlan& found) {
    std::vector<SiteEvidence> all;
    for (const Site site : found.plan.rounding_sites()) {
        SiteEvidence e;
        e.site = site;
        bool tried = false;
        for (std::size_t i = 0; i < found.singles.size(); ++i) {
            const RoundingPlan& other = found.singles[i].plan;
            const Flips& f = found.tried[i].flips;
            if (other[site] == found.plan[site]) continue;
            e.could_explain = std::max(e.could_explain, f.won);
            // What a change of several sites does is said of none of them.
            if (!found.plan.with(site, other[site]).same_numerics(other)) continue;
            tried = true;
            if (other[site].is_exact()) {
                e.exact = f;
                e.told = f.z() <= -believed_z;
            }
            if (f.z() >= believed_z) e.better.push_back(found.singles[i].changes);
            if (f.z() <= -believed_z && !other[site].is_exact()) e.told_from.push_back(found.singles[i].changes);
        }
        if (tried) all.push_back(std::move(e));
    }
    return all;
}

}  // namespace faultline::identification
