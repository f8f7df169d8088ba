// SPDX-License-Identifier: Apache-2.0
// The first sentence of an output's block: how wrong it is, by which sites, and what repairs it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <faultline/attribution/attribution.hpp>

namespace faultline::attribution {

/// Of a share of the whole, where 99.99 must not read as 100.
[[nodiscard]] std::string share_text(double share);
/// With its sign; "-" where it is not finite.
[[nodiscard]] std::string signed_text(double x, int decimals = 3);
/// What the problem has beyond scores and mask, as ", softcap 30, sinks, dropout keeps 0.9"; empty for nothing.
[[nodiscard]] std::string modified_text(const LayerAttribution& layer);

/// What a site matters, of the plan's squared error: the larger of its share and of what its repair moves, by itself or
/// with the sites that do the same. What it does alone is no part of it: where the repair moves nothing, something else in this
/// plan has the output, as a fault that makes every probability 0 has it.
[[nodiscard]] double weight(const LayerAttribution& layer, const OutputAttribution& output, std::size_t site);
/// Squared error from which a site is worth a line of a table: 0.5% of the plan's.
inline constexpr double worth_a_line = 0.005;
/// Sites by weight, heaviest first; those that are not worth a line by what they do alone.
[[nodiscard]] std::vector<std::size_t> by_weight(const LayerAttribution& layer, const OutputAttribution& output);
/// Whether the site is worth a line, by its weight or alone.
[[nodiscard]] bool is_worth_a_line(const LayerAttribution& layer, const OutputAttribution& output, std::size_t site);

/// Whether an output is worth a block of its own: the plan's run or a kernel's is off by more than twice what storing the truth in
/// its type costs (a plan that stores none: rounded to the kernel's), or it is an lse that the backward's P shows.
[[nodiscard]] bool is_worth_a_block(const OutputAttribution& output, const RoundingPlan& plan);

[[nodiscard]] std::string verdict(const LayerAttribution& layer, const OutputAttribution& output,
                                  const RoundingPlan& plan);

}  // namespace faultline::attribution
