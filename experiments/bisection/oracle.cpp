// SPDX-License-Identifier: Apache-2.0
#include <faultline/bisection/oracle.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include <fmt/format.h>

#include <faultline/attribution/layer_plan.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::bisection {
namespace {

using attribution::RunOutputs;

constexpr std::size_t sets_a_task = 8;  // that share one forward: tasks small enough for two threads to share

/// (value - plan)^2. Two NaNs, or infinities of one sign, are the same; a number is infinitely far from either.
long double apart_squared(double value, double plan) {
    if (value == plan || (std::isnan(value) && std::isnan(plan))) return 0;
    const long double apart = static_cast<long double>(value) - plan;
    return std::isfinite(apart) ? apart * apart : std::numeric_limits<long double>::infinity();
}

constexpr TruthOptions certified{.correctly_rounded = false};  // bounds, without deciding every last bit

RoundingPlan exact_of(const RoundingPlan& plan) {
    RoundingPlan exact = plan;
    for (const Site site : plan.rounding_sites()) exact.set(site, Rule{});
    return exact;
}

}  // namespace

Oracle::Oracle(const Capture& capture, const RoundingPlan& plan, const BisectionOptions& options,
               const std::vector<Target>& targets, BisectionKind kind)
    : options_(options), targets_(targets), kind_(kind), count_(options.progress, options.cancelled) {
    for (const LayerCapture& layer : capture.layers) {
        LayerPlan named{&layer, for_layer(plan, layer), {}};
        for (const Target& target : targets) {
            if (target.layer != layer.name) continue;
            if (target.output != Output::o && layer.dout.empty())
                throw RequestError(fmt::format(
                    "{}: {}: the layer has no \"{}.do\": expected it for {}, or a target on o",
                    escaped(capture.path, capture.path.size()), target.text, layer.name, name(target.output)));
            if (std::count(named.outputs.begin(), named.outputs.end(), target.output) == 0)
                named.outputs.push_back(target.output);
        }
        if (named.outputs.empty()) continue;
        const std::string problem = problem_with(named.plan);
        if (!problem.empty()) throw RequestError(fmt::format("plan \"{}\": {}", plan.name, problem));
        if (const std::string cannot = problem_with(named.plan, layer.extras()); !cannot.empty())
            throw RequestError(fmt::format("{}: {}", escaped(layer.name), cannot));
        layers_.push_back(std::move(named));
    }
    choose_sites();
    try {
        prepare_units();
    } catch (const NoRoom& error) {
        throw NoRoom(fmt::format("{}: {}", escaped(capture.path, capture.path.size()), error.what()));
    }
}

void Oracle::choose_sites() {
    for (const SiteInfo& site : faultline::sites()) {
        bool rounds = false, touches = false;
        for (const LayerPlan& layer : layers_) {
            if (layer.plan[site.site].is_exact() || !takes_part(site.site, layer.layer->extras())) continue;
            rounds = true;
            for (const Output output : layer.outputs) touches = touches || can_touch(layer.plan, site.site, output);
        }
        if (!rounds) continue;
        if (touches && site.pass != Pass::backward) forward_sites_ |= SiteMask{1} << sites_.size();
        (touches ? sites_ : untouched_).push_back(site.site);
    }
}

void Oracle::prepare_units() {
    for (std::size_t l = 0; l < layers_.size(); ++l)
        for (attribution::Group& group : attribution::groups_of(*layers_[l].layer, options_.heads, options_.seed)) {
            Unit unit;
            unit.layer = l;
            unit.group = std::move(group);
            units_.push_back(std::move(unit));
        }
    for (const Unit& unit : units_) {
        const LayerPlan& layer = layers_[unit.layer];
        attribution::expect_room(layer.layer->name, {unit.group}, layer.plan, *options_.backend);
        attribution::expect_room_for_truth(layer.layer->name, {unit.group}, *options_.backend);
    }
    count_.expect(units_.size());
    parallel_for(units_.size(), options_.threads, [&](std::size_t u) {
        Unit& unit = units_[u];
        const LayerPlan& layer = layers_[unit.layer];
        unit.truth = options_.backend->truth(unit.group.problem, certified);
        unit.plan = attribution::run_plan(unit.group, layer.plan, nullptr, *options_.backend);
        unit.direction = attribution::mean_key_direction(unit.group);
        for (const Output output : layer.outputs) {
            long double& squares = unit.plan_error_squared[static_cast<std::size_t>(output)];
            for (const double e : attribution::error_vector(unit.plan[output], unit.truth, output))
                if (std::isfinite(e)) squares += static_cast<long double>(e) * e;
        }
        count_.step(layer.layer->name + ": truth and plan");
    });
}

RoundingPlan Oracle::plan_of(const LayerPlan& layer, SiteMask set) const {
    RoundingPlan plan = kind_ == BisectionKind::repair ? layer.plan : exact_of(layer.plan);
    for (std::size_t i = 0; i < sites_.size(); ++i)
        if ((set >> i & 1) != 0) plan.set(sites_[i], kind_ == BisectionKind::repair ? Rule{} : layer.plan[sites_[i]]);
    return plan;
}

Oracle::UnitSums Oracle::measure(const Unit& unit, const RunOutputs& run) const {
    UnitSums sums;
    for (const Output output : layers_[unit.layer].outputs) {
        const auto o = static_cast<std::size_t>(output);
        sums.errors[o] = attribution::errors_of(run[output], unit.truth, output, unit.direction);
        for (std::size_t m = 0; m < run[output].size(); ++m)
            for (std::size_t a = 0; a < run[output][m].values.size(); ++a)
                sums.distance_squared[o] += apart_squared(run[output][m].values[a], unit.plan[output][m].values[a]);
    }
    return sums;
}

std::vector<Oracle::PlanValue> Oracle::values_of(const std::vector<const UnitSums*>& by_unit) const {
    std::vector<PlanValue> values;
    for (const Target& target : targets_) {
        const auto o = static_cast<std::size_t>(target.output);
        ErrorSums sums;
        long double distance = 0, plan_error = 0;
        bool first = true;
        for (std::size_t u = 0; u < units_.size(); ++u) {
            if (layers_[units_[u].layer].layer->name != target.layer) continue;
            if (first)
                sums = by_unit[u]->errors[o];
            else
                sums.join(by_unit[u]->errors[o]);
            first = false;
            distance += by_unit[u]->distance_squared[o];
            plan_error += units_[u].plan_error_squared[o];
        }
        const long double relative = distance == 0 ? 0 : std::sqrt(distance / plan_error);
        const ErrorMeasure measure = sums.measure();
        values.push_back(
            {value_of(target, measure, static_cast<double>(relative)), measure.nonfinite, measure.error_norm, {}, {}});
    }
    return values;
}

std::vector<Oracle::PlanValue> Oracle::plan_values() const {
    std::vector<UnitSums> sums;
    for (const Unit& unit : units_) sums.push_back(measure(unit, unit.plan));
    std::vector<const UnitSums*> by_unit;
    for (const UnitSums& s : sums) by_unit.push_back(&s);
    std::vector<PlanValue> values = values_of(by_unit);
    for (std::size_t t = 0; t < targets_.size(); ++t) {
        WideReal norm, bound;  // squared
        for (const Unit& unit : units_) {
            if (layers_[unit.layer].layer->name != targets_[t].layer) continue;
            for (std::size_t m = 0; m < unit.plan[targets_[t].output].size(); ++m) {
                const CertifiedMatrix& truth = attribution::truth_of(unit.truth, targets_[t].output, m);
                const WideReal n = frobenius_norm(truth), b = frobenius_bound(truth);
                norm = norm + n * n;
                bound = bound + b * b;
            }
        }
        values[t].truth_norm = sqrt(norm);
        values[t].truth_bound = sqrt(bound);
    }
    return values;
}

std::vector<std::vector<WideReal>> Oracle::values(const std::vector<SiteMask>& sets) const {
    // Sets that leave the forward the same, a few at a time.
    std::map<SiteMask, std::vector<std::size_t>> by_forward;
    for (std::size_t i = 0; i < sets.size(); ++i) by_forward[sets[i] & forward_sites_].push_back(i);
    std::vector<std::vector<std::size_t>> chunks;
    for (const auto& [forward, list] : by_forward)
        for (std::size_t i = 0; i < list.size(); i += sets_a_task)
            chunks.emplace_back(list.begin() + static_cast<std::ptrdiff_t>(i),
                                list.begin() + static_cast<std::ptrdiff_t>(std::min(i + sets_a_task, list.size())));
    count_.expect(sets.size() * units_.size());
    std::vector<std::vector<UnitSums>> sums(sets.size(), std::vector<UnitSums>(units_.size()));
    parallel_for(
        chunks.size() * units_.size(), options_.backend->calls_at_once(options_.threads), [&](std::size_t task) {
            const std::vector<std::size_t>& chunk = chunks[task / units_.size()];
            const std::size_t u = task % units_.size();
            const Unit& unit = units_[u];
            const LayerPlan& layer = layers_[unit.layer];
            const bool backward = std::any_of(layer.outputs.begin(), layer.outputs.end(),
                                              [](Output output) { return output != Output::o; });
            const GroupForward forward =
                options_.backend->forward(unit.group.inputs, plan_of(layer, sets[chunk.front()]), nullptr);
            RunOutputs run;
            for (const HeadForward& head : forward.heads)
                run.outputs[static_cast<std::size_t>(Output::o)].push_back(head.o);
            for (const std::size_t i : chunk) {
                if (backward)
                    attribution::keep_gradients(
                        options_.backend->backward(unit.group.inputs, forward, plan_of(layer, sets[i]), nullptr), run);
                sums[i][u] = measure(unit, run);
                count_.step(fmt::format("{}: sets of {} sites", layer.layer->name, std::popcount(sets[i])));
            }
        });
    std::vector<std::vector<WideReal>> values;
    for (const std::vector<UnitSums>& by_unit : sums) {
        std::vector<const UnitSums*> pointers;
        for (const UnitSums& s : by_unit) pointers.push_back(&s);
        std::vector<WideReal>& of_set = values.emplace_back();
        for (const PlanValue& value : values_of(pointers)) of_set.push_back(value.value);
    }
    return values;
}

}  // namespace faultline::bisection
