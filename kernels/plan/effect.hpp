// SPDX-License-Identifier: Apache-2.0
// Which of a plan's fields can be seen in what it computes. Most fields of the schedule speak of a step that only some
// schedules have: the order in which key tiles are visited says nothing where there is one tile.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include <faultline/plan/difference.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline {

/// What a field of the schedule (schedule_field_names()) would need to change any output of the plan, for any input, and does
/// not have, as a plan file spells it: `delta_from = "o" or "o_unrounded"`. Empty where it can be seen. By the schedule alone:
/// a form all of whose sites are exact is still a form, and only rounds nothing.
[[nodiscard]] std::string_view lacking(const RoundingPlan& plan, std::string_view field);
/// The same of a field that one of the plan's cases replaces: "delta_threads", "exp_poly_every", …
[[nodiscard]] std::string_view lacking(const RoundingPlan& plan, const TileCase& tile, std::string_view field);

/// Whether a lazy maximum could stay behind the true one: from one key tile to the next, or behind a sink that it starts at. A
/// maximum that starts with its only tile is the true one.
[[nodiscard]] bool maximum_can_lag(const RoundingPlan& plan);

/// Whether plan.tiles[at] replaces nothing of the schedule and keeps no head from a later case, so that the list without it
/// says the same.
[[nodiscard]] bool is_idle_case(const RoundingPlan& plan, std::size_t at);

/// The plan without what says nothing; it computes the same, bit for bit. A field of the schedule that lacks something has
/// what the arithmetic amounts to: subtract_then_scale for the argument of scores that are scaled already, for a saved p the
/// forward's argument and base, elsewhere the default. Such a field of a case is empty, and a case that says nothing is left out. A rule for a site that is never
/// reached is exact, a rounding to the exact format to nearest. At the sums of row_sum and delta, whose order is the
/// schedule's, an accumulation that names another order is fp32-sequential.
[[nodiscard]] RoundingPlan without_idle(const RoundingPlan& plan);

/// The differences of the two without what is idle, but for the fields and sites that one of them alone has a step for: those
/// follow from the others. Empty exactly if without_idle makes them one.
[[nodiscard]] std::vector<Difference> differences_that_are_read(const RoundingPlan& a, const RoundingPlan& b);

/// The plan without what is idle and without the forms that its exact sites leave nothing to (what is made of a p, an o or a
/// delta that is not rounded), so that plans of the same numerics are one. It computes the same but for the last bits of
/// binary64, where a sum that is exact has another order.
[[nodiscard]] RoundingPlan comparable(const RoundingPlan& plan);
/// Whether two plans compute the same for all inputs, as far as their fields say so: comparable() makes them one. False does not
/// say that outputs differ: a head of one tile does not tell orders apart.
[[nodiscard]] bool same_effect(const RoundingPlan& a, const RoundingPlan& b);

}  // namespace faultline
