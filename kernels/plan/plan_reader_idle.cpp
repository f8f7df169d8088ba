// SPDX-License-Identifier: Apache-2.0
// What a plan's file says without effect: refused where the file itself says it, dropped where its base did.
#include <type_traits>

#include <faultline/plan/effect.hpp>
#include <faultline/plan/plan_reader.hpp>

namespace faultline::plan_file {
namespace {

/// The field's value in one schedule equals that in another.
bool same_value(const Schedule& a, const Schedule& b, std::string_view wanted) {
    bool same = true;
    for_each_field(a, [&](std::string_view field, const auto& of_a) {
        for_each_field(b, [&](std::string_view other, const auto& of_b) {
            if constexpr (std::is_same_v<decltype(of_a), decltype(of_b)>)
                if (field == wanted && other == wanted) same = of_a == of_b;
        });
    });
    return same;
}

std::string nothing_reads_it(std::string_view lacks) {
    return "changes nothing that this plan computes: expected it to be left out, or a plan with " + std::string(lacks);
}

}  // namespace

/// Accepted without effect: what the arithmetic amounts to, and, as there is no base that the file could mean to change, the
/// default.
void PlanReader::refuse_idle_fields(const toml::table& root, const RoundingPlan& plan,
                                    const RoundingPlan& settled) const {
    const toml::table* given = root.get_as<toml::table>("schedule");
    if (given == nullptr) return;
    for (const auto& [key, node] : *given) {
        const std::string_view field = key.str(), lacks = lacking(plan, field);
        if (lacks.empty() || same_value(plan.schedule, settled.schedule, field)) continue;
        if (!root.contains("base") && same_value(plan.schedule, Schedule{}, field)) continue;
        fail(node.source(), joined("schedule", field), nothing_reads_it(lacks));
    }
}

/// Of the cases that the file gives.
void PlanReader::refuse_idle_cases(const toml::table& root, const RoundingPlan& plan) const {
    const toml::array* given = root.get_as<toml::array>("tiles");
    if (given == nullptr) return;
    for (std::size_t i = 0; i < given->size(); ++i) {
        const toml::table& entry = *given->get(i)->as_table();
        const TileCase& tile = plan.tiles[i];
        if (is_idle_case(plan, i))
            fail(entry.source(), "tiles[" + std::to_string(i) + "]",
                 "replaces nothing of the schedule, and keeps no head from a later case: expected a size in it, or no "
                 "such case");
        const auto refuse = [&](std::string_view field, const std::optional<int>& value, int of_schedule) {
            if (!value || *value == of_schedule) return;
            if (const std::string_view lacks = lacking(plan, tile, field); !lacks.empty())
                fail(entry.get(field)->source(), joined("tiles[" + std::to_string(i) + "]", field),
                     nothing_reads_it(lacks));
        };
        refuse("delta_threads", tile.delta_threads, plan.schedule.delta_threads);
        refuse("exp_poly_every", tile.exp_poly_every, plan.schedule.exp_poly_every);
        refuse("exp_poly_count", tile.exp_poly_count, plan.schedule.exp_poly_count);
        refuse("exp_poly_skip", tile.exp_poly_skip, plan.schedule.exp_poly_skip);
    }
}

void PlanReader::refuse_idle_rules(const toml::table& root, const RoundingPlan& plan,
                                   const RoundingPlan& settled) const {
    const toml::table* given = root.get_as<toml::table>("sites");
    if (given == nullptr) return;
    for (const auto& [key, node] : *given) {
        const Site site = *find_site(key.str());
        const Rule &rule = plan[site], &left = settled[site];
        const std::string field = joined("sites", key.str());
        const toml::table& fields = *node.as_table();
        if (!rule.is_exact() && !reaches(plan, site))
            fail(node.source(), field,
                 "has a rule, and the plan's schedule never reaches it: expected no rule, or a schedule with that "
                 "step");
        if (const toml::node* rounding = fields.get("rounding"); rounding != nullptr && rule.rounding != left.rounding)
            fail(rounding->source(), joined(field, "rounding"),
                 "is of a site whose format is exact, which rounds nothing: expected a format with it");
        if (const toml::node* sum = fields.get("accumulation");
            sum != nullptr && rule.accumulation != left.accumulation)
            fail(
                sum->source(), joined(field, "accumulation"),
                "names an order of its own: expected \"fp32-sequential\", which stands for fp32 additions, or an exact "
                "site, because the order is that of schedule." +
                    std::string(site == Site::delta ? "delta_order" : "row_sum_order"));
    }
}

void PlanReader::settle_idle(const toml::table& root, RoundingPlan& plan) const {
    RoundingPlan settled = without_idle(plan);
    refuse_idle_fields(root, plan, settled);
    refuse_idle_cases(root, plan);
    refuse_idle_rules(root, plan, settled);
    plan = std::move(settled);
}

}  // namespace faultline::plan_file
