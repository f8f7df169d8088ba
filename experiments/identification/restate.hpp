// SPDX-License-Identifier: Apache-2.0
// What a search found, said from the preset that needs fewest changes to be it.
#pragma once

#include <vector>

#include <faultline/identification/search.hpp>

namespace faultline::identification {

/// The plan found from the preset that needs fewest changes: what a search changed, far from where it began, may be what another
/// preset has already, with rules besides. Takes the preset that with those of the changes that it lacks has as many elements,
/// searched and held out, as the plan found, by fewer changes, or more elements (then rows of the lse) by as many; then what
/// that one needed is tried in the others likewise, until none is better. `found` then holds the changes as one step. presets:
/// as ranked, settled.
void restate(const Parts& parts, const std::vector<RoundingPlan>& presets, const RoundingPlan& start,
             const Extras& extras, SearchedPlan& found);

/// The presets with the changes of a plan that was found, those that are plans then, on the elements of this evaluator: what is
/// as good as that plan is not told from it. By the presets' names, in their order.
[[nodiscard]] std::vector<RankedPlan> with_changes(const Evaluator& evaluator, const std::vector<RoundingPlan>& presets,
                                                   const RoundingPlan& found, const std::vector<Difference>& changes,
                                                   const Extras& extras);

}  // namespace faultline::identification
