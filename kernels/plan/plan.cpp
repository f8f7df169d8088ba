// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/plan.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include <faultline/plan/effect.hpp>
#include <faultline/plan/schedule_fields.hpp>

namespace faultline {

RoundingPlan RoundingPlan::with(Site site, const Rule& rule) const {
    RoundingPlan changed = *this;
    changed.set(site, rule);
    return changed;
}

RoundingPlan RoundingPlan::exact_except(Site site) const {
    RoundingPlan alone = *this;
    alone.rules_.fill(Rule{});
    alone.set(site, (*this)[site]);
    return alone;
}

std::vector<Site> RoundingPlan::rounding_sites() const {
    std::vector<Site> found;
    for (const SiteInfo& s : sites())
        if (!(*this)[s.site].is_exact()) found.push_back(s.site);
    return found;
}

namespace {

bool is_power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }

std::string number(double x) {
    std::array<char, 32> digits;
    return {digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), x).ptr};
}

std::optional<PlanProblem> out_of_range(const Schedule& s) {
    const auto outside = [](const char* field, int value, int least, int most) -> std::optional<PlanProblem> {
        if (value >= least && value <= most) return std::nullopt;
        return PlanProblem{std::string("schedule.") + field, "is " + std::to_string(value) + ": expected " +
                                                                 std::to_string(least) + " to " + std::to_string(most)};
    };
    if (auto p = outside("block_q", s.block_q, 0, most_block)) return p;
    if (auto p = outside("block_k", s.block_k, 0, most_block)) return p;
    if (auto p = outside("bwd_block_q", s.bwd_block_q, 0, most_block)) return p;
    if (auto p = outside("bwd_block_k", s.bwd_block_k, 0, most_block)) return p;
    if (auto p = outside("key_splits", s.key_splits, 1, most_key_splits)) return p;
    if (auto p = outside("exp_poly_every", s.exp_poly_every, 0, most_block)) return p;
    if (auto p = outside("exp_poly_count", s.exp_poly_count, 0, most_block)) return p;
    if (auto p = outside("exp_poly_skip", s.exp_poly_skip, 0, most_block)) return p;
    if (is_power_of_two(s.delta_threads) && s.delta_threads <= most_delta_threads) return std::nullopt;
    return PlanProblem{"schedule.delta_threads", "is " + std::to_string(s.delta_threads) +
                                                     ": expected a power of two from 1 to " +
                                                     std::to_string(most_delta_threads)};
}

/// Settings that exclude each other.
std::optional<PlanProblem> contradiction(const Schedule& s) {
    if (s.normalize == Normalize::before_pv && s.block_k != 0)
        return PlanProblem{
            "schedule.normalize",
            "is \"before_pv\": expected block_k = 0, because the row sum is known only after the last key"};
    if (s.key_splits > 1 && s.normalize != Normalize::after_pv)
        return PlanProblem{"schedule.key_splits",
                           "is above 1: expected normalize = \"after_pv\", because each split has its own row sum"};
    if (s.key_splits > 1 && s.block_k == 0)
        return PlanProblem{"schedule.key_splits",
                           "is above 1: expected block_k above 0, because the splits are runs of key tiles"};
    if (s.row_sum_adds != RowSumAdds::unrounded && s.normalize == Normalize::before_pv)
        return PlanProblem{
            "schedule.row_sum_adds",
            "adds p after its cast: expected normalize = \"after_pv\" with it, because p is cast when the "
            "sum has divided it"};
    if (s.ds_scale != DsScale::after && s.scale_at == ScaleAt::inputs)
        return PlanProblem{"schedule.ds_scale",
                           "scales the score gradient: expected \"after\" with scale_at = \"inputs\", where q and k "
                           "carry the scale"};
    if (s.p_saved && s.normalize != Normalize::before_pv)
        return PlanProblem{
            "schedule.p_saved",
            "is true: expected normalize = \"before_pv\", because the backward can use only a normalised p again"};
    if (s.delta_in == DeltaIn::accumulator && needs_dp(s.delta_from))
        return PlanProblem{
            "schedule.delta_in",
            "is \"accumulator\": expected delta_from = \"o\" or \"o_unrounded\", a delta that is known before dp"};
    if (s.normalize == Normalize::each_tile &&
        (s.row_sum_adds == RowSumAdds::two_sums || s.scale_at != ScaleAt::exponent))
        return PlanProblem{"schedule.normalize", "is \"each_tile\": expected one row sum and scale_at = \"exponent\""};
    if (s.lse_in == LseIn::accumulator &&
        (s.bwd_argument != ArgumentForm::subtract_then_scale || s.scale_at != ScaleAt::exponent || s.p_saved))
        return PlanProblem{"schedule.lse_in",
                           "is \"accumulator\": expected bwd_argument = \"subtract_then_scale\", scale_at = "
                           "\"exponent\" and p_saved = false, because the difference is what is scaled"};
    if (s.exp_poly_every != 0 && s.exp_base != ExpBase::two)
        return PlanProblem{"schedule.exp_poly_every",
                           "is set: expected exp_base = \"two\", which the polynomial is of"};
    if (s.exp_poly_every != 0 && s.exp_poly_count > s.exp_poly_every)
        return PlanProblem{"schedule.exp_poly_count", "is " + std::to_string(s.exp_poly_count) +
                                                          ": expected no more than exp_poly_every, " +
                                                          std::to_string(s.exp_poly_every)};
    if (s.max_offset != 0 &&
        (s.exp_base != ExpBase::two || s.scale_at != ScaleAt::exponent || s.normalize != Normalize::after_pv))
        return PlanProblem{
            "schedule.max_offset",
            "is set: expected exp_base = \"two\", scale_at = \"exponent\" and normalize = \"after_pv\" with it, as the kernels that have an offset do; it is implemented for no other form"};
    if (s.lse_form != LseForm::natural &&
        (s.exp_base != ExpBase::two || s.scale_at != ScaleAt::exponent || s.normalize == Normalize::each_tile))
        return PlanProblem{
            "schedule.lse_form",
            "is \"" + std::string(name(s.lse_form)) +
                "\": expected exp_base = \"two\", scale_at = \"exponent\" and normalize = \"after_pv\" or \"before_pv\", where the maximum is scaled to log2 units for lse; it is implemented for no other form"};
    if (s.max_policy == MaxPolicy::lazy && s.exp_base != ExpBase::two)
        return PlanProblem{"schedule.max_policy",
                           "is \"lazy\": expected exp_base = \"two\", because its threshold is in log2 units"};
    if (s.max_policy == MaxPolicy::stable && !(s.stable_tolerance >= 0))
        return PlanProblem{
            "schedule.stable_tolerance",
            "is " + number(s.stable_tolerance) + ": expected 0 or more, how far below the maximum a score repeats it"};
    if (s.max_policy == MaxPolicy::lazy && !(s.max_threshold >= 0))
        return PlanProblem{
            "schedule.max_threshold",
            "is " + number(s.max_threshold) + ": expected 0 or more log2 units by which the maximum may lag"};
    if (s.max_policy == MaxPolicy::stable && !(s.stable_beta > 1))
        return PlanProblem{"schedule.stable_beta",
                           "is " + number(s.stable_beta) +
                               ": expected more than 1, so that a repeated maximum is moved off the scores"};
    if (s.max_policy == MaxPolicy::lazy && s.scale_at != ScaleAt::exponent)
        return PlanProblem{
            "schedule.max_policy",
            "is \"lazy\": expected scale_at = \"exponent\", as the kernels that have it do; it is implemented for no other place of the scale"};
    return std::nullopt;
}

/// Sites that p passes while it stands over its maximum, and the row sum's, whose additions are fp32 unless they are exact.
struct Holder {
    Site site;
    Format format;
};
std::array<Holder, 3> holders_of_p(const RoundingPlan& plan) {
    const Rule& sum = plan[Site::row_sum];
    const bool in_fp32 = sum.accumulation != exact_sum && (is_exact(sum.format) || sum.format.emax > fp32.emax);
    return {Holder{Site::exp, plan[Site::exp].format}, Holder{Site::p_cast, plan[Site::p_cast].format},
            Holder{Site::row_sum, in_fp32 ? fp32 : sum.format}};
}

/// p is at most 2^(offset + threshold), the threshold where the maximum can lag, and its largest at least 2^offset: both have
/// to be numbers wherever p is held.
/// Source: flash-attention 0251105a, flash_attn/cute/flash_fwd_sm100.py, `assert max_offset + threshold < log2(dtype max)`.
std::optional<PlanProblem> unfit_maximum(const RoundingPlan& plan) {
    const Schedule& s = plan.schedule;
    const bool lazy = s.max_policy == MaxPolicy::lazy && maximum_can_lag(plan);
    if (!lazy && s.max_offset == 0) return std::nullopt;
    const double largest = s.max_offset + (lazy ? s.max_threshold : 0);
    const char* field = s.max_offset == 0 ? "schedule.max_threshold" : "schedule.max_offset";
    for (const Holder& at : holders_of_p(plan)) {
        const std::string where = std::string(name(at.site));
        if (const double most = std::log2(max_finite(at.format)); !(largest < most))
            return PlanProblem{
                field, "lets p reach 2^" + number(largest) +
                           ": expected max_offset and a lazy maximum's max_threshold to be together less "
                           "than " +
                           number(std::round(most * 100) / 100) + ", log2 of the largest number at sites." + where};
        if (!(s.max_offset >= at.format.emin))
            return PlanProblem{field, "is " + number(s.max_offset) + ": expected " + std::to_string(at.format.emin) +
                                          " or more, so that the largest p is a normal number at sites." + where};
    }
    return std::nullopt;
}

/// What no head of a case could run, though those beyond the cases may.
std::optional<PlanProblem> contradiction_in_a_case(const RoundingPlan& plan) {
    for (std::size_t i = 0; i < plan.tiles.size(); ++i) {
        const TileCase& tile = plan.tiles[i];
        RoundingPlan one;
        one.schedule = plan.schedule;
        one.tiles = {tile};
        const Schedule here =
            for_head_dim(one, tile.head_dim, tile.causal.value_or(true), tile.window.value_or(false)).schedule;
        if (const auto problem = contradiction(here))
            return PlanProblem{"tiles[" + std::to_string(i) + "]",
                               "makes a plan in which " + problem->field + " " + problem->what};
    }
    return std::nullopt;
}

}  // namespace

std::optional<PlanProblem> find_problem(const RoundingPlan& plan) {
    if (auto problem = out_of_range(plan.schedule)) return problem;
    if (auto problem = contradiction(plan.schedule)) return problem;
    if (auto problem = contradiction_in_a_case(plan)) return problem;
    if (auto problem = unfit_maximum(plan)) return problem;
    if (plan[Site::scale].rounding == Rounding::stochastic)
        return PlanProblem{
            "sites.scale.rounding",
            "is \"stochastic\": expected another one, because the scale is one number for the whole call"};
    for (const Site site : {Site::delta, Site::row_sum}) {
        const auto kind = plan[site].accumulation.kind;
        if (kind == Accumulation::Kind::fused || (kind == Accumulation::Kind::exact && !is_exact(plan[site].format)))
            return PlanProblem{"sites." + std::string(name(site)) + ".accumulation",
                               "expected an fp32 one (its order is the schedule's), or an exact site"};
    }
    for (const SiteInfo& site : sites())
        if (!site.accumulates && plan[site.site].accumulation != exact_sum)
            return PlanProblem{"sites." + std::string(site.name) + ".accumulation",
                               "expected none, because the site does not sum"};
    return std::nullopt;
}

std::string problem_with(const RoundingPlan& plan) {
    const auto problem = find_problem(plan);
    return problem ? problem->field + ": " + problem->what : "";
}

std::string problem_with(const RoundingPlan& plan, const Extras& extras) {
    const Schedule& s = plan.schedule;
    const auto sentence = [&](const char* field, const char* what) {
        return "plan \"" + plan.name + "\": schedule." + field + " " + what;
    };
    if (s.normalize == Normalize::each_tile && (extras.sink || extras.dropout))
        return sentence("normalize",
                        "is \"each_tile\", which has no place for a sink or dropout: expected \"after_pv\" or "
                        "\"before_pv\"");
    const bool sum_is_zero = !extras.softcap && !extras.sink;
    if (s.zero_sum != ZeroSum::none && !sum_is_zero)
        return sentence("zero_sum",
                        "is set: expected \"none\" with a softcap or a sink, because the score gradient that the "
                        "products receive does not sum to zero then");
    if (s.key_centering && !sum_is_zero)
        return sentence(
            "key_centering",
            "is true: expected false with a softcap or a sink, because the score gradient that the products "
            "receive does not sum to zero then");
    if (s.delta_in == DeltaIn::accumulator && s.normalize == Normalize::before_pv && extras.dropout)
        return sentence(
            "delta_in",
            "is \"accumulator\": expected \"difference\" with dropout and normalize = \"before_pv\", where dp "
            "is scaled before delta is subtracted");
    return {};
}

bool takes_part(Site site, const Extras& extras) {
    switch (site) {
        case Site::softcap:
        case Site::bwd_softcap:
        case Site::ds_softcap:
            return extras.softcap;
        case Site::sink_exp:
        case Site::sink_sum:
        case Site::sink_p:
        case Site::dsink:
            return extras.sink;
        case Site::p_dropout:
        case Site::dp_dropout:
            return extras.dropout;
        default:
            return true;
    }
}

bool reaches(const RoundingPlan& plan, Site site) {
    const Schedule& s = plan.schedule;
    for (const Extras& alone : {Extras{.softcap = true}, Extras{.sink = true}, Extras{.dropout = true}})
        if (!takes_part(site, {}) && takes_part(site, alone) && !problem_with(plan, alone).empty()) return false;
    const auto several = [](const TileCase& tile) { return tile.block_k.value_or(0) != 0; };
    switch (site) {
        case Site::rescale_argument:
        case Site::rescale_factor:
        case Site::o_rescale:  // from one key tile to the next
            return s.block_k != 0 || std::any_of(plan.tiles.begin(), plan.tiles.end(), several);
        case Site::p_normalize:
            return s.normalize == Normalize::before_pv;
        case Site::o_normalize:
            return s.normalize != Normalize::before_pv;
        case Site::partial_o_cast:
        case Site::merge:
            return s.key_splits > 1;
        case Site::lse_scale: {
            const bool raw = s.bwd_argument == ArgumentForm::subtract_then_scale && s.scale_at == ScaleAt::exponent;
            return !s.p_saved && (raw || s.bwd_exp_base == ExpBase::two);
        }
        case Site::delta_product:
            return !needs_dp(s.delta_from);
        case Site::bwd_s_accumulate:
        case Site::bwd_s_cast:
        case Site::bwd_softcap:
        case Site::bwd_s_scale:
        case Site::bwd_exp_argument:
        case Site::bwd_exp:
            return !s.p_saved;
        case Site::p_dropout:
        case Site::dp_dropout:
            return s.normalize == Normalize::before_pv;
        case Site::ds_scaled:
            return s.ds_scale == DsScale::after_cast;
        default:
            return true;
    }
}

}  // namespace faultline
