// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/forward_kernel.hpp>

#include <algorithm>
#include <array>

#include <faultline/plan/difference.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor_core/accumulate.hpp>

namespace faultline::tensor_kernel {
namespace {

struct Named {
    const char* name;
    ForwardVariant variant;
};
constexpr std::array variants{
    Named{"fused", {}},
    Named{"unfused", {.argument = ArgumentForm::unfused}},
    Named{"subtract_then_scale", {.argument = ArgumentForm::subtract_then_scale}},
    Named{"polynomial", {.polynomial = true}},
    Named{"stable_max", {.stable = true}},
    Named{"rounded_row_sum", {.row_sum_adds = RowSumAdds::rounded}},
};

/// The plan with everything alike that the forward does not meet, or that the kernels leave free.
RoundingPlan forward_of(RoundingPlan plan, const RoundingPlan& own) {
    const Schedule forward = plan.schedule;
    plan.schedule = own.schedule;
    Schedule& s = plan.schedule;
    s.block_k = forward.block_k;
    s.key_order = forward.key_order;
    s.key_splits = forward.key_splits;
    s.scale_at = forward.scale_at;
    s.exp_base = forward.exp_base;
    s.functions = forward.functions;
    s.exp_poly_every = forward.exp_poly_every;
    if (forward.exp_poly_every != 0) {
        s.exp_poly_count = forward.exp_poly_count;
        s.exp_poly_skip = forward.exp_poly_skip;
    }
    s.argument = forward.argument;
    s.max_policy = forward.max_policy;
    if (forward.max_policy == MaxPolicy::lazy) s.max_threshold = forward.max_threshold;
    s.max_offset = forward.max_offset;
    s.row_sum_adds = forward.row_sum_adds;
    s.row_sum_order = forward.row_sum_order;
    s.normalize = forward.normalize;
    s.division = forward.division;
    s.lse_form = forward.lse_form;
    s.pv_carry = forward.pv_carry;
    s.p_saved = forward.p_saved;
    for (const SiteInfo& site : sites()) {
        const bool extra = site.site == Site::softcap || site.site == Site::sink_exp || site.site == Site::sink_sum ||
                           site.site == Site::p_dropout || site.site == Site::do_cast;
        if (site.pass == Pass::backward || extra) plan.set(site.site, own[site.site]);
    }
    if (forward.max_policy != MaxPolicy::stable && plan[Site::row_max].format == fp32)
        plan.set(Site::row_max, own[Site::row_max]);  // a score is a float already
    return plan;
}

/// What a variant makes of the kernels' plan.
RoundingPlan with_variant(RoundingPlan plan, const ForwardVariant& variant) {
    Schedule& s = plan.schedule;
    s.argument = variant.argument;
    if (variant.polynomial) {
        s.exp_poly_every = s.exp_poly_count = 1;
        s.exp_poly_skip = 0;
    }
    if (variant.stable) {
        s.max_policy = MaxPolicy::stable;
        plan.set(Site::row_max, Rule{fp32});  // beta times a score is no float
    }
    s.row_sum_adds = variant.row_sum_adds;
    return plan;
}

}  // namespace

RoundingPlan forward_plan(Element element) {
    RoundingPlan own = plan("fa3");
    own.schedule.block_k = 128;
    own.tiles.clear();
    if (element == Element::bf16) return own;
    for (const SiteInfo& site : sites()) {
        Rule rule = own[site.site];
        if (rule.format == bf16) rule.format = fp16;
        if (rule.accumulation == *find_accumulation("hopper-wgmma-bf16"))
            rule.accumulation = *find_accumulation("hopper-wgmma-fp16");
        own.set(site.site, rule);
    }
    return own;
}

ForwardSupport supported(const RoundingPlan& plan, int head_dim, bool causal) {
    ForwardSupport answer;
    if (head_dim != 64 && head_dim != 128) {
        answer.why = "head_dim is " + std::to_string(head_dim) + ": expected 64 or 128";
        return answer;
    }
    const RoundingPlan asked = for_head_dim(plan, head_dim, causal);
    answer.kernel.element = asked[Site::q_cast].format == fp16 ? Element::fp16 : Element::bf16;
    const RoundingPlan own = forward_plan(answer.kernel.element);
    const RoundingPlan forward = forward_of(asked, own);
    std::vector<Difference> nearest;
    for (const Named& named : variants) {
        std::vector<Difference> left = differences(forward, with_variant(own, named.variant));
        if (left.empty()) {
            answer.kernel.name = named.name;
            answer.kernel.variant = named.variant;
            answer.kernel.stable_beta = asked.schedule.stable_beta;
            answer.kernel.stable_tolerance = asked.schedule.stable_tolerance;
            return answer;
        }
        if (nearest.empty() || left.size() < nearest.size()) nearest = std::move(left);
    }
    const Difference& first = nearest.front();
    answer.why = first.field + " is " + first.from + ": the tensor-core forward has " + first.to;
    return answer;
}

}  // namespace faultline::tensor_kernel
