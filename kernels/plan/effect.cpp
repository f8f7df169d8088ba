// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/effect.hpp>

#include <algorithm>
#include <array>
#include <type_traits>

#include <faultline/plan/schedule_fields.hpp>

namespace faultline {
namespace {

/// The schedule that the heads of a case run.
Schedule schedule_of(const RoundingPlan& plan, const TileCase& tile) {
    RoundingPlan one;
    one.schedule = plan.schedule;
    one.tiles = {tile};
    return for_head_dim(one, tile.head_dim, tile.causal.value_or(true), tile.window.value_or(false)).schedule;
}

/// Whether it holds for the plan's schedule, with which heads larger than all cases run, or in one of its cases.
template <class Holds>
bool in_some_case(const RoundingPlan& plan, Holds&& holds) {
    return holds(plan.schedule) || std::any_of(plan.tiles.begin(), plan.tiles.end(),
                                               [&](const TileCase& tile) { return holds(schedule_of(plan, tile)); });
}

/// Whether a column of a forward tile takes exp2 by the polynomial: takes_polynomial (polynomial_columns.hpp) of any.
bool has_polynomial(const Schedule& s) {
    constexpr int fragment = 32;
    if (s.exp_poly_every == 0 || (s.block_k > 0 && (s.block_k - 1) / fragment <= s.exp_poly_skip)) return false;
    for (int pair = 0; pair < fragment; pair += 2)
        if (pair % s.exp_poly_every >= s.exp_poly_every - s.exp_poly_count) return true;
    return false;
}

bool is_octets(DeltaOrder order) { return order == DeltaOrder::octets || order == DeltaOrder::octet_pairs; }

/// What a field needs; one with several lines needs all of them.
struct Need {
    std::string_view field;
    bool (*met)(const RoundingPlan&);
    std::string_view expected;
};

bool key_tiles(const RoundingPlan& plan) {
    return in_some_case(plan, [](const Schedule& s) { return s.block_k != 0; });
}
bool backward_key_tiles(const RoundingPlan& plan) {
    return in_some_case(plan, [](const Schedule& s) { return s.bwd_block_k != 0; });
}
bool backward_query_tiles(const RoundingPlan& plan) {
    return in_some_case(plan, [](const Schedule& s) { return s.bwd_block_q != 0; });
}
bool scaled_in_exponent(const RoundingPlan& plan) { return plan.schedule.scale_at == ScaleAt::exponent; }
bool recomputes_p(const RoundingPlan& plan) { return !plan.schedule.p_saved; }
bool delta_of_output(const RoundingPlan& plan) { return !needs_dp(plan.schedule.delta_from); }
bool polynomial(const RoundingPlan& plan) { return in_some_case(plan, has_polynomial); }
bool lazy(const RoundingPlan& plan) { return plan.schedule.max_policy == MaxPolicy::lazy; }
bool stable(const RoundingPlan& plan) { return plan.schedule.max_policy == MaxPolicy::stable; }

constexpr std::string_view
    several_key_tiles = "block_k above 0 (several key tiles)",
    several_backward_key_tiles = "bwd_block_k above 0 (several key tiles)",
    several_query_tiles = "bwd_block_q above 0 (several query tiles)", scale_in_exponent = "scale_at = \"exponent\"",
    p_recomputed = "p_saved = false", delta_of_o = "delta_from = \"o\" or \"o_unrounded\"",
    lag = "block_k above 0, or a sink that the maximum starts at (a maximum that can lag)",
    policy_is_stable = "max_policy = \"stable\"",
    some_columns =
        "an exp_poly_every, exp_poly_count, exp_poly_skip and block_k that leave some columns to "
        "the polynomial";

constexpr std::array needs{
    Need{"key_order", key_tiles, several_key_tiles},
    Need{"bwd_query_order", backward_query_tiles, several_query_tiles},
    Need{"bwd_key_order", backward_key_tiles, several_backward_key_tiles},
    Need{"bwd_exp_base", recomputes_p, p_recomputed},
    Need{"exp_poly_every",  // 0 says that there is none
         [](const RoundingPlan& plan) { return plan.schedule.exp_poly_every == 0 || polynomial(plan); }, some_columns},
    Need{"exp_poly_count", polynomial, some_columns},
    Need{"exp_poly_skip", polynomial, some_columns},
    Need{"argument", scaled_in_exponent, scale_in_exponent},
    Need{"bwd_argument", recomputes_p, p_recomputed},
    Need{"bwd_argument", scaled_in_exponent, scale_in_exponent},
    Need{"rescale_argument", key_tiles, several_key_tiles},
    Need{"rescale_argument", scaled_in_exponent, scale_in_exponent},
    Need{"sink_in_max", [](const RoundingPlan& plan) { return plan.schedule.normalize != Normalize::each_tile; },
         "normalize = \"after_pv\" or \"before_pv\" (a place for a sink)"},
    Need{"sink_in_max",
         [](const RoundingPlan& plan) {
             return plan.schedule.zero_sum == ZeroSum::none && !plan.schedule.key_centering;
         },
         "zero_sum = \"none\" and key_centering = false, with which alone a sink is computed"},
    Need{"max_policy",  // the others are read in one tile, too
         [](const RoundingPlan& plan) { return !lazy(plan) || maximum_can_lag(plan); }, lag},
    Need{"max_threshold", lazy, "max_policy = \"lazy\""},
    Need{"max_threshold", maximum_can_lag, lag},
    Need{"stable_beta", stable, policy_is_stable},
    Need{"stable_tolerance", stable, policy_is_stable},
    Need{"pv_carry", key_tiles, several_key_tiles},
    Need{"dq_carry", backward_key_tiles, several_backward_key_tiles},
    Need{"dkv_carry", backward_query_tiles, several_query_tiles},
    Need{"delta_order", delta_of_output, delta_of_o},
    Need{"delta_threads", delta_of_output, delta_of_o},
    Need{"delta_threads", [](const RoundingPlan& plan) { return is_octets(plan.schedule.delta_order); },
         "delta_order = \"octets\" or \"octet_pairs\""},
};

/// Whether the accumulation at a sum whose order is the schedule's names no other order.
bool names_its_order(const RoundingPlan& plan, Site site) {
    const Accumulation& sum = plan[site].accumulation;
    const bool pairwise = site == Site::row_sum && plan.schedule.row_sum_order == RowSumOrder::pairwise;
    return sum == exact_sum || sum == fp32_sequential || (pairwise && sum.kind == Accumulation::Kind::pairwise);
}

/// Idle fields of the schedule as the arithmetic amounts to them.
void settle_schedule(RoundingPlan& plan) {
    const Schedule standard;
    RoundingPlan settled = plan;
    for_each_field(settled.schedule, [&](std::string_view field, auto& value) {
        if (lacking(plan, field).empty()) return;
        for_each_field(standard, [&](std::string_view other, const auto& usual) {
            if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, std::remove_cvref_t<decltype(usual)>>)
                if (field == other) value = usual;
        });
    });
    Schedule& s = settled.schedule;
    if (!scaled_in_exponent(plan)) s.argument = s.bwd_argument = ArgumentForm::subtract_then_scale;
    if (s.p_saved) {
        s.bwd_argument = s.argument;
        s.bwd_exp_base = s.exp_base;
    }
    for (TileCase& tile : settled.tiles) {
        if (!lacking(plan, tile, "delta_threads").empty()) tile.delta_threads.reset();
        const bool named = tile.exp_poly_every || tile.exp_poly_count || tile.exp_poly_skip;
        if (!named || lacking(plan, tile, "exp_poly_count").empty()) continue;
        tile.exp_poly_count.reset();
        tile.exp_poly_skip.reset();
        // Without its own the case would have the schedule's, which may take some columns.
        tile.exp_poly_every = s.exp_poly_every == 0 ? std::nullopt : std::optional(0);
    }
    for (std::size_t at = settled.tiles.size(); at-- > 0;)
        if (is_idle_case(settled, at)) settled.tiles.erase(settled.tiles.begin() + static_cast<std::ptrdiff_t>(at));
    plan = std::move(settled);
}

/// Whether the plan has the step that a difference's field speaks of.
bool has_step(const RoundingPlan& plan, std::string_view field) {
    constexpr std::string_view of_schedule = "schedule.", of_sites = "sites.";
    if (field.starts_with(of_schedule)) return lacking(plan, field.substr(of_schedule.size())).empty();
    if (!field.starts_with(of_sites)) return true;
    field.remove_prefix(of_sites.size());
    return reaches(plan, *find_site(field.substr(0, field.find('.'))));
}

}  // namespace

bool maximum_can_lag(const RoundingPlan& plan) {
    return key_tiles(plan) || (plan.schedule.sink_in_max && problem_with(plan, Extras{.sink = true}).empty());
}

bool is_idle_case(const RoundingPlan& plan, std::size_t at) {
    const TileCase& here = plan.tiles[at];
    if (here != TileCase{.head_dim = here.head_dim, .causal = here.causal, .window = here.window}) return false;
    // Of calls of one kind the case decides the heads above the earlier ones' sizes, (decided, here.head_dim]; each of those goes
    // to the first later case that is large enough.
    for (const bool causal : {false, true})
        for (const bool window : {false, true}) {
            int decided = 0;
            for (std::size_t i = 0; i < plan.tiles.size() && decided < here.head_dim; ++i) {
                const TileCase& tile = plan.tiles[i];
                const bool fits = tile.causal.value_or(causal) == causal && tile.window.value_or(window) == window;
                if (i == at && !fits) break;
                if (i == at || !fits) continue;
                if (i > at && tile.head_dim > decided && schedule_of(plan, tile) != plan.schedule) return false;
                decided = std::max(decided, tile.head_dim);
            }
        }
    return true;
}

std::string_view lacking(const RoundingPlan& plan, std::string_view field) {
    for (const Need& need : needs)
        if (need.field == field && !need.met(plan)) return need.expected;
    return {};
}

std::string_view lacking(const RoundingPlan& plan, const TileCase& tile, std::string_view field) {
    if (field == "delta_threads") return lacking(plan, field);
    RoundingPlan one = plan;
    one.schedule = schedule_of(plan, tile);
    one.tiles.clear();
    return lacking(one, field);
}

RoundingPlan without_idle(const RoundingPlan& plan) {
    RoundingPlan settled = plan;
    settle_schedule(settled);
    for (const SiteInfo& site : sites()) {
        Rule rule = plan[site.site];
        if (!reaches(plan, site.site)) rule = Rule{};
        if (is_exact(rule.format)) rule.rounding = Rounding::nearest_even;
        const bool of_schedule = site.site == Site::row_sum || site.site == Site::delta;
        if (of_schedule && !names_its_order(plan, site.site)) rule.accumulation = fp32_sequential;
        settled.set(site.site, rule);
    }
    return settled;
}

std::vector<Difference> differences_that_are_read(const RoundingPlan& a, const RoundingPlan& b) {
    std::vector<Difference> found = differences(without_idle(a), without_idle(b));
    std::vector<Difference> read;
    for (const Difference& d : found)
        if (has_step(a, d.field) && has_step(b, d.field)) read.push_back(d);
    return read.empty() ? found : read;
}

RoundingPlan comparable(const RoundingPlan& given) {
    RoundingPlan plan = given;
    Schedule& s = plan.schedule;
    const Schedule standard;
    const auto unrounded = [&](Site site) { return is_exact(plan[site].format); };
    if (unrounded(Site::p_cast)) s.row_sum_adds = RowSumAdds::unrounded;
    if (unrounded(Site::bwd_p_cast)) s.ds_p = DsP::unrounded;
    if (unrounded(Site::o_cast) && s.delta_from == DeltaFrom::o_unrounded) s.delta_from = DeltaFrom::o;
    if (plan[Site::delta].is_exact()) {
        s.delta_order = standard.delta_order;
        s.delta_threads = standard.delta_threads;
    }
    for (const Site site : {Site::row_sum, Site::delta})
        if (plan[site].accumulation != exact_sum)
            plan.set(site, {plan[site].format, plan[site].rounding, fp32_sequential});
    return without_idle(plan);
}

bool same_effect(const RoundingPlan& a, const RoundingPlan& b) { return comparable(a).same_numerics(comparable(b)); }

}  // namespace faultline
