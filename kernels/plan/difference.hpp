// SPDX-License-Identifier: Apache-2.0
// What distinguishes two plans, field by field: what a correction changes, and how a plan departs from a preset.
#pragma once

#include <string>
#include <vector>

#include <faultline/plan/plan.hpp>

namespace faultline {

struct Difference {
    std::string field;  ///< as in a plan file: "schedule.zero_sum", "sites.p_cast.format", "tiles"
    std::string from;   ///< value in the first plan, as in a plan file but without quotes: "none", "bf16"
    std::string to;     ///< value in the second

    friend bool operator==(const Difference&, const Difference&) = default;
};

/// Every field that differs, names and texts excepted: the schedule in the order of its declaration, tiles, then the sites
/// in schedule order. Empty exactly if a.same_numerics(b).
[[nodiscard]] std::vector<Difference> differences(const RoundingPlan& a, const RoundingPlan& b);

/// The plan with these fields as `from` has them; names and texts stay.
[[nodiscard]] RoundingPlan with_fields_of(const RoundingPlan& plan, const RoundingPlan& from,
                                          const std::vector<Difference>& fields);

}  // namespace faultline
