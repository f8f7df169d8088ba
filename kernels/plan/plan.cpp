// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/plan.hpp>

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

std::string problem_with(const RoundingPlan& plan) {
    const Schedule& s = plan.schedule;
    for (const int block : {s.block_q, s.block_k, s.bwd_block_q, s.bwd_block_k})
        if (block < 0) return "schedule: a block size is negative: expected 0 (whole sequence) or more";
    if (s.normalize == Normalize::before_pv && s.block_k != 0)
        return "schedule: normalize is \"before_pv\": expected block_k = 0, because the row sum is known only after the last key";
    if (s.key_splits < 1) return "schedule: key_splits is " + std::to_string(s.key_splits) + ": expected 1 or more";
    if (s.key_splits > 1 && s.normalize != Normalize::after_pv)
        return "schedule: key_splits is above 1: expected normalize = \"after_pv\", because each split has its own row sum";
    if (s.p_saved && s.normalize != Normalize::before_pv)
        return "schedule: p_saved is true: expected normalize = \"before_pv\", because the backward can use only a normalised p again";
    if (s.delta_threads < 1 || (s.delta_threads & (s.delta_threads - 1)) != 0)
        return "schedule: delta_threads is " + std::to_string(s.delta_threads) + ": expected a power of two";
    if (s.delta_in == DeltaIn::accumulator && needs_dp(s.delta_from))
        return "schedule: delta_in is \"accumulator\": expected delta_from = \"o\" or \"o_unrounded\", a delta that is known before dp";
    if (s.normalize == Normalize::each_tile &&
        (s.row_sum_adds == RowSumAdds::two_sums || s.scale_at != ScaleAt::exponent))
        return "schedule: normalize is \"each_tile\": expected one row sum and scale_at = \"exponent\"";
    if (s.max_offset != 0 &&
        (s.exp_base != ExpBase::two || s.scale_at != ScaleAt::exponent || s.normalize != Normalize::after_pv))
        return "schedule: max_offset is in log2 units of the exponent: expected exp_base = \"two\", scale_at = \"exponent\" and normalize = \"after_pv\" with it";
    if (s.lse_form == LseForm::log2 &&
        (s.exp_base != ExpBase::two || s.scale_at != ScaleAt::exponent || s.normalize == Normalize::each_tile))
        return "schedule: lse_form is \"log2\": expected exp_base = \"two\", scale_at = \"exponent\" and normalize = \"after_pv\" or \"before_pv\", where the maximum is scaled to log2 units";
    if (s.max_policy == MaxPolicy::lazy && s.exp_base != ExpBase::two)
        return "schedule: max_policy = \"lazy\" expects exp_base = \"two\": its threshold is in log2 units";
    for (const Site site : {Site::delta, Site::row_sum}) {
        const auto kind = plan[site].accumulation.kind;
        if (kind == Accumulation::Kind::fused || (kind == Accumulation::Kind::exact && !is_exact(plan[site].format)))
            return "sites." + std::string(name(site)) +
                   ".accumulation: expected an fp32 one (its order is the schedule's), or an exact site";
    }
    if (s.max_policy == MaxPolicy::stable && s.stable_beta <= 1)
        return "schedule: stable_beta is too small: expected more than 1, so that a repeated maximum is moved off the scores";
    if (s.max_policy == MaxPolicy::lazy && s.scale_at != ScaleAt::exponent)
        return "schedule: max_policy is \"lazy\": expected scale_at = \"exponent\", because its threshold is in log2 units of the exponent";
    for (const SiteInfo& site : sites())
        if (!site.accumulates && plan[site.site].accumulation != exact_sum)
            return "sites." + std::string(site.name) +
                   ": has an accumulation: expected none, because the site does not sum";
    return {};
}

}  // namespace faultline
