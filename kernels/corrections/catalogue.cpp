// SPDX-License-Identifier: Apache-2.0
// The corrections that there are, and what each changes. A new one is an entry here: docs/adding-a-correction.md.
#include <array>
#include <limits>

#include <faultline/corrections/correction.hpp>

namespace faultline {
namespace {

using Args = CorrectionArguments;

constexpr std::string_view zero_sum_law =
    "sum_j ds_ij = 0 in exact arithmetic, which the cast of ds breaks: our reading of a projection";
constexpr double below_zero = -std::numeric_limits<double>::denorm_min();  // an exclusive bound that lets 0 through

/// At least fp32: a site that rounds to something narrower rounds to fp32, to nearest; others stay.
void widen(RoundingPlan& plan, Site site) {
    Rule rule = plan[site];
    if (is_exact(rule.format) || rule.format.precision >= fp32.precision) return;
    rule.format = fp32;
    rule.rounding = Rounding::nearest_even;
    plan.set(site, rule);
}

/// Delta from P and dP must be known before ds, so dp cannot start from it.
void delta_from_p_dp(RoundingPlan& plan, DeltaFrom from) {
    plan.schedule.delta_from = from;
    plan.schedule.delta_in = DeltaIn::difference;
    widen(plan, Site::delta);
}

void stable_max(RoundingPlan& plan, const Args& args) {
    plan.schedule.max_policy = MaxPolicy::stable;
    plan.schedule.stable_beta = args.numbers[0];
    plan.schedule.stable_tolerance = args.numbers[1];
}

void set_argument(RoundingPlan& plan, ArgumentForm form) {
    plan.schedule.argument = form;
    plan.schedule.bwd_argument = form;
    plan.schedule.rescale_argument = ArgumentForm::subtract_then_scale;  // 0 where the maximum stays, whatever the form
    if (form != ArgumentForm::subtract_then_scale) plan.schedule.lse_in = LseIn::argument;
}

void delta_exact(RoundingPlan& plan, const Args&) {
    plan.set(Site::delta, Rule{});
    plan.set(Site::delta_product, Rule{});
    if (plan.schedule.delta_from == DeltaFrom::o) plan.schedule.delta_from = DeltaFrom::o_unrounded;
}

void stochastic_rounding(RoundingPlan& plan, const Args& args) {
    for (const Site site : args.sites) {
        Rule rule = plan[site];
        rule.rounding = Rounding::stochastic;
        plan.set(site, rule);
    }
}

/// A site of the backward's arithmetic in fp32: narrower formats widened, matrix units replaced by fp32 sums.
void in_fp32(RoundingPlan& plan, Site site) {
    widen(plan, site);
    Rule rule = plan[site];
    if (rule.accumulation.kind == Accumulation::Kind::fused) rule.accumulation = fp32_sequential;
    plan.set(site, rule);
}

/// dq, dk and dv keep the formats in which they are stored: what leaves the kernel is the model's choice.
bool is_output(Site site) {
    return site == Site::dq_cast || site == Site::dk_cast || site == Site::dv_cast || site == Site::kv_group_reduce;
}

void fp32_backward(RoundingPlan& plan, const Args&) {
    // The scores keep the forward's formats: lse was made of those, and a recomputed p from other scores is off by the
    // exponential of the difference (FastVideo #1730). A stored p stays for the same reason.
    for (const SiteInfo& site : sites())
        if (site.pass == Pass::backward && !is_output(site.site) && site.site != Site::bwd_s_cast &&
            site.site != Site::bwd_softcap && site.site != Site::bwd_s_scale)
            in_fp32(plan, site.site);
    delta_from_p_dp(plan, DeltaFrom::p_dp_normalized);
}

void fp32_forward_o(RoundingPlan& plan, const Args&) {
    for (const Site site :
         {Site::o_rescale, Site::pv_accumulate, Site::o_normalize, Site::partial_o_cast, Site::merge, Site::o_cast})
        widen(plan, site);
}

std::string needs_scale_in_exponent(const RoundingPlan& plan) {
    if (plan.schedule.scale_at == ScaleAt::exponent) return {};
    return "its scores are scaled before the maximum is taken: expected scale_at = \"exponent\"";
}

std::string needs_division_after_pv(const RoundingPlan& plan) {
    if (plan.schedule.normalize == Normalize::after_pv) return {};
    return "the row sum divides something else than P V: expected normalize = \"after_pv\"";
}

template <auto field, auto value>
void set(RoundingPlan& plan, const Args&) {
    plan.schedule.*field = value;
}

const std::vector<CorrectionInfo> table{
    {.name = "stable_max",
     .description = "rows whose nonzero maximum is repeated are shifted, so that no probability of theirs is exactly 1",
     .source = "arXiv 2510.04212, algorithm 1; beta 7 as in its figure 7, tolerance as in its code",
     .topic = "the row maximum",
     .arguments = Arguments::numbers,
     .parameters = {{"beta", 7, 1, "a factor above 1 on a positive repeated maximum"},
                    {"tolerance", 1e-3, below_zero,
                     "a distance in logits, 0 or more, at which a score repeats the maximum"}},
     .change = stable_max},
    {.name = "subtract_then_scale",
     .description = "the exponent's argument is (s - m) scale: exactly 0 at the maximum",
     .source = "torch-mojo-backend pull request 398; FlashMLA pull request 68",
     .topic = "the exponent's argument",
     .problem = needs_scale_in_exponent,
     .change = [](RoundingPlan& plan, const Args&) { set_argument(plan, ArgumentForm::subtract_then_scale); }},
    {.name = "unfused",
     .description = "the exponent's argument is round(s scale) - round(m scale): exactly 0 at the maximum",
     .source = "flash-attention csrc/flash_attn/src/softmax.h:85, UNFUSE_FMA",
     .topic = "the exponent's argument",
     .problem = needs_scale_in_exponent,
     .change = [](RoundingPlan& plan, const Args&) { set_argument(plan, ArgumentForm::unfused); }},
    {.name = "o_fp32_delta",
     .description = "delta is made of O before its cast",
     .source = "arXiv 2510.04212, section 3: O in fp32 for delta only",
     .topic = "delta",
     .change = set<&Schedule::delta_from, DeltaFrom::o_unrounded>},
    {.name = "delta_p_dp",
     .description = "delta = rowsum(P o dP) of the backward's own P and dP, in fp32",
     .source = "arXiv 2510.04212, section 3; llm.c llmc/attention.cuh:171",
     .topic = "delta",
     .change = [](RoundingPlan& plan, const Args&) { delta_from_p_dp(plan, DeltaFrom::p_dp); }},
    {.name = "delta_p_dp_normalized",
     .description = "delta = rowsum(P o dP) / rowsum(P) in fp32, so that an error of lse does not enter it",
     .source = "the delta for which sum_j ds_j = 0 whatever P sums to",
     .topic = "delta",
     .change = [](RoundingPlan& plan, const Args&) { delta_from_p_dp(plan, DeltaFrom::p_dp_normalized); }},
    {.name = "delta_exact",
     .description = "delta's dot product is exact, of O before its cast, or of P and dP where the plan takes those",
     .source = "the bound of what any better sum can do",
     .topic = "delta",
     .change = delta_exact},
    {.name = "zero_sum_uniform",
     .description =
         "the row sum of the cast score gradient is taken off dq and dk, spread evenly over the visible keys",
     .source = zero_sum_law,
     .topic = "the zero-sum projection",
     .change = set<&Schedule::zero_sum, ZeroSum::uniform>},
    {.name = "zero_sum_weighted",
     .description =
         "the row sum of the cast score gradient is taken off dq and dk, spread over the keys by probability",
     .source = zero_sum_law,
     .topic = "the zero-sum projection",
     .change = set<&Schedule::zero_sum, ZeroSum::weighted>},
    {.name = "zero_sum_largest",
     .description = "the row sum of the cast score gradient is taken off its largest element, which stays in fp32",
     .source = zero_sum_law,
     .topic = "the zero-sum projection",
     .change = set<&Schedule::zero_sum, ZeroSum::largest>},
    {.name = "key_centering",
     .description = "dq is the score gradient times (k - mean k), rounded to k_cast's format again",
     .source = "sum_j ds_ij = 0; smoothing of K in SageAttention, arXiv 2410.02367",
     .topic = "the keys that dq is made of",
     .change = set<&Schedule::key_centering, true>},
    {.name = "stochastic_rounding",
     .description = "the named sites round stochastically: no bias, more noise",
     .source = "arXiv 2502.20566",
     .topic = "stochastic rounding",
     .arguments = Arguments::sites,
     .change = stochastic_rounding},
    {.name = "fp32_backward",
     .description =
         "the backward in fp32 with sequential sums, delta from P and dP over rowsum(P), in the named layers or all",
     .source = "arXiv 2510.04212, table of isolations",
     .topic = "delta",
     .arguments = Arguments::layers,
     .change = fp32_backward},
    {.name = "fp32_forward_o",
     .description = "O is kept and stored in fp32",
     .source = "arXiv 2510.04212, section 3: O in fp32 in the forward",
     .topic = "the stored O",
     .change = fp32_forward_o},
    {.name = "two_sum",
     .description = "two row sums: of the cast P for the output, of the uncast P for lse",
     .source = "flash-attention pull request 2721",
     .topic = "the row sum",
     .problem = needs_division_after_pv,
     .change = set<&Schedule::row_sum_adds, RowSumAdds::two_sums>},
    {.name = "rounded_row_sum",
     .description = "the row sum adds P after its cast",
     .source = "flash-attention pull request 2721",
     .topic = "the row sum",
     .problem = needs_division_after_pv,
     .change = set<&Schedule::row_sum_adds, RowSumAdds::rounded>},
    {.name = "qk_norm",
     .description = "each row of q and k over its root mean square before attention: another function",
     .source = "arXiv 2608.02091; query-key normalisation, arXiv 2010.04245",
     .topic = "the inputs",
     .changes_function = true,
     .change = [](RoundingPlan&, const Args&) {}},
};

}  // namespace

std::span<const CorrectionInfo> corrections() { return table; }

}  // namespace faultline
