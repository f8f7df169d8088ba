// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/forward_kernel.hpp>

#include <algorithm>
#include <array>
#include <span>

#include <faultline/plan/difference.hpp>
#include <faultline/plan/effect.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor_core/accumulate.hpp>
#include <faultline/tensor_kernel/forward.hpp>

namespace faultline::tensor_kernel {
namespace {

struct Named {
    const char* name;
    ForwardVariant variant;
    bool by_mma = true;
};
/// Of the variant with a streaming state, which has key tiles of its own.
constexpr Named with_state{"streaming_state", WithState::value};
constexpr Named of_e4m3{"fused", UpTo256::value, false};
constexpr std::array variants{
    Named{"fused", {}},
    Named{"unfused", {.argument = ArgumentForm::unfused}},
    Named{"subtract_then_scale", {.argument = ArgumentForm::subtract_then_scale}},
    Named{"stable_max", {.stable = true}},
    Named{"polynomial", {.polynomial = true}, false},
    Named{"rounded_row_sum", {.row_sum_adds = RowSumAdds::rounded}, false},
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
    s.rescale_argument = forward.rescale_argument;
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

/// How the plan holds its streaming state. What is not rounding to nearest in one of the formats stays fp32 here, and then
/// differs from what the kernels have.
StreamingState state_of(const RoundingPlan& plan) {
    const auto format = [&](Site site) {
        const Rule& rule = plan[site];
        if (rule.rounding != Rounding::nearest_even) return StateFormat::fp32;
        return rule.format == bf16 ? StateFormat::bf16 : rule.format == fp16 ? StateFormat::fp16 : StateFormat::fp32;
    };
    return {format(Site::s_cast),    format(Site::row_max),       format(Site::row_sum),
            format(Site::o_rescale), format(Site::pv_accumulate), format(Site::lse)};
}

/// The kernels' plan with this state, in these key tiles.
RoundingPlan with_streaming_state(RoundingPlan plan, const StreamingState& state, int block_k) {
    const auto hold = [&](Site site, StateFormat format) {
        if (format == StateFormat::fp32) return;
        Rule rule = plan[site];
        rule.format = format == StateFormat::bf16 ? bf16 : fp16;
        plan.set(site, rule);
    };
    hold(Site::s_cast, state.s);
    hold(Site::row_max, state.row_max);
    hold(Site::row_sum, state.row_sum);
    hold(Site::o_rescale, state.o_rescale);
    hold(Site::pv_accumulate, state.pv_accumulate);
    hold(Site::lse, state.lse);
    plan.schedule.block_k = block_k;
    return plan;
}

/// Key tiles that the variant with a streaming state is compiled for.
std::span<const int> state_tiles(Unit unit, int head_dim) {
    static constexpr std::array by_wgmma{64};
    static constexpr std::array by_mma{64, 32, 128};
    if (unit == Unit::wgmma) return std::span(by_wgmma).first(head_dim == 64 ? 1 : 0);
    return std::span(by_mma).first(head_dim == 64 ? 3 : 2);
}

}  // namespace

RoundingPlan forward_plan(Element element, Unit unit, int head_dim) {
    RoundingPlan own = plan(element == Element::e4m3 ? "fa3-fp8" : unit == Unit::wgmma ? "fa3" : "fa2");
    own.schedule.block_k = unit == Unit::wgmma || head_dim == 64 ? 128 : 64;
    own.tiles.clear();
    if (element != Element::fp16) return own;
    const auto in_half = [](const Accumulation& accumulation) {
        for (const char* name : {"hopper-wgmma-", "hopper-mma-"})
            if (accumulation == *find_accumulation(std::string(name) + "bf16"))
                return *find_accumulation(std::string(name) + "fp16");
        return accumulation;
    };
    for (const SiteInfo& site : sites()) {
        Rule rule = own[site.site];
        if (rule.format == bf16) rule.format = fp16;
        rule.accumulation = in_half(rule.accumulation);
        own.set(site.site, rule);
    }
    return own;
}

ForwardSupport supported(const RoundingPlan& plan, int head_dim, bool causal, std::optional<Unit> wanted) {
    ForwardSupport answer;
    if (head_dim != 64 && head_dim != 128) {
        answer.why = "head_dim is " + std::to_string(head_dim) + ": expected 64 or 128";
        return answer;
    }
    const RoundingPlan asked = for_head_dim(plan, head_dim, causal);
    ForwardKernel& kernel = answer.kernel;
    const Format& format = asked[Site::q_cast].format;
    kernel.element = format == fp16 ? Element::fp16 : format == e4m3 ? Element::e4m3 : Element::bf16;
    if (kernel.element == Element::e4m3 && wanted == Unit::mma) {
        answer.why =
            "sites.q_cast.format is e4m3: the tensor-core forward has it by wgmma alone, on compute capability 9.0 (mma "
            "has e4m3 from 8.9 on, of which Hopper makes products of fp16)";
        return answer;
    }
    kernel.stable_beta = asked.schedule.stable_beta;
    kernel.stable_tolerance = asked.schedule.stable_tolerance;
    const StreamingState state = state_of(asked);
    std::vector<Difference> nearest;
    for (const Unit unit : {Unit::wgmma, Unit::mma}) {
        if ((wanted && unit != *wanted) || (kernel.element == Element::e4m3 && unit == Unit::mma)) continue;
        const RoundingPlan own = forward_plan(kernel.element, unit, head_dim);
        const RoundingPlan forward = forward_of(asked, own);
        const auto is = [&](const Named& named, const RoundingPlan& compiled) {
            std::vector<Difference> left = differences_that_are_read(forward, compiled);
            if (!left.empty()) {
                if (nearest.empty() || left.size() < nearest.size()) nearest = std::move(left);
                return false;
            }
            kernel.name = named.name;
            kernel.unit = unit;
            kernel.variant = named.variant;
            kernel.block_k = compiled.schedule.block_k;
            return true;
        };
        const std::span<const Named> compiled =
            kernel.element == Element::e4m3 ? std::span(&of_e4m3, 1) : std::span<const Named>(variants);
        for (const Named& named : compiled) {
            if (unit == Unit::mma && !named.by_mma) continue;
            if (is(named, with_variant(own, named.variant))) return answer;
        }
        if (kernel.element != Element::bf16) continue;
        const RoundingPlan unrounded = with_variant(own, with_state.variant);
        for (const int block_k : state_tiles(unit, head_dim))
            if (is(with_state, with_streaming_state(unrounded, state, block_k))) {
                kernel.state = state;
                return answer;
            }
    }
    const Difference& first = nearest.front();
    answer.why = first.field + " is " + first.from + ": the tensor-core forward has " + first.to;
    return answer;
}

std::size_t forward_workspace(const ForwardCall& call, const ForwardKernel& kernel) {
    if (kernel.element != Element::e4m3) return 0;
    const auto size = [](int n) { return static_cast<std::size_t>(n); };
    return size(call.batch) * size(call.kv_heads) * size(call.head_dim) * size((call.n_k + 127) / 128 * 128);
}

}  // namespace faultline::tensor_kernel
