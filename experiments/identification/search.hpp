// SPDX-License-Identifier: Apache-2.0
// The search for a plan that reproduces more of a kernel's outputs than any preset does. It climbs from the best preset, one
// believed change (or pair) after another; then, with one head, from a few others: the preset that a kernel is one rule away
// from is often not the one with most equal elements, since one rule of the backward can spoil two of four outputs.
#pragma once

#include <cstddef>
#include <vector>

#include <faultline/identification/both_parts.hpp>
#include <faultline/identification/neighbourhood.hpp>

namespace faultline::identification {

/// A plan of whose neighbourhood no change makes it believably better, and what was tried on it.
struct SearchedPlan {
    RoundingPlan plan;
    std::vector<FoundChange> found;  ///< on the way there
    std::size_t start = 0;           ///< of the starts, the one that it was found from
    Baseline base;                   ///< of `plan`
    std::vector<Neighbour> singles;  ///< its neighbourhood
    std::vector<Evaluated> tried;    ///< parallel to singles
};

/// Places in the ranking, in the order in which a search is to start there: the best, then those that have whole outputs of
/// the kernel, most first, then the others as ranked.
[[nodiscard]] std::vector<std::size_t> starts_of(const std::vector<RankedPlan>& ranking);

/// Climbs from the first start; from the next few on the head with most elements that still differ, for two steps and on while
/// that has not fewer elements there than the best, and where it is believed to be better, or as good with fewer changes, on all
/// heads. starts: settled, at least one.
[[nodiscard]] SearchedPlan search_from(const Parts& parts, const std::vector<RoundingPlan>& starts,
                                       const NeighbourhoodOptions& around);

/// The neighbourhood of the plan that was found tried again, on the elements of this evaluator.
void try_neighbours(const Evaluator& evaluator, const NeighbourhoodOptions& around, SearchedPlan& found);

/// What the outputs say of each rounding site of the plan, schedule order.
[[nodiscard]] std::vector<SiteEvidence> evidence_of(const SearchedPlan& found);

}  // namespace faultline::identification
