// SPDX-License-Identifier: Apache-2.0
// Plans for the tests of the device's form: small tiles, and plans drawn at random.
#pragma once

#include <random>

#include <faultline/plan/presets.hpp>
#include <faultline/tensor_core/accumulate.hpp>

#include "heads.hpp"

namespace faultline::testing {

/// Tiles small enough that heads of some tens of rows have several.
inline RoundingPlan with_small_tiles(RoundingPlan plan, int block_q = 8, int block_k = 16) {
    plan.tiles.clear();
    Schedule& s = plan.schedule;
    if (s.block_q > 0) s.block_q = block_q;
    if (s.block_k > 0) s.block_k = block_k;
    if (s.bwd_block_q > 0) s.bwd_block_q = block_k;
    if (s.bwd_block_k > 0) s.bwd_block_k = block_q;
    return plan;
}

/// Softcap, sinks and dropout as far as the plan can run them. kind: the first three bits say which.
inline Head with_extras(Head head, const RoundingPlan& plan, unsigned kind) {
    const auto can = [&](const Extras& extras) { return problem_with(plan, extras).empty(); };
    if ((kind & 1) != 0 && can({true, false, false})) head.softcap = 3.0;
    if ((kind & 2) != 0 && can({head.softcap > 0, true, false}))
        for (std::size_t h = 0; h < head.q.size(); ++h) head.sink.push_back(h == 0 ? 0.75 : -2.5);
    if ((kind & 4) != 0 && can({head.softcap > 0, !head.sink.empty(), true})) head.drop(0.8, 5);
    return head;
}

template <class E>
E one_of(std::mt19937_64& random, std::initializer_list<E> values) {
    return values.begin()[random() % values.size()];
}

/// A plan drawn at random; many are none, and find_problem says so.
inline RoundingPlan drawn(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    RoundingPlan plan = presets()[random() % presets().size()];
    plan.tiles.clear();
    Schedule& s = plan.schedule;
    const auto block = [&] { return one_of(random, {0, 5, 8, 16}); };
    s.block_q = block();
    s.block_k = block();
    s.bwd_block_q = block();
    s.bwd_block_k = block();
    s.key_splits = one_of(random, {1, 1, 1, 2, 3});
    s.key_order = one_of(random, {Order::ascending, Order::descending});
    s.bwd_key_order = one_of(random, {Order::ascending, Order::descending});
    s.bwd_query_order = one_of(random, {Order::ascending, Order::descending});
    s.scale_at = one_of(random, {ScaleAt::exponent, ScaleAt::scores, ScaleAt::inputs});
    s.exp_base = one_of(random, {ExpBase::two, ExpBase::e});
    s.bwd_exp_base = one_of(random, {ExpBase::two, ExpBase::e});
    s.functions = one_of(random, {Functions::correctly_rounded, Functions::hopper});
    s.exp_poly_every = one_of(random, {0, 0, 16});
    s.argument = one_of(random, {ArgumentForm::fused, ArgumentForm::unfused, ArgumentForm::subtract_then_scale});
    s.bwd_argument = one_of(random, {ArgumentForm::fused, ArgumentForm::unfused, ArgumentForm::subtract_then_scale});
    s.lse_in = one_of(random, {LseIn::argument, LseIn::accumulator});
    s.rescale_argument =
        one_of(random, {ArgumentForm::fused, ArgumentForm::unfused, ArgumentForm::subtract_then_scale});
    s.max_policy = one_of(random, {MaxPolicy::exact, MaxPolicy::lazy, MaxPolicy::stable});
    s.max_offset = one_of(random, {0.0, 0.0, 8.0});
    s.row_sum_adds = one_of(random, {RowSumAdds::unrounded, RowSumAdds::rounded, RowSumAdds::two_sums});
    s.row_sum_order = one_of(random, {RowSumOrder::sequential, RowSumOrder::pairwise, RowSumOrder::quad,
                                      RowSumOrder::warp_of_32, RowSumOrder::mod_8});
    s.normalize =
        one_of(random, {Normalize::after_pv, Normalize::after_pv, Normalize::before_pv, Normalize::each_tile});
    s.division = one_of(random, {Division::divide, Division::reciprocal});
    s.lse_form = one_of(random, {LseForm::natural, LseForm::log2, LseForm::log2_sum});
    for (Carry* carry : {&s.pv_carry, &s.dq_carry, &s.dkv_carry})
        *carry = one_of(random, {Carry::chained, Carry::added});
    s.p_saved = one_of(random, {false, false, true});
    s.delta_from = one_of(random, {DeltaFrom::o, DeltaFrom::o_unrounded, DeltaFrom::p_dp, DeltaFrom::p_dp_normalized});
    s.delta_order =
        one_of(random, {DeltaOrder::sequential, DeltaOrder::octets, DeltaOrder::octet_pairs, DeltaOrder::mod_8});
    s.delta_threads = one_of(random, {1, 2, 8, 16});
    s.delta_in = one_of(random, {DeltaIn::difference, DeltaIn::accumulator});
    s.ds_p = one_of(random, {DsP::unrounded, DsP::cast});
    s.ds_scale = one_of(random, {DsScale::after, DsScale::before, DsScale::after_cast});
    s.group_reduce = one_of(random, {GroupReduce::after_cast, GroupReduce::before_cast});
    s.zero_sum = one_of(random, {ZeroSum::none, ZeroSum::uniform, ZeroSum::weighted, ZeroSum::largest});
    s.key_centering = one_of(random, {false, true});
    // What cannot stand together mostly does not, so that few of the plans are none.
    const bool log2_units = s.exp_base == ExpBase::two && s.scale_at == ScaleAt::exponent;
    if (s.normalize == Normalize::each_tile) {
        s.scale_at = ScaleAt::exponent;
        if (s.row_sum_adds == RowSumAdds::two_sums) s.row_sum_adds = RowSumAdds::rounded;
    }
    if (s.normalize == Normalize::before_pv) s.block_k = 0;
    if (s.normalize != Normalize::before_pv) s.p_saved = false;
    if (s.normalize != Normalize::after_pv) s.key_splits = 1;
    if (!log2_units || s.normalize != Normalize::after_pv) s.max_offset = 0;
    if (!log2_units || s.normalize == Normalize::each_tile) s.lse_form = LseForm::natural;
    if (!log2_units && s.max_policy == MaxPolicy::lazy) s.max_policy = MaxPolicy::stable;
    if (s.exp_base == ExpBase::e) s.exp_poly_every = 0;
    if (s.lse_in == LseIn::accumulator) s.bwd_argument = ArgumentForm::subtract_then_scale;
    if (s.scale_at != ScaleAt::exponent || s.p_saved) s.lse_in = LseIn::argument;
    if (needs_dp(s.delta_from)) s.delta_in = DeltaIn::difference;
    const auto units = accumulations();
    for (std::size_t at = 0; at < site_count; ++at) {
        const auto site = static_cast<Site>(at);
        Rule rule;
        rule.format = one_of(random, {exact, fp32, fp32, bf16, fp16, e4m3, tf32});
        rule.rounding = one_of(random, {Rounding::nearest_even, Rounding::nearest_even, Rounding::toward_zero,
                                        Rounding::stochastic, Rounding::upward});
        if (site == Site::delta || site == Site::row_sum)
            rule.accumulation = fp32_sequential;
        else if (info(site).accumulates)
            rule.accumulation = units[random() % units.size()].accumulation;
        if (random() % 2 == 0 && reaches(plan, site)) plan.set(site, rule);
    }
    for (std::size_t at = 0; at < site_count; ++at)
        if (!reaches(plan, static_cast<Site>(at))) plan.set(static_cast<Site>(at), Rule{});
    return plan;
}

}  // namespace faultline::testing
