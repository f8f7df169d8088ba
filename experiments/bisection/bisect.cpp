// SPDX-License-Identifier: Apache-2.0
#include <faultline/bisection/bisect.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <faultline/attribution/level.hpp>
#include <faultline/base/error.hpp>
#include <faultline/bisection/oracle.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using namespace bisection;

/// RequestError where the plan's own value of a target is nothing that sets of sites could be judged by.
void check_plan_value(const Capture& capture, const Target& target, const Oracle::PlanValue& plan) {
    const auto refuse = [&](const std::string& why) {
        throw RequestError(fmt::format("{}: {}: {}", escaped(capture.path, capture.path.size()), target.text, why));
    };
    if (target.metric != Metric::nonfinite && plan.nonfinite == 0 &&
        !truth_is_resolved(plan.truth_bound, std::max(plan.truth_norm, plan.error_norm)))
        refuse(
            fmt::format("its truth is only known to be within {} of {}, and the plan's error is no larger: expected a "
                        "target on another output",
                        plan.truth_bound.to_string(2), plan.truth_norm.to_string(2)));
    const bool near_plan = target.relation == Target::Relation::near_plan;
    if (near_plan && plan.nonfinite > 0 && target.metric != Metric::nonfinite && target.metric != Metric::plan_distance)
        refuse(
            fmt::format("{0} element{1} of the plan's {2} {3} NaN or infinite, and nothing is near that: expected a "
                        "target on them, as in '{4}.{2}.nonfinite > 0' or '{4}.{2}.plan_distance < 0.1'",
                        plan.nonfinite, plan.nonfinite == 1 ? "" : "s", name(target.output),
                        plan.nonfinite == 1 ? "is" : "are", target.layer));
    if (std::isnan(plan.value.mantissa) && plan.nonfinite == 0)
        refuse(
            fmt::format("the plan's own run has no such number, {} being undefined there (one head, one row, or no "
                        "error): expected another measure",
                        name(target.metric)));
    if (near_plan && !std::isfinite(plan.value.mantissa))
        refuse("the plan's own value is infinite, the truth being 0, and nothing is near that: expected error_norm");
}

/// Whether an error's size is to be below a bound that it is above in these values.
bool asks_for_less_than(const std::vector<Target>& targets, const std::vector<WideReal>& values) {
    for (std::size_t t = 0; t < targets.size(); ++t) {
        const Target& target = targets[t];
        const bool size = target.metric == Metric::rel_error || target.metric == Metric::error_norm;
        const bool below = target.relation == Target::Relation::less || target.relation == Target::Relation::less_equal;
        if (size && below && !target.met(values[t])) return true;
    }
    return false;
}

BisectionAnswer answer(const Capture& capture, const RoundingPlan& plan, const BisectionOptions& options,
                       const std::vector<Target>& targets, BisectionKind kind) {
    const Oracle oracle(capture, plan, options, targets, kind);
    BisectionAnswer found;
    found.kind = kind;
    found.targets = targets;
    found.sites = oracle.sites();
    found.untouched = oracle.untouched();
    const std::vector<Oracle::PlanValue> own = oracle.plan_values();
    for (std::size_t t = 0; t < found.targets.size(); ++t) {
        Target& target = found.targets[t];
        check_plan_value(capture, target, own[t]);
        if (target.relation == Target::Relation::near_plan) target.bound = own[t].value;
    }
    const Try attempt = [&](const std::vector<SiteMask>& sets) {
        const std::vector<std::vector<WideReal>> values = oracle.values(sets);
        std::vector<Trial> trials;
        for (std::size_t i = 0; i < sets.size(); ++i) {
            Trial trial{true, 0};
            for (std::size_t t = 0; t < found.targets.size(); ++t) {
                trial.met = trial.met && found.targets[t].met(values[i][t]);
                const double distance = found.targets[t].distance(values[i][t]);
                trial.distance = t == 0 ? distance : std::max(trial.distance, distance);
            }
            trials.push_back(trial);
            found.values.emplace(sets[i], values[i]);
        }
        return trials;
    };
    const SiteMask all = found.sites.size() == 64 ? ~SiteMask{0} : (SiteMask{1} << found.sites.size()) - 1;
    if (kind == BisectionKind::repair) {
        // Whatever rounds less is no nearer to the truth than what rounds nothing, but for luck among last bits.
        const std::vector<Trial> ends = attempt({0, all});
        found.out_of_reach = !ends[0].met && !ends[1].met && asks_for_less_than(found.targets, found.values.at(all));
        if (found.out_of_reach) {
            found.search.tried = {{0, ends[0]}, {all, ends[1]}};
            return found;
        }
    }
    found.search = search(static_cast<int>(found.sites.size()), attempt, options.search);
    return found;
}

}  // namespace

std::vector<Site> BisectionAnswer::sites_of(SiteMask set) const {
    std::vector<Site> list;
    for (std::size_t i = 0; i < sites.size(); ++i)
        if ((set >> i & 1) != 0) list.push_back(sites[i]);
    return list;
}

bool can_touch(const RoundingPlan& plan, Site site, Output output) {
    const Pass pass = info(site).pass;
    const Schedule& s = plan.schedule;
    if (output == Output::o) {
        const bool lse_is_used = s.normalize == Normalize::each_tile || s.key_splits > 1;
        return site != Site::do_cast && pass != Pass::backward && (site != Site::lse || lse_is_used);
    }
    switch (site) {
        case Site::dv_accumulate:
        case Site::dv_cast:
            return output == Output::dv;
        case Site::dq_cast:
            return output == Output::dq;
        case Site::dq_accumulate:  // a zero-sum projection is done in the width of dq's sum, in dk too
            return output == Output::dq || (output == Output::dk && s.zero_sum != ZeroSum::none);
        case Site::dk_accumulate:
        case Site::dk_cast:
            return output == Output::dk;
        case Site::kv_group_reduce:
            return output != Output::dq;
        case Site::dsink:
            return false;  // no target speaks of it
        case Site::sink_p:
            return output != Output::dv && s.delta_from == DeltaFrom::p_dp_normalized;
        case Site::bwd_p_cast:
            return output == Output::dv || s.ds_p == DsP::cast;
        case Site::delta_product:
        case Site::delta:
        case Site::dp_accumulate:
        case Site::dp_cast:
        case Site::dp_dropout:
        case Site::ds_softcap:
        case Site::ds:
        case Site::ds_cast:
        case Site::ds_scaled:
            return output != Output::dv;
        default:
            return true;
    }
}

Bisection bisect(const Capture& capture, const RoundingPlan& plan, const BisectionOptions& options) {
    Bisection result{capture.path, plan, {}, {}, true};
    try {
        if (!options.until.empty())
            result.answers.push_back(answer(capture, plan, options, options.until, BisectionKind::repair));
        if (!options.reproduce.empty())
            result.answers.push_back(answer(capture, plan, options, options.reproduce, BisectionKind::reproduce));
    } catch (const Cancelled&) {
        result.complete = false;
    }
    return result;
}

}  // namespace faultline
