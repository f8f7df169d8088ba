// SPDX-License-Identifier: Apache-2.0
// A plan on the elements that are searched and on those that are held out, and when a change is believed of both.
#pragma once

#include <cstddef>
#include <vector>

#include <faultline/identification/evaluate.hpp>

namespace faultline::identification {

/// What a search works on, and what judges the changes that it finds.
struct Parts {
    const Evaluator& searched;
    const Evaluator& held_out;  ///< of none of the same elements
};

/// Whether a change gains more elements than chance, and than what is not modelled may decide, or leaves none that differs.
/// after: of the plan with the change.
[[nodiscard]] bool believed(const Flips& f, const Match& after);

/// Elements that the second run wins and loses against the first, over all units.
[[nodiscard]] Flips against(const Baseline& first, const Baseline& second);
/// Of all outputs and units.
[[nodiscard]] Match all_of(const Baseline& base);

/// A plan run on both parts of the elements.
struct BothParts {
    Baseline searched, held_out;
};
[[nodiscard]] BothParts run_on(const Parts& parts, const RoundingPlan& plan);
[[nodiscard]] OutputMatches outputs_of(const BothParts& runs);

/// A change that was believed on the elements searched, the best of so many that were tried, on all: it carries over where it
/// does on the elements held out what it did where it was found, and spoils no output of which `before` has every element.
[[nodiscard]] FoundChange judged(const std::vector<Difference>& changes, const BothParts& before,
                                 const BothParts& after, std::size_t tried);

}  // namespace faultline::identification
