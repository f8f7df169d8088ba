// SPDX-License-Identifier: Apache-2.0
#include <faultline/device/gradient_plan.hpp>

#include <cmath>
#include <cstdint>

#include <faultline/device/hidden_pairs.hpp>
#include <faultline/emulated/bf16_groups.hpp>

namespace faultline::device {

namespace {

bool is_float_format(const Format& f) {
    return is_exact(f) ? false : f.precision <= 24 && f.emin >= -126 && f.emax <= 127;
}
bool is_in_bf16(const Format& f) { return !is_exact(f) && f.precision <= 8 && f.emin >= -126 && f.emax <= 127; }

std::optional<Products> products_of(const Accumulation& a) {
    const MatrixUnit& u = a.unit;
    const bool bf16 = a.kind == Accumulation::Kind::fused && u.output == OutputFormat::f32_rz &&
                      u.a_min_exponent == -126 && u.b_min_exponent == -126 && u.input_fraction_bits == 0 &&
                      u.zero == ZeroOperand::ignored;
    if (bf16 && u.terms == 16 && u.fraction_bits == 25) return Products::sixteen;
    if (bf16 && u.terms == 8 && u.fraction_bits == 25) return Products::eight;
    if (bf16 && u.terms == emulated::groups::terms && u.fraction_bits == emulated::groups::fraction_bits)
        return Products::groups;
    return std::nullopt;
}

}  // namespace

std::optional<GradientRequest> gradient_request(const emulated::FlatPlan& plan, const emulated::HeadProblem& x) {
    const Schedule& s = plan.schedule;
    const std::optional<Products> products = products_of(plan[Site::bwd_s_accumulate].accumulation);
    if (!products) return std::nullopt;
    for (const Site site : {Site::dp_accumulate, Site::dq_accumulate, Site::dk_accumulate, Site::dv_accumulate})
        if (products_of(plan[site].accumulation) != products) return std::nullopt;
    const auto d = x.q.cols;
    const auto aligned = [](const emulated::View<const double>& v) {
        return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.stride % 2 == 0;
    };
    constexpr std::ptrdiff_t longest = 1 << 24;
    if ((d != 64 && d != 128) || x.v.cols != d || x.bias.data != nullptr || x.kept.data != nullptr ||
        x.scales.cap != 0 || x.k_for_dq.data != x.k.data || !aligned(x.q) || !aligned(x.k) || !aligned(x.v) ||
        !aligned(x.dout) || x.n_q() > longest || x.n_k() > longest)
        return std::nullopt;
    if (s.p_saved || s.zero_sum != ZeroSum::none || needs_dp(s.delta_from)) return std::nullopt;
    const auto cut_of = [&](Site site) {
        const Format& f = plan[site].format;
        return Cut{f, is_exact(f) || f.precision >= 53, 53 - f.precision};
    };
    GradientPlan g{};
    g.s_accumulate = cut_of(Site::bwd_s_accumulate), g.s_cast = cut_of(Site::bwd_s_cast);
    g.s_scale = cut_of(Site::bwd_s_scale), g.argument = cut_of(Site::bwd_exp_argument), g.exp = cut_of(Site::bwd_exp);
    g.dp_accumulate = cut_of(Site::dp_accumulate), g.dp_cast = cut_of(Site::dp_cast);
    g.p_cast = cut_of(Site::bwd_p_cast), g.ds = cut_of(Site::ds), g.ds_cast = cut_of(Site::ds_cast);
    g.ds_scaled = cut_of(Site::ds_scaled);
    g.dq = cut_of(Site::dq_accumulate), g.dk = cut_of(Site::dk_accumulate), g.dv = cut_of(Site::dv_accumulate);
    g.c = x.scales.bwd_exponent, g.gradient = x.scales.gradient, g.log2e = x.scales.log2e;
    g.natural = s.scale_at == ScaleAt::scores ? x.scales.natural : 1.0;
    if (!std::isfinite(g.gradient)) return std::nullopt;  // times the zeros of hidden pairs it is NaN
    g.largest_hidden =
        largest_of_hidden_pairs(plan[Site::ds].format, plan[Site::dp_accumulate].format, plan[Site::dp_cast].format);
    g.to_log2 = s.bwd_exp_base == ExpBase::two;
    g.scaled_before = s.scale_at != ScaleAt::exponent;
    g.scales = g.scaled_before && (g.natural != 1.0 || g.to_log2);
    const bool subtracts_raw = s.bwd_argument == ArgumentForm::subtract_then_scale && s.scale_at == ScaleAt::exponent;
    g.reference_is_scaled = !subtracts_raw;
    g.reference_in_sum = s.lse_in == LseIn::accumulator;
    g.subtracts_first = subtracts_raw;
    g.fused = s.bwd_argument == ArgumentForm::fused && !g.scaled_before;
    g.in_fp32 = emulated::is_fp32(plan[Site::bwd_exp_argument].format);
    g.base_two = s.bwd_exp_base == ExpBase::two;
    g.by_unit = g.base_two && s.functions == Functions::hopper;
    g.delta_in_sum = s.delta_in == DeltaIn::accumulator;
    g.ds_of_cast_p = s.ds_p == DsP::cast;
    g.scales_ds = s.ds_scale == DsScale::before && x.scales.gradient != 1.0;
    g.scales_cast_ds = s.ds_scale == DsScale::after_cast;
    g.causal = x.causal;
    g.dq_added = s.dq_carry == Carry::added, g.dkv_added = s.dkv_carry == Carry::added;
    g.n_q = static_cast<int>(x.n_q()), g.n_k = static_cast<int>(x.n_k());
    g.query_order = s.bwd_query_order, g.key_order = s.bwd_key_order;
    // Masked scores are minus infinity up to exp, which makes them 0.
    if (!(g.c > 0) || !(g.natural > 0)) return std::nullopt;
    for (const Site site : {Site::bwd_exp_argument, Site::bwd_exp, Site::ds}) {
        const Format& f = plan[site].format;
        if (!is_float_format(f) || !f.infinities || f.saturates) return std::nullopt;
    }
    if (g.scales && is_exact(plan[Site::bwd_s_scale].format)) return std::nullopt;
    if (!is_in_bf16(plan[Site::bwd_p_cast].format)) return std::nullopt;
    if (!is_in_bf16(plan[g.scales_cast_ds ? Site::ds_scaled : Site::ds_cast].format)) return std::nullopt;
    for (const Site site :
         {Site::bwd_s_accumulate, Site::bwd_s_cast, Site::bwd_s_scale, Site::bwd_exp_argument, Site::bwd_exp,
          Site::dp_accumulate, Site::dp_cast, Site::bwd_p_cast, Site::ds, Site::ds_cast, Site::ds_scaled,
          Site::dq_accumulate, Site::dk_accumulate, Site::dv_accumulate})
        if (plan[site].rounding != Rounding::nearest_even) return std::nullopt;
    // A chained sum stays in the accumulators; what rounds them between tiles is not here.
    const auto keeps = [&](Site site) {
        const Format& f = plan[site].format;
        return is_exact(f) || emulated::is_fp32(f);
    };
    if (!g.dq_added && !keeps(Site::dq_accumulate)) return std::nullopt;
    if (!g.dkv_added && !(keeps(Site::dk_accumulate) && keeps(Site::dv_accumulate))) return std::nullopt;
    // An exact rule adds in the accumulators whatever the carry says.
    const auto exact_added = [&](Site site) { return is_exact(plan[site].format); };
    if ((g.dq_added && exact_added(Site::dq_accumulate)) ||
        (g.dkv_added && (exact_added(Site::dk_accumulate) || exact_added(Site::dv_accumulate))))
        return std::nullopt;
    // One chain over tiles in ascending order is one tile, where no group of products ends early.
    const int terms = plan[Site::bwd_s_accumulate].accumulation.unit.terms;
    const auto merged = [&](int block, Carry carry, Order order) {
        return carry == Carry::chained && order == Order::ascending && block % terms == 0 ? 0 : block;
    };
    g.block_q = merged(s.bwd_block_q, s.dkv_carry, s.bwd_query_order);
    g.block_k = merged(s.bwd_block_k, s.dq_carry, s.bwd_key_order);
    return GradientRequest{g, *products};
}
}  // namespace faultline::device
