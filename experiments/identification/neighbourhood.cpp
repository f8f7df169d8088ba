// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/neighbourhood.hpp>

#include <algorithm>

#include <faultline/plan/effect.hpp>
#include <faultline/plan/schedule_fields.hpp>

namespace faultline::identification {
namespace {

/// The plan as heads of this length tell it: a tile that holds all of them is the whole sequence, and a maximum that has no other
/// tile and no sink to lag behind is exact.
RoundingPlan told_by(const RoundingPlan& plan, const NeighbourhoodOptions& options) {
    RoundingPlan told = plan;
    Schedule& s = told.schedule;
    const auto whole = [](int& block, int length) {
        if (length > 0 && block >= length) block = 0;
    };
    whole(s.block_q, options.queries);
    whole(s.bwd_block_q, options.queries);
    whole(s.bwd_block_k, options.keys);
    if (s.exp_poly_every == 0) whole(s.block_k, options.keys);  // the polynomial's columns go by the tile, padded
    if (s.block_k == 0 && s.max_policy == MaxPolicy::lazy && !options.extras.sink) s.max_policy = MaxPolicy::exact;
    return comparable(told);
}

class Builder {
  public:
    Builder(const RoundingPlan& plan, const NeighbourhoodOptions& options)
        : plan_(plan), options_(options), told_{told_by(plan, options)} {}

    /// A change of the schedule.
    template <class Change>
    void schedule(const std::string& field, bool backward, Change change) {
        add(field, backward, [change](RoundingPlan& plan) { change(plan.schedule); });
    }

    template <class T>
    void values(const std::string& field, bool backward, T Schedule::*member, std::initializer_list<T> tried) {
        for (const T value : tried) schedule(field, backward, [member, value](Schedule& s) { s.*member = value; });
    }

    /// Every value of an enumeration.
    template <class E>
    void enumeration(const std::string& field, bool backward, E Schedule::*member) {
        for (const auto& entry : enumerators<E>()) values(field, backward, member, {entry.value});
    }

    void rule(Site site, const Rule& rule) {
        add(std::string(name(site)), info(site).pass == Pass::backward,
            [site, rule](RoundingPlan& plan) { plan.set(site, rule); });
    }

    void formats(Site site, std::initializer_list<Format> tried) {
        for (const Format& format : tried) {
            Rule changed = plan_[site];
            changed.format = format;
            rule(site, changed);
        }
    }

    /// The roundings that kernels have at a cast: to nearest, truncation of the bits that a narrower type lacks, stochastic.
    void roundings(Site site, const Format& format) {
        for (const Rounding rounding : {Rounding::nearest_even, Rounding::toward_zero, Rounding::stochastic}) {
            Rule changed = plan_[site];
            changed.format = format;
            changed.rounding = rounding;
            rule(site, changed);
        }
    }

    /// A cast to these formats: to another one than the plan's with each rounding, since where the plan casts to nothing
    /// narrower, a cast that cuts is a rule of its own, and the same one to nearest no step on the way there.
    void casts(Site site, std::initializer_list<Format> tried) {
        formats(site, tried);
        for (const Format& format : tried)
            if (format.precision < fp32.precision) roundings(site, format);
    }

    /// Every place of the scale in ds; scaled after the cast, it is cast again to the same format.
    void ds_scales() {
        for (const auto& entry : enumerators<DsScale>())
            add("ds_scale", true, [how = entry.value](RoundingPlan& plan) {
                plan.schedule.ds_scale = how;
                plan.set(Site::ds_scaled, how == DsScale::after_cast ? plan[Site::ds_cast] : Rule{});
            });
    }

    /// The same accumulation at all of these sites, those that the plan computes.
    void products(const std::string& field, const std::vector<Site>& which, const std::vector<Accumulation>& tried) {
        const bool backward =
            std::all_of(which.begin(), which.end(), [](Site s) { return info(s).pass == Pass::backward; });
        for (const Accumulation& accumulation : tried)
            add(field, backward, [which, accumulation](RoundingPlan& plan) {
                for (const Site site : which) {
                    if (plan.schedule.p_saved && site == Site::bwd_s_accumulate) continue;
                    Rule changed = plan[site];
                    changed.accumulation = accumulation;
                    plan.set(site, changed);
                }
            });
    }

    [[nodiscard]] const RoundingPlan& plan() const { return plan_; }
    [[nodiscard]] const NeighbourhoodOptions& options() const { return options_; }
    std::vector<Neighbour> take() { return std::move(neighbours_); }

  private:
    void add(const std::string& field, bool backward, std::function<void(RoundingPlan&)> apply) {
        if (backward && !options_.backward) return;
        RoundingPlan plan = plan_;
        apply(plan);
        if (plan.same_numerics(plan_) || !problem_with(plan).empty()) return;
        if (!problem_with(plan, options_.extras).empty()) return;
        RoundingPlan told = told_by(plan, options_);
        for (const RoundingPlan& other : told_)
            if (other.same_numerics(told)) return;
        told_.push_back(std::move(told));
        std::vector<Difference> changes = differences(plan_, plan);
        neighbours_.push_back({field, std::move(changes), std::move(plan), std::move(apply), backward});
    }

    const RoundingPlan& plan_;
    NeighbourhoodOptions options_;
    std::vector<RoundingPlan> told_;  ///< of the plan, then of each neighbour
    std::vector<Neighbour> neighbours_;
};

/// Units whose inputs have the range and bits of `like`'s, each value once, and the fp32 orders. A unit that no name stands
/// for, eight products at Hopper's width (mma.m16n8k8), is what PyTorch's memory-efficient attention runs.
std::vector<Accumulation> alternatives(const Accumulation& like) {
    using Kind = Accumulation::Kind;
    std::vector<Accumulation> all;
    const auto once = [&](const Accumulation& a) {
        if (std::find(all.begin(), all.end(), a) == all.end()) all.push_back(a);
    };
    const MatrixUnit inputs = like.kind == Kind::fused ? like.unit : find_accumulation("hopper-mma-bf16")->unit;
    for (const NamedAccumulation& named : accumulations()) {
        const MatrixUnit& unit = named.accumulation.unit;
        if (named.accumulation.kind != Kind::fused || unit.output != inputs.output) continue;
        if (unit.a_min_exponent == inputs.a_min_exponent && unit.b_min_exponent == inputs.b_min_exponent &&
            unit.input_fraction_bits == inputs.input_fraction_bits)
            once(named.accumulation);
    }
    Accumulation eight{Kind::fused, inputs};
    eight.unit.terms = 8;
    eight.unit.fraction_bits = 25;
    once(eight);
    for (const char* name : {"fp32-fma", "fp32-sequential", "fp32-pairwise"}) once(*find_accumulation(name));
    return all;
}

/// before_pv needs the whole row at once, and only then may the backward read the saved p.
void add_normalizations(Builder& out) {
    for (const auto& entry : enumerators<Normalize>())
        for (const bool saved : {false, true})
            out.schedule("normalize", false, [how = entry.value, saved](Schedule& s) {
                s.normalize = how;
                if (how == Normalize::before_pv) {
                    s.block_k = 0;
                    s.p_saved = saved;
                } else {
                    s.p_saved = false;
                    if (s.block_k == 0) s.block_k = 128;
                }
            });
}

/// A plan whose scores are scaled says nothing of how the exponent's argument would be: where the scale moves there, each form
/// is a neighbour.
void add_scales(Builder& out) {
    out.enumeration("scale_at", false, &Schedule::scale_at);
    if (out.plan().schedule.scale_at == ScaleAt::exponent) return;
    for (const auto& entry : enumerators<ArgumentForm>())
        out.schedule("scale_at", false, [form = entry.value](Schedule& s) {
            s.scale_at = ScaleAt::exponent;
            s.argument = s.bwd_argument = form;
        });
}

void add_forward(Builder& out) {
    out.enumeration("key_order", false, &Schedule::key_order);
    out.values("block_k", false, &Schedule::block_k, {32, 64, 128, 256, 0});
    out.values("key_splits", false, &Schedule::key_splits, {1, 2, 4, 8});
    add_scales(out);
    out.enumeration("exp_base", false, &Schedule::exp_base);
    out.enumeration("argument", false, &Schedule::argument);
    out.enumeration("rescale_argument", false, &Schedule::rescale_argument);
    out.enumeration("functions", false, &Schedule::functions);
    out.values("max_policy", false, &Schedule::max_policy, {MaxPolicy::exact, MaxPolicy::lazy});
    out.enumeration("row_sum_adds", false, &Schedule::row_sum_adds);
    out.enumeration("row_sum_order", false, &Schedule::row_sum_order);
    add_normalizations(out);
    out.enumeration("division", false, &Schedule::division);
    out.enumeration("lse_form", false, &Schedule::lse_form);
    out.enumeration("pv_carry", false, &Schedule::pv_carry);
}

/// An accumulator that starts at lse leaves a difference to be scaled, and no other form.
void add_backward_arguments(Builder& out) {
    for (const auto& entry : enumerators<ArgumentForm>())
        out.schedule("bwd_argument", true, [form = entry.value](Schedule& s) {
            s.bwd_argument = form;
            if (form != ArgumentForm::subtract_then_scale) s.lse_in = LseIn::argument;
        });
    for (const auto& entry : enumerators<LseIn>())
        out.schedule("bwd_argument", true, [where = entry.value](Schedule& s) {
            s.lse_in = where;
            if (where == LseIn::accumulator) s.bwd_argument = ArgumentForm::subtract_then_scale;
        });
}

void add_backward(Builder& out) {
    out.values("bwd_block_q", true, &Schedule::bwd_block_q, {32, 64, 128, 256, 0});
    out.values("bwd_block_k", true, &Schedule::bwd_block_k, {32, 64, 128, 256, 0});
    out.enumeration("bwd_query_order", true, &Schedule::bwd_query_order);
    out.enumeration("bwd_key_order", true, &Schedule::bwd_key_order);
    out.enumeration("bwd_exp_base", true, &Schedule::bwd_exp_base);
    add_backward_arguments(out);
    out.enumeration("dq_carry", true, &Schedule::dq_carry);
    out.enumeration("dkv_carry", true, &Schedule::dkv_carry);
    out.enumeration("delta_from", true, &Schedule::delta_from);
    out.values("delta_order", true, &Schedule::delta_order, {DeltaOrder::sequential, DeltaOrder::mod_8});
    for (const DeltaOrder order : {DeltaOrder::octets, DeltaOrder::octet_pairs})
        for (const int threads : {2, 4, 8, 16})
            out.schedule("delta_order", true, [order, threads](Schedule& s) {
                s.delta_order = order;
                s.delta_threads = threads;
            });
    out.enumeration("delta_in", true, &Schedule::delta_in);
    out.enumeration("ds_p", true, &Schedule::ds_p);
    out.ds_scales();
    if (out.options().grouped_heads) out.enumeration("group_reduce", true, &Schedule::group_reduce);
}

/// Where the plan stores something narrower than the fp32 that it computes in; inputs arrive in their type.
bool is_cast(const RoundingPlan& plan, Site site) {
    if (site == Site::q_cast || site == Site::k_cast || site == Site::v_cast || site == Site::do_cast) return false;
    return !is_exact(plan[site].format) && plan[site].format.precision < fp32.precision;
}

void add_rules(Builder& out) {
    const std::vector<Accumulation> tried = alternatives(out.plan()[Site::s_accumulate].accumulation);
    using enum Site;
    out.products(
        "products",
        {s_accumulate, pv_accumulate, bwd_s_accumulate, dp_accumulate, dv_accumulate, dk_accumulate, dq_accumulate},
        tried);
    out.products("score products", {s_accumulate, bwd_s_accumulate}, tried);
    out.products("pv_accumulate", {pv_accumulate}, tried);
    out.products("dp_accumulate", {dp_accumulate}, tried);
    out.products("gradient products", {dv_accumulate, dk_accumulate, dq_accumulate}, tried);
    for (const Site site : {Site::p_cast, Site::bwd_p_cast, Site::ds_cast}) out.casts(site, {bf16, fp16, fp32});
    for (const Site site : {Site::s_cast, Site::bwd_s_cast, Site::dp_cast}) out.formats(site, {bf16, fp32});
    for (const Site site : {Site::lse, Site::row_sum, Site::delta}) out.formats(site, {bf16, fp16, fp32});
    if (out.plan().schedule.key_splits > 1) out.formats(Site::partial_o_cast, {bf16, fp32});
    for (const Site site : out.plan().rounding_sites()) {
        if (!takes_part(site, out.options().extras)) continue;
        if (is_cast(out.plan(), site)) out.roundings(site, out.plan()[site].format);
        out.rule(site, Rule{});
    }
}

}  // namespace

std::vector<Neighbour> neighbours(const RoundingPlan& plan, const NeighbourhoodOptions& options) {
    Builder out(plan, options);
    add_forward(out);
    add_backward(out);
    add_rules(out);
    return out.take();
}

Neighbour together(const RoundingPlan& plan, const Neighbour& first, const Neighbour& second, const Extras& extras) {
    if (first.field == second.field) return {};
    RoundingPlan both = plan;
    first.apply(both);
    second.apply(both);
    if (!problem_with(both).empty() || !problem_with(both, extras).empty()) return {};
    if (same_effect(both, first.plan) || same_effect(both, second.plan)) return {};
    std::vector<Difference> changes = differences(plan, both);
    const auto apply = [one = first.apply, other = second.apply](RoundingPlan& target) {
        one(target);
        other(target);
    };
    return {first.field + " and " + second.field,        std::move(changes), std::move(both), apply,
            first.backward_only && second.backward_only, {first, second}};
}

std::vector<Neighbour> rounding_pairs(const RoundingPlan& plan, const std::vector<Neighbour>& singles,
                                      const std::vector<Site>& casts, const Extras& extras) {
    std::vector<Neighbour> pairs;
    for (const Neighbour& cast : singles)
        for (const Site site : casts) {
            if (cast.plan[site].rounding == plan[site].rounding || cast.plan[site].format != plan[site].format)
                continue;
            if (!plan.with(site, cast.plan[site]).same_numerics(cast.plan)) continue;
            for (const Neighbour& rule : singles) {
                if (rule.plan.schedule == plan.schedule || rule.backward_only != cast.backward_only) continue;
                Neighbour pair = together(plan, cast, rule, extras);
                if (!pair.field.empty()) pairs.push_back(std::move(pair));
            }
        }
    return pairs;
}

}  // namespace faultline::identification
