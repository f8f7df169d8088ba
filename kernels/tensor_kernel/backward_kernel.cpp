// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/backward_kernel.hpp>

#include <array>
#include <utility>

#include <faultline/plan/difference.hpp>
#include <faultline/plan/effect.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor_core/accumulate.hpp>

namespace faultline::tensor_kernel {
namespace {

struct Named {
    const char* name;
    BackwardVariant variant;
    bool by_mma = false, by_wgmma = true;
};
constexpr std::array variants{
    Named{"fused", Fused::value, true},
    Named{"unfused", Unfused::value, true},
    Named{"unfused_bf16_scores", UnfusedBf16Scores::value, true, false},
    Named{"scaled_before_cast", ScaledBeforeCast::value},
    Named{"correctly_rounded", CorrectlyRounded::value},
    Named{"cudnn_like", CudnnLike::value},
    Named{"projected", Projected::value},
};

/// The plan with everything alike that the backward does not meet, or that the kernels leave free.
RoundingPlan backward_of(RoundingPlan plan, const RoundingPlan& own, Unit unit) {
    const Schedule backward = plan.schedule;
    plan.schedule = own.schedule;
    Schedule& s = plan.schedule;
    // In ascending order 16 queries at a time whatever the tile; in descending order the tile tells.
    if (backward.bwd_block_q % 16 != 0 || unit == Unit::mma) s.bwd_block_q = backward.bwd_block_q;
    s.bwd_block_k = backward.bwd_block_k;
    s.bwd_query_order = backward.bwd_query_order;
    s.scale_at = backward.scale_at;
    s.bwd_exp_base = backward.bwd_exp_base;
    s.functions = backward.functions;
    s.bwd_argument = backward.bwd_argument;
    s.lse_in = backward.lse_in;
    s.dq_carry = backward.dq_carry;
    s.dkv_carry = backward.dkv_carry;
    s.p_saved = backward.p_saved;
    s.delta_from = backward.delta_from;
    s.delta_order = backward.delta_order;
    // More threads than octets: the others add 0 to the tree.
    if (backward.delta_threads < own.schedule.delta_threads) s.delta_threads = backward.delta_threads;
    s.delta_in = backward.delta_in;
    s.ds_p = backward.ds_p;
    s.ds_scale = backward.ds_scale;
    if (unit == Unit::wgmma) s.group_reduce = backward.group_reduce;  // by mma too before the cast, fa2 or not
    s.zero_sum = backward.zero_sum;
    s.key_centering = backward.key_centering;
    for (const SiteInfo& site : sites()) {
        const bool extra = site.site == Site::bwd_softcap || site.site == Site::ds_softcap ||
                           site.site == Site::sink_p || site.site == Site::dsink || site.site == Site::dp_dropout ||
                           site.site == Site::kv_group_reduce;  // the sum goes on in the accumulator
        if (site.pass == Pass::forward || extra) plan.set(site.site, own[site.site]);
    }
    return plan;
}

/// What a variant makes of the kernels' plan; what it leaves free is as asked.
RoundingPlan with_variant(RoundingPlan plan, Unit unit, const BackwardVariant& variant, const Schedule& asked) {
    Schedule& s = plan.schedule;
    const bool has_row_pass = unit == Unit::wgmma && (variant == Fused::value || variant.projected);
    if (asked.delta_from == DeltaFrom::o_unrounded || has_row_pass) s.delta_from = asked.delta_from;
    if (variant.projected) s.zero_sum = asked.zero_sum != ZeroSum::none ? asked.zero_sum : ZeroSum::weighted;
    s.bwd_argument = variant.argument;
    s.functions = variant.functions;
    s.bwd_exp_base = variant.base;
    s.ds_scale = variant.ds_scale;
    s.delta_order = variant.delta_order;
    if (variant.bf16_scores) plan.set(Site::bwd_s_cast, Rule{bf16});
    if (variant.base == ExpBase::e) plan.set(Site::lse_scale, Rule{});  // lse as it is stored
    return plan;
}

}  // namespace

RoundingPlan backward_plan(int head_dim, Element element, Unit unit) {
    RoundingPlan own = unit == Unit::wgmma ? forward_plan(element) : for_head_dim(plan("fa2"), head_dim);
    Schedule& s = own.schedule;
    s.bwd_block_k = 128;
    s.bwd_key_order = Order::descending;
    s.bwd_block_q = head_dim == 64 ? 128 : 64;
    if (unit == Unit::wgmma) {
        s.delta_threads = head_dim / 8;
        return own;
    }
    s.delta_threads = 8;
    if (element == Element::bf16) return own;
    for (const SiteInfo& site : sites()) {
        Rule rule = own[site.site];
        if (rule.format == bf16) rule.format = fp16;
        if (rule.accumulation == *find_accumulation("hopper-mma-bf16"))
            rule.accumulation = *find_accumulation("hopper-mma-fp16");
        own.set(site.site, rule);
    }
    return own;
}

BackwardSupport supported_backward(const RoundingPlan& plan, int head_dim, bool causal) {
    BackwardSupport answer;
    if (head_dim != 64 && head_dim != 128) {
        answer.why = "head_dim is " + std::to_string(head_dim) + ": expected 64 or 128";
        return answer;
    }
    const RoundingPlan asked = for_head_dim(plan, head_dim, causal);
    BackwardKernel& kernel = answer.kernel;
    const Format& format = asked[Site::q_cast].format;
    kernel.element = format == fp16 ? Element::fp16 : format == e4m3 ? Element::e4m3 : Element::bf16;
    std::vector<Difference> nearest;
    for (const Unit unit : {Unit::wgmma, Unit::mma}) {
        if (kernel.element == Element::e4m3 && unit == Unit::mma) continue;
        const RoundingPlan own = backward_plan(head_dim, kernel.element, unit);
        const RoundingPlan backward = backward_of(asked, own, unit);
        for (const Named& named : variants) {
            if (unit == Unit::wgmma ? !named.by_wgmma : !named.by_mma) continue;
            if (named.variant.bf16_scores && kernel.element != Element::bf16) continue;
            std::vector<Difference> left =
                differences_that_are_read(backward, with_variant(own, unit, named.variant, asked.schedule));
            if (left.empty()) {
                kernel.name = named.name;
                kernel.unit = unit;
                kernel.variant = named.variant;
                kernel.delta_from = asked.schedule.delta_from;
                kernel.zero_sum = asked.schedule.zero_sum;
                return answer;
            }
            if (nearest.empty() || left.size() < nearest.size()) nearest = std::move(left);
        }
    }
    const Difference& first = nearest.front();
    answer.why = first.field + " is " + first.from + ": the tensor-core backward has " + first.to;
    return answer;
}

}  // namespace faultline::tensor_kernel
