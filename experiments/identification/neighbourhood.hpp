// SPDX-License-Identifier: Apache-2.0
// The neighbourhood of a plan: every plan that differs from it in one field of the schedule or one rule, as far as kernels
// are known to differ there.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <faultline/plan/difference.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline::identification {

/// One step away from a plan.
struct Neighbour {
    std::string
        field;  ///< "argument", "block_k", "p_cast", "products"; two neighbours of the same field exclude each other
    std::vector<Difference> changes;
    RoundingPlan plan;
    std::function<void(RoundingPlan&)> apply;  ///< makes the change in another plan
    bool backward_only = false;                ///< the forward is the same
    std::vector<Neighbour> members{};          ///< of a pair, the two changes by themselves
};

struct NeighbourhoodOptions {
    bool backward = true;        ///< without gradients the backward cannot be told
    bool grouped_heads = false;  ///< several query heads share a key head
    Extras extras{};             ///< what the layers have beyond scores and a mask
    int queries = 0, keys = 0;   ///< of the longest head: a tile of as many is the whole; 0: not known
};

/// Settled plans only (no list of tiles). One field at a time:
///   schedule  key order, key block (32, 64, 128, 256, all), key splits (1, 2, 4, 8), where the scale stands, exponential's
///             base, argument and functions, lazy maximum, what the row sum adds and in which order, normalisation, division, carries;
///             the backward's blocks, orders, base, argument, delta, ds, carries
///   products  the accumulation of all, of the scores' and of the gradients' matrix products: the units of the same inputs
///   casts     p_cast, bwd_p_cast, ds_cast in bf16, fp16, fp32; s_cast, dp_cast, partial_o_cast with and without;
///             lse, row_sum, delta, which some kernels keep in 16 bits, in bf16, fp16, fp32
///   roundings of every cast to something narrower than fp32: to nearest, toward zero, stochastic; of p_cast, bwd_p_cast and
///             ds_cast with each of these formats that is narrower
///   sites     each rounding site exact
/// Where the scale comes into the exponent, the forms of the argument are tried with it. block_q is left out: the rows of a query
/// tile share nothing. What problem_with() refuses, of the plan or for such layers, is left out, and so are sites that have
/// nothing to do in them and plans that compute the same as this one or as an earlier neighbour (comparable() of
/// plan/effect.hpp, tiles no longer than the heads).
[[nodiscard]] std::vector<Neighbour> neighbours(const RoundingPlan& plan, const NeighbourhoodOptions& options);

/// The plan with both changes, each made from it. Empty field where the two exclude each other or do not
/// make a plan.
[[nodiscard]] Neighbour together(const RoundingPlan& plan, const Neighbour& first, const Neighbour& second,
                                 const Extras& extras = {});

/// Pairs of another rounding, in the plan's format, at one of the casts with a rule of the schedule of the same pass, whether or not either helps alone.
/// They hide each other: where p is cut, what the row sum adds makes no element equal until the cut is there, and the other way
/// round. `singles`: neighbours() of the plan.
[[nodiscard]] std::vector<Neighbour> rounding_pairs(const RoundingPlan& plan, const std::vector<Neighbour>& singles,
                                                    const std::vector<Site>& casts, const Extras& extras = {});

}  // namespace faultline::identification
