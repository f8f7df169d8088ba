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

/// What a site matters: its share, or what it does alone where others then hide it; both of squared error.
[[nodiscard]] double weight(const OutputAttribution& output, std::size_t site);
/// Sites by weight, heaviest first.
[[nodiscard]] std::vector<std::size_t> by_weight(const OutputAttribution& output);

[[nodiscard]] std::string verdict(const LayerAttribution& layer, const OutputAttribution& output,
                                  const RoundingPlan& plan);

}  // namespace faultline::attribution
