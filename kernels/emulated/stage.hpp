// SPDX-License-Identifier: Apache-2.0
// A team's way of passing a site: compute, round as the plan says, show the watch (Stage of kernels/cpu/stage.hpp). Whether a
// site is watched is one bit of the launch, the same for all threads: a second compilation of the kernel without a watch, as
// kernels/cpu has it, would save that test a tile and take nvcc's minutes twice.
#pragma once

#include <faultline/emulated/machine.hpp>
#include <faultline/emulated/product.hpp>
#include <faultline/emulated/rounding.hpp>
#include <faultline/emulated/watch.hpp>

namespace faultline::emulated {

template <class TeamType>
class Stage {
  public:
    using Team = TeamType;
    /// exact: memory for the largest tile, where any site is watched; scratch: for one number.
    FAULTLINE_HD Stage(const Team& team, const FlatPlan& plan, std::uint64_t seed, int layer, const Watch& watch,
                       double* exact, double* scratch)
        : team_(team), plan_(plan), seed_(seed), layer_(layer), watch_(watch), exact_(exact), scratch_(scratch) {}

    [[nodiscard]] FAULTLINE_HD const Team& team() const { return team_; }
    [[nodiscard]] FAULTLINE_HD const FlatPlan& plan() const { return plan_; }
    [[nodiscard]] FAULTLINE_HD const Rule& rule(Site site) const { return plan_[site]; }
    [[nodiscard]] FAULTLINE_HD bool is_exact_rule(Site site) const {
        return is_exact(plan_[site].format) && plan_[site].accumulation.kind == Accumulation::Kind::exact;
    }
    FAULTLINE_HD void show_as(Shown shown) { shown_ = shown; }
    [[nodiscard]] FAULTLINE_HD Shown shown() const { return shown_; }
    [[nodiscard]] FAULTLINE_HD bool watches(Site site) const { return watch_.sees(site, shown_); }

    /// t(i, j) <- exactly(x, i, j) where the rule is exact, else in_kernel(x, i, j), which is not yet rounded the last
    /// time, rounded; x is what the tile holds.
    template <class Kernel, class Exact>
    FAULTLINE_HD void pass(Site site, const Place& where, const View<double>& t, Kernel&& in_kernel, Exact&& exactly) {
        const bool exact_rule = is_exact_rule(site), seen = watches(site);
        const Rounder round = rounder(site, where);
        if (!seen) {
            each(team_, t.rows, t.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
                const double x = t(i, j);
                t(i, j) = exact_rule ? exactly(x, i, j) : round(in_kernel(x, i, j), where.counter(i, j));
            });
            return;
        }
        const View<double> exact = t.shaped_in(exact_);
        each(team_, t.rows, t.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            const double x = t(i, j), wanted = exactly(x, i, j);
            exact(i, j) = wanted;
            t(i, j) = exact_rule ? wanted : round(in_kernel(x, i, j), where.counter(i, j));
        });
        show(site, where, t, exact);
    }
    /// One site after the other, element by element where neither is watched.
    template <class Kernel, class Exact, class NextKernel, class NextExact>
    FAULTLINE_HD void pass(Site site, Kernel&& in_kernel, Exact&& exactly, Site next, NextKernel&& next_in_kernel,
                           NextExact&& next_exactly, const Place& where, const View<double>& t) {
        if (watches(site) || watches(next)) {
            pass(site, where, t, in_kernel, exactly);
            pass(next, where, t, next_in_kernel, next_exactly);
            return;
        }
        const bool exact_rule = is_exact_rule(site), next_exact_rule = is_exact_rule(next);
        const Rounder round = rounder(site, where), next_round = rounder(next, where);
        each(team_, t.rows, t.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            const std::uint64_t counter = where.counter(i, j);
            double x = t(i, j);
            x = exact_rule ? exactly(x, i, j) : round(in_kernel(x, i, j), counter);
            t(i, j) = next_exact_rule ? next_exactly(x, i, j) : next_round(next_in_kernel(x, i, j), counter);
        });
    }
    /// The tile holds the exact result; afterwards what the kernel has.
    FAULTLINE_HD_CALLED void pass(Site site, const Place& where, const View<double>& t) {
        if (watches(site)) {
            const View<double> exact = t.shaped_in(exact_);
            const Rounder round = rounder(site, where);
            each(team_, t.rows, t.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
                exact(i, j) = t(i, j);
                t(i, j) = round(t(i, j), where.counter(i, j));
            });
            show(site, where, t, exact);
        } else {
            round(site, where, t, t);
        }
    }
    /// t <- t + X Y in the site's order and width, or what `at` says; then the site's format.
    FAULTLINE_HD_CALLED void accumulate(Site site, const Place& where, const View<double>& t, const Operands& in,
                                        Begin::At at = Begin::At::c) {
        const Rule& rule = plan_[site];
        const bool seen = watches(site);
        const View<double> exact = t.shaped_in(exact_);
        if (at == Begin::At::added && is_exact_rule(site)) at = Begin::At::c;
        if (seen) {
            each(team_, t.rows, t.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) { exact(i, j) = t(i, j); });
            multiply(team_, exact_order(), in, exact, {at == Begin::At::zero ? at : Begin::At::c});
        }
        multiply(team_, rule.accumulation, in, t, {at, rule.format, nearest_for_stochastic(rule)});
        round(site, where, t, t);
        if (seen) show(site, where, t, exact);
    }
    /// to <- from in the site's format, shown to nobody.
    FAULTLINE_HD void round(Site site, const Place& where, const View<double>& from, const View<double>& to) const {
        if (is_exact(plan_[site].format) && from.data == to.data) return;
        const Rounder round = rounder(site, where);
        each(team_, from.rows, from.cols,
             [&](std::ptrdiff_t i, std::ptrdiff_t j) { to(i, j) = round(from(i, j), where.counter(i, j)); });
    }
    /// An intermediate rounding inside a site: to nearest where the site rounds stochastically.
    [[nodiscard]] FAULTLINE_HD double intermediate(Site site, double x) const {
        return rounded(x, plan_[site].format, nearest_for_stochastic(plan_[site]));
    }

    /// `value` and `exact` are a tile at a site that is watched.
    FAULTLINE_HD void show(Site site, const Place& where, const View<double>& value, const View<double>& exact) {
        watch_.show(team_, site, where, value, exact, shown_, scratch_);
    }
    /// Where exact results stand that are to be shown.
    [[nodiscard]] FAULTLINE_HD double* exact() const { return exact_; }

  private:
    [[nodiscard]] FAULTLINE_HD static Rounding nearest_for_stochastic(const Rule& rule) {
        return rule.rounding == Rounding::stochastic ? Rounding::nearest_even : rule.rounding;
    }
    [[nodiscard]] FAULTLINE_HD Rounder rounder(Site site, const Place& where) const {
        const Rule& rule = plan_[site];
        Rounder round{rule.format, rule.rounding, {}};
        if (rule.rounding == Rounding::stochastic)
            round.stream =
                RandomStream(seed_, static_cast<std::uint64_t>(layer_), static_cast<std::uint64_t>(where.head),
                             static_cast<std::size_t>(site),
                             (static_cast<std::uint64_t>(where.query0) << 32) | static_cast<std::uint64_t>(where.key0),
                             static_cast<std::uint64_t>(where.part));
        return round;
    }

    const Team& team_;
    const FlatPlan& plan_;
    std::uint64_t seed_;
    int layer_;
    Watch watch_;
    double *exact_, *scratch_;
    Shown shown_ = Shown::yes;
};

}  // namespace faultline::emulated
