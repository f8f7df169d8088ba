// SPDX-License-Identifier: Apache-2.0
// A search for the inputs whose error at a site has the largest mean with its sign: what biases a kernel most within given
// ranges. An evolution strategy, (1 + 8): eight changed copies of the best inputs so far, the best of the nine goes on.
#pragma once

#include <functional>
#include <string>

#include <faultline/generation/family.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline {

struct MaximizeOptions {
    InputShape shape{.batch = 1, .heads = 1, .kv_heads = 1, .queries = 32, .keys = 32, .head_dim = 32, .causal = true};
    double largest = 8;              ///< of |q|, |k|, |v|, |dO|; rounded down to the grid of generation::on_grid
    std::size_t evaluations = 2000;  ///< runs of the plan, the baseline's among them
    std::size_t baseline = 64;       ///< random inputs that the search is compared with, and starts from
    std::uint64_t seed = 0;
    int threads = 0;  ///< 0: one per hardware thread; results do not depend on it
    std::function<void(std::size_t done, std::size_t total, const std::string& what)> progress;
    std::function<bool()> cancelled;
};

/// The signed error of a site over all its elements.
struct SiteBias {
    double mean = 0;       ///< in the site's unit
    double rms = 0;        ///< of the error
    double value_rms = 0;  ///< of the exact values
    double count = 0;
    /// What is searched for: |mean| over value_rms, or at sites whose unit is a logit |mean| itself, since a logit is
    /// determined up to a constant and its size says nothing. Not finite: 0.
    double objective = 0;
};

struct Maximized {
    Site site = Site::p_cast;
    bool relative = true;  ///< whether the objective is over value_rms
    LayerCapture inputs;   ///< the best found, named as the site
    SiteBias reached;
    std::string from;                           ///< what the search started from: "random" or a family
    double random_largest = 0, random_rms = 0;  ///< objective of the random baseline
    std::size_t evaluations = 0;
    bool complete = true;
};

/// RequestError where the site is exact in the plan, its pass does not reach it, or none of the inputs that the search starts from
/// has an error there.
[[nodiscard]] Maximized maximize(Site site, const RoundingPlan& plan, const MaximizeOptions& options);
/// What a plan does at a site for these inputs.
[[nodiscard]] SiteBias site_bias(const LayerCapture& inputs, const RoundingPlan& plan, Site site);

}  // namespace faultline
