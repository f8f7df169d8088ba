// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/both_parts.hpp>

#include <optional>

namespace faultline::identification {
namespace {

/// Whether a change that was picked of so many does on the elements held out what it did where it was found.
bool carries_over(const Flips& f, const Match& after, std::size_t tried) {
    return f.z() >= carried_z_of(tried) || (f.lost == 0 && after.differing() == 0 && after.total > 0);
}

/// An output of which the first run has every element and the second not: a kernel that has the change would have given them.
std::optional<Output> spoiled(const BothParts& before, const BothParts& after) {
    const OutputMatches had = outputs_of(before), has = outputs_of(after);
    for (const Output output : all_outputs)
        if (had[output].total > 0 && had[output].differing() == 0 && has[output].differing() > 0) return output;
    return std::nullopt;
}

}  // namespace

bool believed(const Flips& f, const Match& after) {
    if (f.z() < believed_z) return false;
    const auto won = static_cast<double>(f.won) - static_cast<double>(f.lost);
    return won > unmodelled_share * static_cast<double>(after.total) || after.differing() == 0;
}

Flips against(const Baseline& first, const Baseline& second) {
    Flips sum;
    for (std::size_t u = 0; u < first.equal.size(); ++u) sum.add(flips(first.equal[u], second.equal[u]));
    return sum;
}

Match all_of(const Baseline& base) {
    Match sum;
    for (const OutputMatches& match : base.matches) sum.add(match.all());
    return sum;
}

BothParts run_on(const Parts& parts, const RoundingPlan& plan) {
    return {parts.searched.baseline(plan), parts.held_out.baseline(plan)};
}

OutputMatches outputs_of(const BothParts& runs) {
    OutputMatches sum;
    for (const Baseline* part : {&runs.searched, &runs.held_out})
        for (const OutputMatches& match : part->matches) sum.add(match);
    return sum;
}

FoundChange judged(const std::vector<Difference>& changes, const BothParts& before, const BothParts& after,
                   std::size_t tried) {
    FoundChange found{changes, against(before.searched, after.searched), against(before.held_out, after.held_out)};
    found.spoils = spoiled(before, after);
    found.carries = !found.spoils && carries_over(found.held_out, all_of(after.held_out), tried);
    return found;
}

}  // namespace faultline::identification
