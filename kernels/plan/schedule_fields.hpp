// SPDX-License-Identifier: Apache-2.0
// The fields of Schedule and their enumerators by name: one list from which plans are read, written and compared.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include <faultline/plan/schedule.hpp>

namespace faultline {

template <class E>
struct EnumeratorName {
    E value;
    std::string_view name;  ///< the enumerator as it is spelled in schedule.hpp, and in plans
};

/// All enumerators of a schedule enumeration, in the order of its declaration: enumerators<Order>().
template <class E>
[[nodiscard]] constexpr auto enumerators() = delete;

template <>
[[nodiscard]] constexpr auto enumerators<Order>() {
    using enum Order;
    return std::to_array<EnumeratorName<Order>>({{ascending, "ascending"}, {descending, "descending"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<ScaleAt>() {
    using enum ScaleAt;
    return std::to_array<EnumeratorName<ScaleAt>>({{exponent, "exponent"}, {scores, "scores"}, {inputs, "inputs"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<ExpBase>() {
    using enum ExpBase;
    return std::to_array<EnumeratorName<ExpBase>>({{two, "two"}, {e, "e"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<Functions>() {
    using enum Functions;
    return std::to_array<EnumeratorName<Functions>>({{correctly_rounded, "correctly_rounded"}, {hopper, "hopper"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<ArgumentForm>() {
    using enum ArgumentForm;
    return std::to_array<EnumeratorName<ArgumentForm>>(
        {{fused, "fused"}, {unfused, "unfused"}, {subtract_then_scale, "subtract_then_scale"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<MaxPolicy>() {
    using enum MaxPolicy;
    return std::to_array<EnumeratorName<MaxPolicy>>({{exact, "exact"}, {lazy, "lazy"}, {stable, "stable"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<RowSumAdds>() {
    using enum RowSumAdds;
    return std::to_array<EnumeratorName<RowSumAdds>>(
        {{unrounded, "unrounded"}, {rounded, "rounded"}, {two_sums, "two_sums"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<RowSumOrder>() {
    using enum RowSumOrder;
    return std::to_array<EnumeratorName<RowSumOrder>>({{sequential, "sequential"},
                                                       {pairwise, "pairwise"},
                                                       {quad, "quad"},
                                                       {warp_of_32, "warp_of_32"},
                                                       {mod_8, "mod_8"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<Normalize>() {
    using enum Normalize;
    return std::to_array<EnumeratorName<Normalize>>(
        {{after_pv, "after_pv"}, {before_pv, "before_pv"}, {each_tile, "each_tile"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<Division>() {
    using enum Division;
    return std::to_array<EnumeratorName<Division>>({{divide, "divide"}, {reciprocal, "reciprocal"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<Carry>() {
    using enum Carry;
    return std::to_array<EnumeratorName<Carry>>({{chained, "chained"}, {added, "added"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<DeltaFrom>() {
    using enum DeltaFrom;
    return std::to_array<EnumeratorName<DeltaFrom>>(
        {{o, "o"}, {o_unrounded, "o_unrounded"}, {p_dp, "p_dp"}, {p_dp_normalized, "p_dp_normalized"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<DeltaOrder>() {
    using enum DeltaOrder;
    return std::to_array<EnumeratorName<DeltaOrder>>(
        {{sequential, "sequential"}, {octets, "octets"}, {octet_pairs, "octet_pairs"}, {mod_8, "mod_8"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<LseForm>() {
    using enum LseForm;
    return std::to_array<EnumeratorName<LseForm>>({{natural, "natural"}, {log2, "log2"}, {log2_sum, "log2_sum"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<LseIn>() {
    using enum LseIn;
    return std::to_array<EnumeratorName<LseIn>>({{argument, "argument"}, {accumulator, "accumulator"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<DeltaIn>() {
    using enum DeltaIn;
    return std::to_array<EnumeratorName<DeltaIn>>({{difference, "difference"}, {accumulator, "accumulator"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<DsP>() {
    using enum DsP;
    return std::to_array<EnumeratorName<DsP>>({{unrounded, "unrounded"}, {cast, "cast"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<DsScale>() {
    using enum DsScale;
    return std::to_array<EnumeratorName<DsScale>>({{after, "after"}, {before, "before"}, {after_cast, "after_cast"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<GroupReduce>() {
    using enum GroupReduce;
    return std::to_array<EnumeratorName<GroupReduce>>({{after_cast, "after_cast"}, {before_cast, "before_cast"}});
}
template <>
[[nodiscard]] constexpr auto enumerators<ZeroSum>() {
    using enum ZeroSum;
    return std::to_array<EnumeratorName<ZeroSum>>(
        {{none, "none"}, {uniform, "uniform"}, {weighted, "weighted"}, {largest, "largest"}});
}

/// "descending" of Order::descending; "?" for a value that is no enumerator.
template <class E>
requires requires { enumerators<E>(); }
[[nodiscard]] constexpr std::string_view name(E value) {
    constexpr auto all = enumerators<E>();
    for (const auto& entry : all)
        if (entry.value == value) return entry.name;
    return "?";
}

/// Calls visit(name, field) for every field of a Schedule (const or not), in the order of its declaration. A field is an
/// int, a double, a bool or one of the enumerations above. A field that is missing here does not compile: see
/// schedule_fields.cpp.
template <class S, class Visit>
constexpr void for_each_field(S& schedule, Visit&& visit) {
    visit("block_q", schedule.block_q);
    visit("block_k", schedule.block_k);
    visit("key_order", schedule.key_order);
    visit("key_splits", schedule.key_splits);
    visit("bwd_block_q", schedule.bwd_block_q);
    visit("bwd_block_k", schedule.bwd_block_k);
    visit("bwd_query_order", schedule.bwd_query_order);
    visit("bwd_key_order", schedule.bwd_key_order);
    visit("scale_at", schedule.scale_at);
    visit("exp_base", schedule.exp_base);
    visit("bwd_exp_base", schedule.bwd_exp_base);
    visit("functions", schedule.functions);
    visit("exp_poly_every", schedule.exp_poly_every);
    visit("exp_poly_count", schedule.exp_poly_count);
    visit("exp_poly_skip", schedule.exp_poly_skip);
    visit("argument", schedule.argument);
    visit("bwd_argument", schedule.bwd_argument);
    visit("lse_in", schedule.lse_in);
    visit("rescale_argument", schedule.rescale_argument);
    visit("max_policy", schedule.max_policy);
    visit("sink_in_max", schedule.sink_in_max);
    visit("max_threshold", schedule.max_threshold);
    visit("max_offset", schedule.max_offset);
    visit("stable_beta", schedule.stable_beta);
    visit("stable_tolerance", schedule.stable_tolerance);
    visit("row_sum_adds", schedule.row_sum_adds);
    visit("row_sum_order", schedule.row_sum_order);
    visit("normalize", schedule.normalize);
    visit("division", schedule.division);
    visit("lse_form", schedule.lse_form);
    visit("pv_carry", schedule.pv_carry);
    visit("dq_carry", schedule.dq_carry);
    visit("dkv_carry", schedule.dkv_carry);
    visit("p_saved", schedule.p_saved);
    visit("delta_from", schedule.delta_from);
    visit("delta_order", schedule.delta_order);
    visit("delta_threads", schedule.delta_threads);
    visit("delta_in", schedule.delta_in);
    visit("ds_p", schedule.ds_p);
    visit("ds_scale", schedule.ds_scale);
    visit("group_reduce", schedule.group_reduce);
    visit("zero_sum", schedule.zero_sum);
    visit("key_centering", schedule.key_centering);
}

/// The names of the fields, in the same order.
[[nodiscard]] std::span<const std::string_view> schedule_field_names();

}  // namespace faultline
