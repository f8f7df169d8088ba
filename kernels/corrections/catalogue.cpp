// SPDX-License-Identifier: Apache-2.0
// The corrections that there are, and what each changes. A new one is an entry here: docs/adding-a-correction.md.
#include <array>
#include <limits>

#include <faultline/corrections/correction.hpp>

namespace faultline {
namespace {

using Args = CorrectionArguments;

constexpr std::string_view paper = "arXiv 2510.04212";
constexpr std::string_view law = "sum_j ds_ij = 0 in exact arithmetic";

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
void delta_from_p_dp(RoundingPlan& plan) {
    plan.schedule.delta_from = DeltaFrom::p_dp;
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
}

void delta_exact(RoundingPlan& plan, const Args&) {
    plan.set(Site::delta, Rule{});
    if (plan.schedule.delta_from == DeltaFrom::o) plan.schedule.delta_from = DeltaFrom::o_unrounded;
}

void stochastic_rounding(RoundingPlan& plan, const Args& args) {
    for (const Site site : args.sites) {
        Rule rule = plan[site];
        rule.rounding = Rounding::stochastic;
        plan.set(site, rule);
    }
}

/// A site of the backward's arithmetic in fp32: narrower formats widened, matrix units replaced by fp32 sums. With `always`
/// also a site that is exact because the plan does not come by it.
void in_fp32(RoundingPlan& plan, Site site, bool always) {
    widen(plan, site);
    Rule rule = plan[site];
    const bool is_unit = rule.accumulation.kind == Accumulation::Kind::fused;
    if (is_unit || (always && info(site).accumulates)) rule.accumulation = fp32_sequential;
    if (always && is_exact(rule.format)) rule.format = fp32;
    plan.set(site, rule);
}

/// dq, dk and dv keep the formats in which they are stored: what leaves the kernel is the model's choice.
bool is_output(Site site) {
    return site == Site::dq_cast || site == Site::dk_cast || site == Site::dv_cast || site == Site::kv_group_reduce;
}

void fp32_backward(RoundingPlan& plan, const Args&) {
    // A backward that read a stored p recomputes it, through sites that the plan's own backward does not come by.
    constexpr std::array recomputed{Site::bwd_s_accumulate, Site::bwd_s_scale, Site::bwd_exp_argument, Site::bwd_exp};
    const bool p_was_saved = plan.schedule.p_saved;
    plan.schedule.p_saved = false;
    for (const SiteInfo& site : sites())
        if (site.pass == Pass::backward && !is_output(site.site)) in_fp32(plan, site.site, false);
    if (p_was_saved)
        for (const Site site : recomputed) in_fp32(plan, site, true);
    delta_from_p_dp(plan);
}

void fp32_forward_o(RoundingPlan& plan, const Args&) {
    for (const Site site : {Site::o_rescale, Site::pv_accumulate, Site::o_normalize, Site::partial_o_cast, Site::merge, Site::o_cast})
        widen(plan, site);
}

const std::vector<CorrectionInfo>& table() {
    static const std::vector<CorrectionInfo> entries = [] {
        std::vector<CorrectionInfo> t;
        t.push_back({"stable_max", "repeated row maxima are shifted so that no probability is exactly 1", "arXiv 2510.04212, algorithm 1", "max",
                     Arguments::numbers,
                     {{"beta", 7, 1, "a factor above 1 on a positive repeated maximum"},
                      {"tolerance", 1e-3, below_zero, "a distance in logits, 0 or more, at which a score repeats the maximum"}},
                     false, stable_max});
        t.push_back({"subtract_then_scale", "the exponent's argument is (s - m) scale: exactly 0 at the maximum",
                     "torch-mojo-backend pull request 398; FlashMLA pull request 68", "argument", Arguments::none, {}, false,
                     [](RoundingPlan& plan, const Args&) { set_argument(plan, ArgumentForm::subtract_then_scale); }});
        t.push_back({"unfused", "the exponent's argument is round(s scale) - round(m scale): exactly 0 at the maximum",
                     "UNFUSE_FMA of FlashAttention-2, csrc/flash_attn/src/softmax.h:85", "argument", Arguments::none, {}, false,
                     [](RoundingPlan& plan, const Args&) { set_argument(plan, ArgumentForm::unfused); }});
        t.push_back({"o_fp32_delta", "delta is made of O before its cast", paper, "delta", Arguments::none, {}, false,
                     [](RoundingPlan& plan, const Args&) { plan.schedule.delta_from = DeltaFrom::o_unrounded; }});
        t.push_back({"delta_p_dp", "delta = rowsum(P o dP) of the backward's own P and dP, in fp32", paper, "delta", Arguments::none, {},
                     false, [](RoundingPlan& plan, const Args&) { delta_from_p_dp(plan); }});
        t.push_back({"delta_exact", "delta's dot product is exact, of O before its cast (or of P and dP where the plan takes those)", paper,
                     "delta", Arguments::none, {}, false, delta_exact});
        const auto zero_sum = [](ZeroSum kind) {
            return [kind](RoundingPlan& plan, const Args&) { plan.schedule.zero_sum = kind; };
        };
        t.push_back({"zero_sum_uniform", "the row sum of the cast score gradient is taken off dq and dk, spread evenly over the keys", law,
                     "zero_sum", Arguments::none, {}, false, zero_sum(ZeroSum::uniform)});
        t.push_back({"zero_sum_weighted", "the same, spread over the keys by their probability", law, "zero_sum", Arguments::none, {}, false,
                     zero_sum(ZeroSum::weighted)});
        t.push_back({"zero_sum_largest", "the same, put on the largest element of the row, which stays in fp32", law, "zero_sum",
                     Arguments::none, {}, false, zero_sum(ZeroSum::largest)});
        t.push_back({"key_centering", "dq is the score gradient times (k - mean k)", "SageAttention's K smoothing, arXiv 2410.02367",
                     "key_centering", Arguments::none, {}, false, [](RoundingPlan& plan, const Args&) { plan.schedule.key_centering = true; }});
        t.push_back({"stochastic_rounding", "the named sites round stochastically", "arXiv 2502.20566", "stochastic_rounding", Arguments::sites,
                     {}, false, stochastic_rounding});
        t.push_back({"fp32_backward", "the backward in fp32 with sequential sums, delta from P and dP, in the named layers or all", paper,
                     "delta", Arguments::layers, {}, false, fp32_backward});
        t.push_back({"fp32_forward_o", "O is kept and stored in fp32", paper, "forward_o", Arguments::none, {}, false, fp32_forward_o});
        t.push_back({"two_sum", "two row sums: of the cast P for the output, of the uncast P for lse", "flash-attention pull request 2721",
                     "row_sum", Arguments::none, {}, false,
                     [](RoundingPlan& plan, const Args&) { plan.schedule.row_sum_adds = RowSumAdds::two_sums; }});
        t.push_back({"rounded_row_sum", "the row sum adds P after its cast", "flash-attention pull request 2721, its simpler form", "row_sum",
                     Arguments::none, {}, false,
                     [](RoundingPlan& plan, const Args&) { plan.schedule.row_sum_adds = RowSumAdds::rounded; }});
        t.push_back({"qk_norm", "each row of q and k over its root mean square before attention: another function", "arXiv 2010.04245",
                     "inputs", Arguments::none, {}, true, [](RoundingPlan&, const Args&) {}});
        return t;
    }();
    return entries;
}

}  // namespace

std::span<const CorrectionInfo> corrections() { return table(); }

}  // namespace faultline
