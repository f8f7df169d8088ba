// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/search.hpp>

#include <algorithm>
#include <utility>

namespace faultline::identification {
namespace {

constexpr std::size_t pair_candidates = 8;  // of the changes that help, the best so many are tried in pairs
constexpr int most_rounds =
    6;  // changes accepted one after another; a preset is nearer than that, or the search says so
constexpr std::size_t most_refused =
    4;  // changes that do not carry over, of one plan; then there is nothing to be found here
constexpr std::size_t most_starts = 4;  // each of the others costs some 150 runs of one head; four stay within a minute
constexpr double nothing_left = 0.999;  // what differs then is the order of atomics and last bits (docs/kernels.md)

/// The best of the changes that are believed, or none: each gains more elements than what is not modelled may decide, or
/// leaves none that differs.
struct Choice {
    const Neighbour* neighbour = nullptr;
    Flips flips;
};
Choice best_of(const std::vector<Neighbour>& neighbours, const std::vector<Evaluated>& results,
               const std::vector<RoundingPlan>& refused, std::ptrdiff_t& gain) {
    Choice best;
    for (std::size_t i = 0; i < neighbours.size(); ++i) {
        if (std::any_of(refused.begin(), refused.end(),
                        [&](const RoundingPlan& plan) { return plan.same_numerics(neighbours[i].plan); }))
            continue;
        const Flips& f = results[i].flips;
        const auto won = static_cast<std::ptrdiff_t>(f.won) - static_cast<std::ptrdiff_t>(f.lost);
        if (f.z() < believed_z || won <= gain) continue;
        const Match all = results[i].match.all();
        if (static_cast<double>(won) <= unmodelled_share * static_cast<double>(all.total) && all.differing() > 0)
            continue;
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

/// Elements that the second run wins and loses against the first, over all units.
Flips against(const Baseline& first, const Baseline& second) {
    Flips sum;
    for (std::size_t u = 0; u < first.equal.size(); ++u) sum.add(flips(first.equal[u], second.equal[u]));
    return sum;
}

/// What a change does on the elements held out.
FoundChange judged(const Evaluator& held_out, const RoundingPlan& plan, const Choice& choice) {
    const Baseline before = held_out.baseline(plan), after = held_out.baseline(choice.neighbour->plan);
    FoundChange found{choice.neighbour->changes, choice.flips, against(before, after), false};
    Match left;
    for (const OutputMatches& match : after.matches) left.add(match.all());
    found.carries =
        found.held_out.z() >= carried_z || (found.held_out.lost == 0 && left.differing() == 0 && left.total > 0);
    return found;
}

/// Changes the plan step by step while a change, or a pair of changes, is believed to help and carries over.
SearchedPlan climb(const Parts& parts, const RoundingPlan& start, const NeighbourhoodOptions& around) {
    SearchedPlan at;
    at.plan = start;
    for (int round = 0;; ++round) {
        at.base = parts.searched.baseline(at.plan);
        at.singles = neighbours(at.plan, around);
        at.tried = parts.searched.evaluate(at.singles, at.base);
        if (round == most_rounds) return at;
        const std::vector<Neighbour> pairs = pairs_of(at.plan, at.singles, at.tried, around.extras);
        const std::vector<Evaluated> tried_pairs = parts.searched.evaluate(pairs, at.base);
        std::vector<RoundingPlan> refused;
        bool moved = false;
        while (!moved && refused.size() < most_refused) {
            std::ptrdiff_t gain = 0;
            Choice best = best_of(at.singles, at.tried, refused, gain);
            if (const Choice pair = best_of(pairs, tried_pairs, refused, gain); pair.neighbour != nullptr) best = pair;
            if (best.neighbour == nullptr) return at;
            at.found.push_back(judged(parts.held_out, at.plan, best));
            moved = at.found.back().carries;
            if (moved)
                at.plan = RoundingPlan(best.neighbour->plan);
            else
                refused.push_back(best.neighbour->plan);
        }
        if (!moved) return at;
    }
}

double equal_share(const Baseline& base) {
    Match sum;
    for (const OutputMatches& match : base.matches) sum.add(match.all());
    return sum.share();
}

std::size_t worst_unit(const Baseline& base) {
    const auto fewer = [](const OutputMatches& a, const OutputMatches& b) {
        return a.all().differing() < b.all().differing();
    };
    return static_cast<std::size_t>(std::max_element(base.matches.begin(), base.matches.end(), fewer) -
                                    base.matches.begin());
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
        if (changes(best) <= 1 && equal_share(best.base) >= nothing_left) break;
        const std::size_t u = worst_unit(best.base);
        const Evaluator one = parts.searched.of_unit(u);
        SearchedPlan other = climb({one, parts.held_out}, starts[s], around);
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
            if (found.singles[i].plan[site] == found.plan[site]) continue;
            e.could_explain = std::max(e.could_explain, found.tried[i].flips.won);
            if (!makes_exact(found.singles[i], site)) continue;
            tried = true;
            e.exact = found.tried[i].flips;
            e.told = e.exact.z() <= -believed_z;
        }
        if (tried) all.push_back(e);
    }
    return all;
}

}  // namespace faultline::identification
