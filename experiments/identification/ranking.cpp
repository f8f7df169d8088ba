// SPDX-License-Identifier: Apache-2.0
// What is nearer, what is as near, and what is near enough.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <span>
#include <string>

#include <faultline/identification/identify.hpp>

namespace faultline {
namespace {

bool better(const RankedPlan& a, const RankedPlan& b) {
    const Match x = a.match.all(), y = b.match.all();
    if (x.equal != y.equal) return x.equal > y.equal;
    const std::size_t of_a = telling_lse(a.match).equal, of_b = telling_lse(b.match).equal;
    if (of_a != of_b) return of_a > of_b;
    return x.within_one_ulp > y.within_one_ulp;
}

/// The names of those that are within unmodelled_share of the match, and not told from it by the lse.
std::vector<std::string> ties_with(const OutputMatches& match, std::span<const RankedPlan> plans) {
    std::vector<std::string> names;
    for (const RankedPlan& other : plans)
        if (match.all().share() - other.match.all().share() <= unmodelled_share &&
            std::abs(telling_lse(match).share() - telling_lse(other.match).share()) <= told_by_lse)
            names.push_back(other.plan);
    return names;
}

}  // namespace

std::vector<std::string> KernelIdentification::ranked_ties() const {
    return ranking.empty() ? std::vector<std::string>{}
                           : ties_with(ranking.front().match, std::span(ranking).subspan(1));
}

std::vector<std::string> KernelIdentification::near_ties() const {
    if (changes.empty()) return ranked_ties();
    std::vector<std::string> names = ties_with(match, changed);
    std::erase(names, nearest);
    return names;
}

Match telling_lse(const OutputMatches& match) {
    return match.lse.total > 0 && match.lse.share() < found_share ? Match{0, 0, match.lse.total} : match.lse;
}

double found_share_of(Output output) { return output == Output::dq ? found_share_of_dq : found_share_of_others; }

double carried_z_of(std::size_t tried) {
    const auto tail = [](double z) { return 0.5 * std::erfc(z / std::numbers::sqrt2); };
    const double allowed = tail(carried_z) / static_cast<double>(std::max<std::size_t>(tried, 1));
    double least = carried_z, most = 40;  // of which the tail is 0
    for (int i = 0; i < 60; ++i) {
        const double z = (least + most) / 2;
        (tail(z) > allowed ? least : most) = z;
    }
    return most;
}

std::size_t rules_in(const std::vector<Difference>& changes) {
    std::set<std::string> rules;
    for (const Difference& d : changes)
        rules.insert(d.field.starts_with("sites.") ? d.field.substr(0, d.field.rfind('.')) : d.field);
    return rules.size();
}

bool KernelIdentification::is_far() const { return rules_in(changes) > most_rules_away && match.all().differing() > 0; }

std::vector<Output> KernelIdentification::lacking() const {
    std::vector<Output> outputs;
    for (const Output output : all_outputs)
        if (match[output].total > 0 && match[output].share() < found_share_of(output)) outputs.push_back(output);
    return outputs;
}

std::optional<Output> KernelIdentification::nearest_to_bound() const {
    std::optional<Output> nearest;
    const auto beyond = [&](Output output) { return match[output].share() - found_share_of(output); };
    for (const Output output : all_outputs)
        if (match[output].total > 0 && (!nearest || beyond(output) < beyond(*nearest))) nearest = output;
    return nearest;
}

void order_ranking(std::vector<RankedPlan>& ranking) {
    std::stable_sort(ranking.begin(), ranking.end(), better);
    auto lead = ranking.begin();
    for (auto at = ranking.begin(); at != ranking.end(); ++at)
        if (ranking.front().match.all().share() - at->match.all().share() <= unmodelled_share &&
            telling_lse(at->match).share() - telling_lse(lead->match).share() > told_by_lse)
            lead = at;
    if (lead != ranking.end()) std::rotate(ranking.begin(), lead, lead + 1);
}

std::vector<Output> KernelIdentification::unlike() const {
    std::vector<Output> outputs;
    for (const Output output : all_outputs)
        if (match[output].total > 0 && match[output].share() < more_than_chance) outputs.push_back(output);
    return outputs;
}

}  // namespace faultline
